"""The index of a checkpoint: a file of JSON that says which tensors there are, in which boxes, and in whose files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from paraplan.records import Record
from paraplan.runtime.checkpoints.boxes import DAMAGED, CheckpointError, covers
from paraplan.runtime.checkpoints.tensor_files import DTYPES

INDEX_NAME = "checkpoint.json"
OLD_INDEX_NAME = ".metadata"
"""The index of torch.distributed.checkpoint, which wrote checkpoints before."""

_MOST_BYTES = 2**31
Count = Annotated[int, Field(strict=True, ge=0, lt=2**56)]
Sizes = Annotated[tuple[Count, ...], Field(max_length=12)]
SavedBox = tuple[Annotated[int, Field(strict=True, ge=0, lt=10**6)], Sizes, Sizes]
"""The rank whose file holds the box, its offsets and its shape."""


class SavedTensor(Record):
    """A whole tensor, and the boxes that it is written in."""

    dtype: str
    """Type of the elements, as torch calls it."""
    shape: Sizes
    """Shape of the whole tensor."""
    boxes: tuple[SavedBox, ...]
    """Boxes that have each element once."""

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Index(Record):
    """The index of a checkpoint: all that it holds."""

    format: Literal["paraplan checkpoint"] = "paraplan checkpoint"
    """The kind of the file."""
    version: Literal[1] = 1
    """The number of the format."""
    state: dict[str, Any]
    """Values that are no tensor, by their names."""
    tensors: dict[str, SavedTensor]
    """The tensors by their names."""


def file_of(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"rank-{rank:05}.safetensors"


def write_index(folder: Path, index: Index) -> None:
    """Write the index to `folder`, behind all files. It is there when it is whole. Raises OSError."""
    beside = folder / f"{INDEX_NAME}.partial"
    with beside.open("w") as stream:
        json.dump(index.model_dump(), stream)  # which has words for numbers that are infinite
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(folder / INDEX_NAME)


def read_index(folder: Path) -> Index:
    """Return the index of the checkpoint in `folder`.

    Raises `CheckpointError` where a tensor is not covered by its boxes, each element once, or where files are missing,
    are not of this folder, or too small for what they hold.
    """
    path = folder / INDEX_NAME
    if not path.exists() and (folder / OLD_INDEX_NAME).exists():
        raise CheckpointError(
            f"{folder} is a checkpoint of torch.distributed.checkpoint, which an older paraplan wrote",
            hint="scripts/convert_checkpoint.py of paraplan's repository writes it anew",
        )
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise _damaged(folder, f"{INDEX_NAME} is not a file, or too large")
        index = Index.model_validate_json(path.read_bytes())
    except OSError as error:
        raise _damaged(folder, f"{error.strerror}: {INDEX_NAME}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part)[:100] for part in first["loc"][:6])
        raise _damaged(folder, f"{INDEX_NAME}: {field}: {first['msg'][:200]}") from error
    for name, tensor in index.tensors.items():
        if tensor.dtype not in DTYPES:
            raise _damaged(folder, f"{name[:100]} has values of the unknown type {tensor.dtype[:100]}")
        if not covers(tensor.shape, [(offsets, shape) for _, offsets, shape in tensor.boxes]):
            raise _damaged(folder, f"the boxes of {name[:100]} do not make up a tensor of shape {tensor.shape}")
    _check_files(folder, index)
    return index


def _check_files(folder: Path, index: Index) -> None:
    """See that the files are there, and large enough for all tensors, before anybody makes room for these."""
    held = 0
    for rank in {rank for tensor in index.tensors.values() for rank, _, _ in tensor.boxes}:
        file = folder / file_of(rank)
        if not file.exists():
            raise _damaged(folder, f"No such file or directory: {file}")
        if not file.is_file() or file.resolve().parent != folder.resolve():
            raise _damaged(folder, f"{file.name} is not a file of this folder")
        held += file.stat().st_size
    due = sum(tensor.num_bytes for tensor in index.tensors.values())
    if held < due:
        raise _damaged(folder, f"its files have {held} bytes, and its tensors {due}")


def _damaged(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {folder} cannot be read: {reason}", hint=DAMAGED)
