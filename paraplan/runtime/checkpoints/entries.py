"""What a checkpoint holds, entry by entry: tensors by their names, and texts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checkpoints.chunks import CheckpointChunks, ShardLocation
from paraplan.runtime.checkpoints.safe_reader import CheckpointError
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.optimizers.averages import ParameterAverage
from paraplan.runtime.optimizers.several import optimizers_in
from paraplan.runtime.optimizers.whole_tensors import stepped_whole
from paraplan.runtime.precision import LossScale

_HINT = "it is damaged; load an older one"
_MOST_STEPS = 2**62


@dataclass(frozen=True)
class Progress:
    """How far a training is: steps done, the plan that wrote it, the seed, and states of scheduler and loss scale.

    `num_averaged` steps are in the average of the parameters.
    """

    num_steps: int
    seed: int
    plan: ParallelPlan
    scheduler: dict[str, Any] | None
    loss_scale: dict[str, Any] | None
    num_averaged: int = 0


@dataclass(frozen=True)
class Options:
    """The options of the optimizer for one parameter, and the numbers in its state."""

    options: dict[str, Any]
    numbers: dict[str, Any]


def read_progress(values: torch.Tensor) -> Progress:
    """Return the progress that is written as bytes. Raises `CheckpointError` where it is none."""
    found = _object("progress", values)
    plan = found.get("plan")
    if not isinstance(plan, dict):
        raise _damaged("progress", "has no plan")
    try:
        checked = ParallelPlan.model_validate_json(json.dumps(plan))
    except ValueError as error:
        raise _damaged("progress", f"has a plan that contradicts itself: {str(error).splitlines()[-1]}") from error
    scale = _optional_object(found, "loss_scale")
    if scale is not None:
        _check_loss_scale(scale)
    return Progress(
        num_steps=_count(found, "num_steps"),
        seed=_count(found, "seed", least=-(2**64), limit=2**64),
        plan=checked,
        scheduler=_optional_object(found, "scheduler"),
        loss_scale=scale,
        num_averaged=_count(found, "num_averaged") if "num_averaged" in found else 0,
    )


def read_options(name: str, values: torch.Tensor) -> Options:
    """Return the options of parameter `name` that are written as bytes; pairs are tuples, as optimizers have them."""
    found = _object(f"options of {name}", values)
    options, numbers = found.get("options"), found.get("numbers")
    if not isinstance(options, dict) or not isinstance(numbers, dict) or "params" in options:
        raise _damaged(f"options of {name}", "are not those of an optimizer")
    for value in (*options.values(), *numbers.values()):
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, (list, dict)) for item in items):
            raise _damaged(f"options of {name}", "hold more than numbers, texts and lists of them")
    kept = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return Options(options=kept, numbers=numbers)


def check_kinds(what: str, saved: Mapping[str, Any], held: Mapping[str, Any], *, knows_all: bool = False) -> None:
    """Raise `CheckpointError` where a saved value is of another kind than the one held, as a text is for a number.

    With `knows_all` names that are not held are refused too.
    """
    for name, value in saved.items():
        if name not in held:
            if knows_all:
                raise _damaged(what, f"have a value {name[:100]!r}, which nothing here has")
            continue
        ours, theirs = _kind(held[name]), _kind(value)
        if None not in (ours, theirs) and ours != theirs:
            raise _damaged(what, f"have {theirs} for {name}, which is {ours}")


def taking(what: str, take: Callable[[], Any]) -> None:
    """Call `take`, which sets the state of something to what a checkpoint holds; damage is a `CheckpointError`."""
    try:
        take()
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise _damaged(what, f"cannot be taken over: {str(error)[:200]}") from error


def _kind(value: Any) -> str | None:
    """Return the kind of a value in words; None for one that fits any."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, (int, float, torch.Tensor)):
        return "a number"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, (list, tuple)) else "an object"


