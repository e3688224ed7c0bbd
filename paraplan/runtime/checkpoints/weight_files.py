"""Weights in safetensors files: read into the parts of ranks, and exported from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from paraplan.errors import ModelError, UsageError
from paraplan.runtime.checkpoints.boxes import Box, CheckpointError, boxes_of
from paraplan.runtime.checkpoints.entries import MODEL
from paraplan.runtime.checkpoints.loading import FolderReader
from paraplan.runtime.checkpoints.tensor_files import CODES, TensorFile, opened, write_tensors
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.rank_part import RankPart

_HINT = "give job.prepare the weights of this model"


def names_of_ties(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter of `model`, by the one that `named_parameters` gives it."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(first[id(parameter)], []).append(name)
    return names


def read_weights(source: Path, part: RankPart, mesh: Mesh, *, names: Mapping[str, list[str]]) -> None:
    """Read what this rank holds of a model from `source`, a safetensors file or a folder of them.

    `names` are all names of each parameter. Raises `ModelError` for a parameter that is not there or has another shape,
    `CheckpointError` for a damaged file. Buffers that are not there stay as they are.
    """
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{source} holds no weights", hint="name a safetensors file or a folder with such files")
    places = part.shardings.places(mesh)
    with ExitStack() as stack:
        entered = [stack.enter_context(opened(file)) for file in files]
        holders = {name: file for file in entered for name in file.names}
        for name, parameter in part.parameters.items():
            known = next((alias for alias in names.get(name, [name]) if alias in holders), None)
            if known is None:
                raise ModelError(f"{source} holds no {name}", hint=_HINT)
            _fill(source, boxes_of(known, parameter, *places.get(name, ())), holders[known])
        for name, buffer in part.buffers.items():
            if name in holders:
                _fill(source, boxes_of(name, buffer), holders[name])


def _fill(source: Path, boxes: Sequence[Box], file: TensorFile) -> None:
    """Fill the boxes of one tensor. Raises `ModelError` where the file has it in another shape."""
    for box in boxes:
        whole = file.as_written(box.name)
        if tuple(whole.shape) != box.place.whole:
            raise ModelError(
                f"{source} holds {box.name} in shape {tuple(whole.shape)}, and the model has {box.place.whole}",
                hint=_HINT,
            )
        box.fill(Box.of(box.name, (0,) * whole.ndim, whole.shape, whole))


def export_weights(folder: str | Path, path: str | Path, *, dtype: torch.dtype | None = None) -> int:
    """Write parameters and buffers of the checkpoint in `folder` to the safetensors file `path`; return how many.

    One process calls it, with or without a job; it needs the memory of the whole model. A tied parameter is written
    once, under the first of its names. `dtype` converts what is floating point. The file is there when it is whole.
    Raises `CheckpointError` for a folder without a checkpoint that is whole, and `UsageError` where the file cannot be
    written.
    """
    weights = read_checkpoint(Path(folder))
    if dtype is not None:
        weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    target = Path(path)
    if not target.parent.is_dir():
        raise UsageError(f"cannot write {target}: there is no such folder", hint="make it, or choose another")
    save_tensors(weights, target)
    return len(weights)


def read_checkpoint(folder: Path, *, only: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return parameters and buffers of the checkpoint in `folder`, or `only` those of these names.

    Raises `CheckpointError` for a folder without a checkpoint that is whole.
    """
    reader = FolderReader(folder, alone=True)
    weights = {
        name.removeprefix(MODEL): torch.empty(there.shape, dtype=there.dtype, device="cpu")
        for name, there in reader.tensors.items()
        if name.startswith(MODEL) and (only is None or name.removeprefix(MODEL) in only)
    }
    if not weights:
        raise CheckpointError(f"{folder} holds no weights", hint="name a folder that engine.save wrote")
    reader.read([box for name, value in weights.items() for box in boxes_of(f"{MODEL}{name}", value)])
    return weights


def save_tensors(tensors: dict[str, torch.Tensor], target: Path) -> None:
    """Write `tensors` to the safetensors file `target`, which is there when it is whole.

    Raises `UsageError` where it cannot be written, or safetensors has no such type.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise UsageError(f"{name} is {tensor.dtype}, which safetensors does not have", hint="give another dtype")
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write_tensors(beside, tensors)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"cannot write {target}: {error}", hint="choose a folder that exists and is yours") from None
