"""Checkpoints: written under one plan, read under any other, by torch.distributed.checkpoint.

What is written are whole tensors under the names of the whole model, each rank its shards: parameters, buffers, the
optimizer's state and options parameter by parameter, and the number of steps. So neither the number of ranks nor the
split is part of a checkpoint.

A checkpoint is written beside the one that it replaces, and takes its place when it is whole: a kill at any moment
leaves a whole one, under its name or the name with `.previous`.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paraplan.errors import ParaplanError
from paraplan.runtime.tensor_pieces import Place, SplitPieces

_STEPS = "steps"


class CheckpointError(ParaplanError):
    """A checkpoint that does not exist or belongs to another model."""


def save_checkpoint(
    folder: Path,
    *,
    parameters: dict[str, nn.Parameter],
    buffers: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    places: Mapping[str, Place],
    is_main: bool,
) -> None:
    """Write a checkpoint to `folder`, replacing one that is there. Every rank calls it; all return when it is whole.

    `places` says where the parts of parameters that are split over `tp` lie.
    """
    state: dict[str, Any] = {_STEPS: num_steps}
    state |= {f"model.{name}": _placed_piece(name, tensor, places) for name, tensor in _tensors(parameters, buffers)}
    options = _options(optimizer)
    for name, parameter in parameters.items():
        state[f"options.{name}"] = options[parameter]
        for key, value in optimizer.state.get(parameter, {}).items():
            is_part = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            state[f"optimizer.{key}.{name}"] = _placed_piece(name, value, places) if is_part else value
    partial, previous = _beside(folder, "partial"), _beside(folder, "previous")
    if is_main:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
    _wait_for_all()
    with _without_the_note_on_single_processes():
        save(state, checkpoint_id=partial)
    _wait_for_all()
    if is_main:
        if folder.exists():
            shutil.rmtree(previous, ignore_errors=True)
            folder.rename(previous)
        partial.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)
    _wait_for_all()


def load_checkpoint(
    folder: Path,
    *,
    parameters: dict[str, nn.Parameter],
    buffers: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    places: Mapping[str, Place],
) -> int:
    """Read a checkpoint into this rank's parameters, buffers and optimizer; return its number of steps.

    Every rank calls it. Raises `CheckpointError` where there is none, or where it is of another model.
    """
    whole = folder if (folder / ".metadata").exists() else _beside(folder, "previous")
    if not (whole / ".metadata").exists():
        raise CheckpointError(f"{folder} holds no whole checkpoint", hint="name a folder that engine.save wrote")
    saved = FileSystemReader(whole).read_metadata().state_dict_metadata
    state: dict[str, Any] = {_STEPS: 0}
    shapes = {name: _whole_shape(name, held, places) for name, held in parameters.items()}
    for name, tensor in _tensors(parameters, buffers):
        _check_shape(folder, saved, f"model.{name}", shapes.get(name, tensor.shape))
        state[f"model.{name}"] = _placed_piece(name, tensor, places)
    optimizer_state = _empty_states(saved, parameters, shapes)
    for name, values in optimizer_state.items():
        state[f"options.{name}"] = ""
        for key, value in values.items():
            is_part = value.shape == parameters[name].shape
            state[f"optimizer.{key}.{name}"] = _placed_piece(name, value, places) if is_part else value
    with _without_the_note_on_single_processes():
        load(state, checkpoint_id=whole)
    options = {parameter: _read_options(state[f"options.{name}"]) for name, parameter in parameters.items()}
    _take_options(optimizer, options)
    for name, parameter in parameters.items():
        values = optimizer_state[name]  # read in place
        if values:
            optimizer.state[parameter] = _placed(values, parameter, options[parameter])
    return int(state[_STEPS])


def _tensors(parameters: dict[str, nn.Parameter], buffers: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach()) for name, tensor in [*parameters.items(), *buffers.items()]]


def _options(optimizer: torch.optim.Optimizer) -> dict[Any, str]:
    """Return the options (learning rate and the like) of every parameter, as JSON: numbers, texts and lists of them."""
    return {
        parameter: json.dumps({key: _plain(value) for key, value in group.items() if key != "params"})
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


def _read_options(text: str) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(text).items()}


def _take_options(optimizer: torch.optim.Optimizer, options: dict[nn.Parameter, dict[str, Any]]) -> None:
    """Give every group of `optimizer` the saved options of its first parameter."""
    for group in optimizer.param_groups:
        if group["params"]:
            group.update(options.get(group["params"][0], {}))


def _placed_piece(name: str, tensor: torch.Tensor, places: Mapping[str, Place]) -> Any:
    """Return `tensor` as it is written: with its place in the whole where it is a part over `tp`."""
    return tensor if name not in places else SplitPieces(tensor, places[name])


def _whole_shape(name: str, tensor: torch.Tensor, places: Mapping[str, Place]) -> torch.Size:
    return tensor.shape if name not in places else torch.Size(places[name].cut.whole_shape(tensor.shape))


def _empty_states(
    saved: dict[str, Any], parameters: dict[str, nn.Parameter], shapes: Mapping[str, torch.Size]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors of the optimizer's state to read into, by parameter, sharded as the parameter is."""
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in parameters}
    for entry, description in saved.items():
        start, _, rest = entry.partition(".")
        key, _, name = rest.partition(".")
        if start != "optimizer" or name not in parameters or not isinstance(description, TensorStorageMetadata):
            continue
        dtype = description.properties.dtype
        if description.size == shapes[name]:
            states[name][key] = torch.zeros_like(parameters[name], dtype=dtype, requires_grad=False)
        else:  # a count of steps
            states[name][key] = torch.zeros(description.size, dtype=dtype)
    return states


def _placed(
    values: dict[str, torch.Tensor], parameter: nn.Parameter, options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return `values` with counts where the optimizer wants them: beside the parameter if it is fused or capturable."""
    if options.get("fused") or options.get("capturable"):
        return {key: value.to(parameter.device) for key, value in values.items()}
    return values


def _check_shape(folder: Path, saved: dict[str, Any], entry: str, shape: torch.Size) -> None:
    description = saved.get(entry)
    name = entry.removeprefix("model.")
    if description is None:
        raise CheckpointError(f"{folder} holds no {name}", hint="it is a checkpoint of another model")
    if description.size != shape:
        raise CheckpointError(
            f"{folder} holds {name} in shape {tuple(description.size)}, and the model has {tuple(shape)}",
            hint="it is a checkpoint of another model",
        )


def _beside(folder: Path, ending: str) -> Path:
    return folder.with_name(f"{folder.name}.{ending}")


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _without_the_note_on_single_processes() -> Iterator[None]:
    """Silence what torch.distributed.checkpoint says in one process: that it takes it for one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