def _object(what: str, values: torch.Tensor) -> dict[str, Any]:
    try:
        found = json.loads(bytes(values.numpy()).decode())
    except (ValueError, RecursionError) as error:
        raise _damaged(what, f"cannot be read: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise _damaged(what, "is not an object")
    return found


def _count(found: Mapping[str, Any], name: str, *, least: int = 0, limit: int = _MOST_STEPS) -> int:
    value = found.get(name)
    if type(value) is not int or not least <= value < limit:
        raise _damaged("progress", f"has {name}={str(value)[:100]}")
    return value


def _optional_object(found: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = found.get(name)
    if value is not None and not isinstance(value, dict):
        raise _damaged("progress", f"has {name}={str(value)[:100]}")
    return value


def _check_loss_scale(scale: Mapping[str, Any]) -> None:
    usual = asdict(LossScale())
    if scale.keys() != usual.keys() or any(type(value) not in (int, float) for value in scale.values()):
        raise _damaged("progress", f"has loss_scale={str(dict(scale))[:100]}")
    counts = (scale["steady_steps"], scale["skipped_steps"])
    if not (math.isfinite(scale["scale"]) and scale["scale"] > 0) or any(
        type(count) is not int or count < 0 for count in counts
    ):
        raise _damaged("progress", f"has loss_scale={str(dict(scale))[:100]}")


def _damaged(what: str, reason: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint is damaged: {what} {reason}", hint=_HINT)


PROGRESS = "progress"
_MOST_BYTES = 2**28
MODEL, OPTIMIZER, OPTIONS, AVERAGE = "model.", "optimizer.", "options.", "average."


@dataclass(frozen=True)
class CheckpointSource:
    """What one rank writes to a checkpoint and reads from it. `places` says where parts over `tp` lie.

    `average` is that of the parameters, None where none is kept.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    loss_scale: LossScale | None
    places: Mapping[str, ShardLocation]
    plan: ParallelPlan
    num_steps: int
    mesh: Mesh
    average: ParameterAverage | None = None

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return parameters and buffers by their names."""
        return [(name, tensor.detach()) for name, tensor in [*self.parameters.items(), *self.buffers.items()]]

    def piece(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, of parameter `name`, as it is written: with its place in the whole if it is a part."""
        return tensor if name not in self.places else CheckpointChunks(tensor, self.places[name])

    def stepped_whole(self) -> set[nn.Parameter]:
        """Return the parameters whose optimizer's state is whole on every rank."""
        return stepped_whole(optimizers_in(self.optimizer))

    def averages(self) -> dict[str, torch.Tensor]:
        """Return the averages of the parameters as entries."""
        if self.average is None:
            return {}
        return {f"{AVERAGE}{name}": self.piece(name, tensor) for name, tensor in self.average.tensors.items()}

    def whole_shape(self, name: str) -> torch.Size:
        """Return the shape of the whole parameter or buffer `name`."""
        held = self.parameters[name] if name in self.parameters else self.buffers[name]
        return held.shape if name not in self.places else torch.Size(self.places[name].sharding.whole_shape(held.shape))


def entries_to_write(source: CheckpointSource) -> dict[str, torch.Tensor]:
    """Return all that this rank writes, but its random numbers; tensors are those of the training, not copies."""
    entries = {PROGRESS: as_bytes(json.dumps(_progress(source)))}
    entries |= {f"{MODEL}{name}": source.piece(name, tensor) for name, tensor in source.tensors()}
    entries |= source.averages()
    options, whole = _options(source.optimizer), source.stepped_whole()
    for name, parameter in source.parameters.items():
        numbers = {}
        for key, value in _flat(source.optimizer.state.get(parameter, {})):
            if not isinstance(value, torch.Tensor):
                numbers[key] = _plain(value)
                continue
            is_part = value.shape == parameter.shape and parameter not in whole
            entries[f"{OPTIMIZER}{key}.{name}"] = source.piece(name, value) if is_part else value
        if parameter in options:
            entries[f"{OPTIONS}{name}"] = as_bytes(json.dumps({"options": options[parameter], "numbers": numbers}))
    return entries


_PLACE = "#"
"""Stands between the key of a list in an optimizer's state and the place of an item; alone it says which kind it is."""


def _flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of an optimizer's state, and the items of lists of tensors, which have keys of their own."""
    for key, value in state.items():
        if not isinstance(value, (list, tuple)) or not _holds_tensors(value):
            yield key, value
            continue
        yield f"{key}{_PLACE}", type(value).__name__
        yield from _flat({f"{key}{_PLACE}{place}": item for place, item in enumerate(value)})


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with the lists that were written item by item."""
    found = dict(state)
    for key in sorted((key for key in state if key.endswith(_PLACE)), key=len, reverse=True):
        count = sum(1 for other in found if other.startswith(key) and other.removeprefix(key).isdecimal())
        items = [found.pop(f"{key}{place}") for place in range(count)]
        found[key.removesuffix(_PLACE)] = tuple(items) if found.pop(key) == "tuple" else items
    return found


def copied(entries: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of `entries` in the host's memory."""
    return {name: _copied(tensor) for name, tensor in entries.items()}


def as_bytes(text: str) -> torch.Tensor:
    """Return a text as a tensor of its bytes."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def empty_bytes(name: str, description: Any) -> torch.Tensor:
    """Return a tensor to read the bytes of entry `name` into."""
    is_right = isinstance(description, TensorStorageMetadata) and len(description.size) == 1
    if not is_right or description.properties.dtype != torch.uint8 or description.size[0] > _MOST_BYTES:
        raise CheckpointError(f"the checkpoint is damaged: {name} is not a text", hint="load an older one")
    return torch.empty(description.size, dtype=torch.uint8)


def empty_states(saved: Mapping[str, Any], source: CheckpointSource) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of the optimizer's state to read into, by parameter, sharded as the parameter is."""
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in source.parameters}
    whole = source.stepped_whole()
    for entry, description in saved.items():
        if not entry.startswith(OPTIMIZER) or not isinstance(description, TensorStorageMetadata):
            continue
        key, _, name = entry.removeprefix(OPTIMIZER).partition(".")
        if name not in states:
            continue
        dtype, parameter = description.properties.dtype, source.parameters[name]
        if parameter in whole:
            states[name][key] = torch.zeros(description.size, dtype=dtype, device=parameter.device)
        elif description.size == source.whole_shape(name):
            states[name][key] = torch.zeros_like(source.parameters[name], dtype=dtype, requires_grad=False)
        else:  # a count of steps
            states[name][key] = torch.zeros(description.size, dtype=dtype)
    return states


_KERNELS = ("fused", "foreach", "capturable")
"""Options that say how torch computes a step: those of this machine's script stand."""


def take_options(optimizer: torch.optim.Optimizer, texts: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
    """Give every group of `optimizer` the saved options of its first parameter, but not by which kernels it steps."""
    for group in optimizer.param_groups:
        if group["params"]:
            saved = texts.get(group["params"][0], {})
            group.update({key: value for key, value in saved.items() if key not in _KERNELS})


def _progress(source: CheckpointSource) -> dict[str, Any]:
    scheduler, scale = source.scheduler, source.loss_scale
    return {
        "num_steps": source.num_steps,
        "num_averaged": 0 if source.average is None else source.average.num_updates,
        "plan": source.plan.model_dump(mode="json"),
        "seed": torch.initial_seed() if source.mesh.world.rank == 0 else 0,
        "scheduler": None if scheduler is None else _plain_tree(scheduler.state_dict()),
        "loss_scale": None if scale is None else vars(scale),
    }


def _options(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the options (learning rate and the like) of every parameter: numbers, texts and lists of them."""
    return {
        parameter: {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str, tuple, list)):
        return value
    raise CheckpointError(
        f"an optimizer option of type {type(value).__name__} cannot be written", hint="use numbers and texts"
    )


_LEFT_OUT: Any = object()


def _plain_tree(value: Any) -> Any:
    """Return the state of a scheduler without what its script makes anew: functions, and the optimizer's methods."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return _LEFT_OUT
        kept = {key: _plain_tree(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not _LEFT_OUT}
    if isinstance(value, (list, tuple)):
        items = [_plain_tree(item) for item in value]
        return _LEFT_OUT if any(item is _LEFT_OUT for item in items) else items
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else _LEFT_OUT


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, CheckpointChunks):
        return tensor.copied()
    if isinstance(tensor, DTensor):
        return CheckpointChunks.of_shard(tensor).copied()
    return tensor.detach().to("cpu", copy=True)
