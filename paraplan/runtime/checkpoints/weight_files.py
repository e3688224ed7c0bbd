"""Weights in safetensors files: read into the parts of ranks, and exported from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paraplan.errors import ModelError, UsageError
from paraplan.runtime.checkpoints.boxes import CheckpointError, Place, boxes_of, locations
from paraplan.runtime.checkpoints.entries import MODEL
from paraplan.runtime.checkpoints.loading import FolderReader
from paraplan.runtime.checkpoints.tensor_files import CODES, check_library, write_tensors
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


class WeightFiles:
    """The tensors of safetensors files by name, of which any box can be read without the rest."""

    def __init__(self, source: Path) -> None:
        check_library()
        from safetensors import safe_open

        files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{source} holds no weights", hint="name a safetensors file or a folder with such files")
        self._source = source
        self._opened: list[Any] = [safe_open(file, framework="pt") for file in files]
        self._holders: dict[str, Any] = {name: opened for opened in self._opened for name in opened.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._holders

    def read_box(self, name: str, place: Place, into: torch.Tensor) -> None:
        """Read the box at `place` of tensor `name`, which must be of that whole shape, into a tensor of its size."""
        tensor = self._holders[name].get_slice(name)
        if tuple(tensor.get_shape()) != place.whole:
            raise ModelError(
                f"{self._source} holds {name} in shape {tuple(tensor.get_shape())}, and the model has {place.whole}",
                hint=_HINT,
            )
        if not into.ndim:
            into.copy_(self._holders[name].get_tensor(name))
        elif into.numel():
            into.copy_(
                tensor[
                    tuple(slice(start, start + size) for start, size in zip(place.offsets, place.shape, strict=True))
                ]
            )


def read_weights(source: Path, part: RankPart, mesh: Mesh, *, names: Mapping[str, list[str]]) -> None:
    """Read what this rank holds of a model from `source`, a safetensors file or a folder of them.

    `names` are all names of each parameter. Raises `ModelError` for a parameter that is not there or has another shape.
    Buffers that are not there stay as they are.
    """
    places = locations(part.shardings, mesh.coordinate("tp"))
    files = WeightFiles(source)
    for name, parameter in part.parameters.items():
        known = next((alias for alias in names.get(name, [name]) if alias in files), None)
        if known is None:
            raise ModelError(f"{source} holds no {name}", hint=_HINT)
        for box in boxes_of(name, parameter, places.get(name)):
            files.read_box(known, box.place, box.values)
    for name, buffer in part.buffers.items():
        if name in files:
            (box,) = boxes_of(name, buffer)
            files.read_box(name, box.place, buffer)


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
