"""Entries of a checkpoint, by names: boxes of tensors, and values that are no tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, ValidationError
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paraplan.plan.parallel import ParallelPlan
from paraplan.records import Record
from paraplan.runtime.checkpoints.boxes import DAMAGED, Box, CheckpointError, Description, boxes_of
from paraplan.runtime.checkpoints.random_numbers import random_states
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.optimizers.averages import ParameterAverage
from paraplan.runtime.optimizers.several import optimizers_in
from paraplan.runtime.optimizers.whole_tensors import stepped_whole
from paraplan.runtime.precision import LossScale
from paraplan.runtime.shards.sharding import ShardLocation

_Count = Annotated[int, Field(strict=True, ge=0, lt=2**62)]
_Value = None | bool | int | float | str
_Saved = TypeVar("_Saved", bound=Record)


class SavedScale(Record):
    """The scale of the loss in fp16."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """The factor of the loss."""
    steady_steps: _Count
    """Steps since it last changed."""
    skipped_steps: _Count
    """Steps that were left out."""


class Progress(Record):
    """How far a training is."""

    num_steps: _Count
    """Steps done."""
    seed: Annotated[int, Field(strict=True, ge=-(2**64), lt=2**64)]
    """The seed of torch's generator on rank 0 at the beginning."""
    plan: ParallelPlan
    """The plan that wrote it."""
    scheduler: dict[str, Any] | None
    """The scheduler's state."""
    loss_scale: SavedScale | None
    """The scale of the loss in fp16."""
    num_averaged: _Count = 0
    """Steps in the average of the parameters."""


class Options(Record):
    """The options of the optimizer for one parameter, and the numbers in its state."""

    options: dict[str, _Value | tuple[_Value, ...]]
    """Options of the parameter's group: learning rate and the like; pairs are tuples, as optimizers have them."""
    numbers: dict[str, _Value | tuple[_Value, ...]]
    """The values of its state that are no tensor."""


def read_progress(value: Any) -> Progress:
    """Return the progress that is written so. Raises `CheckpointError` where it is none."""
    return _validated(Progress, "progress", value)


def read_options(name: str, value: Any) -> Options:
    """Return the options of parameter `name` that are written so. Raises `CheckpointError` where they are none."""
    found = _validated(Options, f"options of {name}", value)
    if "params" in found.options:
        raise _damaged(f"options of {name}", "name parameters")
    return found


def _validated(kind: type[_Saved], what: str, value: Any) -> _Saved:
    try:
        return kind.model_validate_json(json.dumps(value))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part)[:100] for part in first["loc"][:3])
        raise _damaged(what, f"has {field}={str(first['input'])[:100]}: {first['msg'][:200]}") from error


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


