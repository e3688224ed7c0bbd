"""A checkpoint as one file of weights in the model's own names, for `from_pretrained` and readers of safetensors."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from paraplan.errors import UsageError
from paraplan.runtime.checkpoints.entries import MODEL
from paraplan.runtime.checkpoints.safe_reader import CheckpointError, SafeReader, read_entries
from paraplan.runtime.checkpoints.saving import find_whole


def export_weights(folder: str | Path, path: str | Path, *, dtype: torch.dtype | None = None) -> int:
    """Write parameters and buffers of the checkpoint in `folder` to the safetensors file `path`; return how many.

    One process calls it, with or without a job; it needs the memory of the whole model. A tied parameter is written
    once, under the first of its names. `dtype` converts what is floating point. The file is there when it is whole.
    Raises `CheckpointError` for a folder without a checkpoint that is whole, and `UsageError` where safetensors is not
    installed.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise UsageError("safetensors is not installed", hint="pip install safetensors")
    from safetensors.torch import save_file

    whole = find_whole(Path(folder))
    index = SafeReader(whole).read_metadata()
    weights = {
        name.removeprefix(MODEL): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
    }
    if not weights:
        raise CheckpointError(f"{folder} holds no weights", hint="name a folder that engine.save wrote")
    read_entries(whole, {f"{MODEL}{name}": value for name, value in weights.items()}, index=index, alone=True)
    if dtype is not None:
        weights = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    target = Path(path)
    if not target.parent.is_dir():
        raise UsageError(f"cannot write {target}: there is no such folder", hint="make it, or choose another")
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        save_file(weights, beside, metadata={"format": "pt"})
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"cannot write {target}: {error}", hint="choose a folder that exists and is yours") from None
    return len(weights)
