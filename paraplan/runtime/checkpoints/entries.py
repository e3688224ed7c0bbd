"""What a checkpoint consists of: tensors under the names of the whole model, and texts beside them.

Texts are written as tensors of bytes: torch.distributed.checkpoint would pickle other objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.averages import ParameterAverage
from paraplan.runtime.checkpoints.safe_reader import CheckpointError
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.split.pieces import Place, SplitPieces
from paraplan.runtime.step.loss_scale import LossScale

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
    places: Mapping[str, Place]
    plan: ParallelPlan
    num_steps: int
    mesh: Mesh
    average: ParameterAverage | None = None

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return parameters and buffers by their names."""
        return [(name, tensor.detach()) for name, tensor in [*self.parameters.items(), *self.buffers.items()]]

    def piece(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, of parameter `name`, as it is written: with its place in the whole if it is a part."""
        return tensor if name not in self.places else SplitPieces(tensor, self.places[name])

    def averages(self) -> dict[str, torch.Tensor]:
        """Return the averages of the parameters as entries."""
        if self.average is None:
            return {}
        return {f"{AVERAGE}{name}": self.piece(name, tensor) for name, tensor in self.average.tensors.items()}

    def whole_shape(self, name: str) -> torch.Size:
        """Return the shape of the whole parameter or buffer `name`."""
        held = self.parameters[name] if name in self.parameters else self.buffers[name]
        return held.shape if name not in self.places else torch.Size(self.places[name].cut.whole_shape(held.shape))


def entries_to_write(source: CheckpointSource) -> dict[str, torch.Tensor]:
    """Return all that this rank writes, but its random numbers; tensors are those of the training, not copies."""
    entries = {PROGRESS: as_bytes(json.dumps(_progress(source)))}
    entries |= {f"{MODEL}{name}": source.piece(name, tensor) for name, tensor in source.tensors()}
    entries |= source.averages()
    options = _options(source.optimizer)
    for name, parameter in source.parameters.items():
        numbers = {}
        for key, value in source.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                numbers[key] = _plain(value)
                continue
            entries[f"{OPTIMIZER}{key}.{name}"] = source.piece(name, value) if value.shape == parameter.shape else value
        if parameter in options:
            entries[f"{OPTIONS}{name}"] = as_bytes(json.dumps({"options": options[parameter], "numbers": numbers}))
    return entries


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
        raise CheckpointError(f"the checkpoint is damaged: {name} is no text", hint="load an older one")
    return torch.empty(description.size, dtype=torch.uint8)


def empty_states(saved: Mapping[str, Any], source: CheckpointSource) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of the optimizer's state to read into, by parameter, sharded as the parameter is."""
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in source.parameters}
    for entry, description in saved.items():
        if not entry.startswith(OPTIMIZER) or not isinstance(description, TensorStorageMetadata):
            continue
        key, _, name = entry.removeprefix(OPTIMIZER).partition(".")
        if name not in states:
            continue
        dtype = description.properties.dtype
        if description.size == source.whole_shape(name):
            states[name][key] = torch.zeros_like(source.parameters[name], dtype=dtype, requires_grad=False)
        else:  # a count of steps
            states[name][key] = torch.zeros(description.size, dtype=dtype)
    return states


def take_options(optimizer: torch.optim.Optimizer, texts: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
    """Give every group of `optimizer` the saved options of its first parameter."""
    for group in optimizer.param_groups:
        if group["params"]:
            group.update(texts.get(group["params"][0], {}))


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
    if isinstance(tensor, SplitPieces):
        return tensor.copied()
    if isinstance(tensor, DTensor):
        return SplitPieces.of_shard(tensor).copied()
    return tensor.detach().to("cpu", copy=True)