def _damaged(what: str, reason: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint is damaged: {what} {reason}", hint=DAMAGED)


PROGRESS = "progress"
MODEL, OPTIMIZER, OPTIONS, AVERAGE = "model.", "optimizer.", "options.", "average."


@dataclass(frozen=True)
class CheckpointSource:
    """The source of a checkpoint on one rank, which writes to it and reads from it. `places` says where parts lie.

    `average` is that of the parameters, None where none is kept.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    loss_scale: LossScale | None
    places: Mapping[str, Sequence[ShardLocation]]
    num_steps: int
    mesh: Mesh
    average: ParameterAverage | None = None

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return parameters and buffers by their names."""
        return [(name, tensor.detach()) for name, tensor in [*self.parameters.items(), *self.buffers.items()]]

    def boxes(self, entry: str, name: str, tensor: torch.Tensor) -> list[Box]:
        """Return what this rank holds of `entry`; `tensor` is one of parameter `name`, and cut as it is."""
        return boxes_of(entry, tensor, *self.places.get(name, ()))

    def stepped_whole(self) -> set[nn.Parameter]:
        """Return the parameters whose optimizer's state is whole on every rank."""
        return stepped_whole(optimizers_in(self.optimizer))

    def whole_shape(self, name: str) -> torch.Size:
        """Return the shape of the whole parameter or buffer `name`."""
        held = self.parameters[name] if name in self.parameters else self.buffers[name]
        shape: tuple[int, ...] = held.shape
        for location in self.places.get(name, ()):
            shape = location.sharding.whole_shape(shape)
        return torch.Size(shape)


@dataclass(frozen=True)
class State:
    """The state of a training that a rank holds: boxes of tensors, and values of JSON by their names."""

    boxes: list[Box]
    values: dict[str, Any]


def state_of(source: CheckpointSource, only: Callable[[str], bool] = lambda name: True) -> State:
    """Return what this rank writes, or `only` what this picks by name; boxes are views of the training's tensors."""
    values: dict[str, Any] = {PROGRESS: _progress(source)}
    tensors = {f"{MODEL}{name}": (name, tensor) for name, tensor in source.tensors()}
    if source.average is not None:
        tensors |= {f"{AVERAGE}{name}": (name, tensor) for name, tensor in source.average.tensors.items()}
    options, whole = _options(source.optimizer), source.stepped_whole()
    for name, parameter in source.parameters.items():
        numbers = {}
        for key, value in _flat(source.optimizer.state.get(parameter, {})):
            if not isinstance(value, torch.Tensor):
                numbers[key] = _plain(value)
                continue
            is_part = value.shape == parameter.shape and parameter not in whole
            tensors[f"{OPTIMIZER}{key}.{name}"] = (name if is_part else "", value)
        if parameter in options:
            values[f"{OPTIONS}{name}"] = {"options": options[parameter], "numbers": numbers}
    tensors |= {name: ("", tensor) for name, tensor in random_states(source.mesh.world).items()}
    boxes = [box for entry, (name, held) in tensors.items() if only(entry) for box in source.boxes(entry, name, held)]
    as_it_is_now = json.dumps({name: value for name, value in values.items() if only(name)})
    return State(boxes, json.loads(as_it_is_now))


_PLACE = "#"
"""Stands between the key of a container in an optimizer's state and the place of an item; alone it says which kind."""


def _flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of an optimizer's state; items of lists and dictionaries have keys of their own."""
    for key, value in state.items():
        is_container = isinstance(value, (list, tuple, dict))
        keys = [key, *value] if isinstance(value, dict) else [key]
        if "." in str(key) or str(key).endswith(_PLACE) or not all(isinstance(each, (str, int)) for each in keys):
            raise CheckpointError(f"keys {keys} in the optimizer's state cannot be written", hint="name them by words")
        if not is_container:
            yield key, value
            continue
        items = value if isinstance(value, dict) else dict(enumerate(value))
        kind = next(kind for kind in (dict, tuple, list) if isinstance(value, kind))
        yield f"{key}{_PLACE}", [kind.__name__, *items]
        yield from _flat({f"{key}{_PLACE}{place}": item for place, item in enumerate(items.values())})


def nested(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with the containers that were written item by item."""
    found = dict(state)
    for key in sorted((key for key in state if key.endswith(_PLACE)), key=len, reverse=True):
        kind, *keys = found.pop(key)
        items = [found.pop(f"{key}{place}") for place in range(len(keys))]
        name = key.removesuffix(_PLACE)
        found[name] = dict(zip(keys, items, strict=True)) if kind == "dict" else items
        if kind == "tuple":
            found[name] = tuple(items)
    return found


def empty_states(saved: Mapping[str, Description], source: CheckpointSource) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of the optimizer's state to read into, by parameter, sharded as the parameter is."""
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in source.parameters}
    whole = source.stepped_whole()
    for entry, description in saved.items():
        if not entry.startswith(OPTIMIZER):
            continue
        key, _, name = entry.removeprefix(OPTIMIZER).partition(".")
        if name not in states:
            continue
        dtype, parameter = description.dtype, source.parameters[name]
        if parameter in whole:
            states[name][key] = torch.zeros(description.shape, dtype=dtype, device=parameter.device)
        elif description.shape == source.whole_shape(name):
            states[name][key] = torch.zeros_like(source.parameters[name], dtype=dtype, requires_grad=False)
        else:  # a count of steps
            states[name][key] = torch.zeros(description.shape, dtype=dtype)
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
        "plan": source.mesh.plan.model_dump(mode="json"),
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
