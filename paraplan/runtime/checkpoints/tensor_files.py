"""Files of tensors in the format of safetensors: written tensor by tensor, and read by safetensors itself.

The library takes all tensors of a file at once, in the host's memory; a rank's part of a training need not fit there.
Reading maps a file and checks its header: no tensor sticks out, none overlap, no byte belongs to none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paraplan.errors import UsageError
from paraplan.runtime.checkpoints.boxes import DAMAGED, CheckpointError, Place

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The types that safetensors has, in the words of its headers."""
_OTHERS = ("complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in (*CODES, *(getattr(torch, name) for name in _OTHERS))
}
"""The types of a checkpoint, by their names: those that safetensors lacks are written as bytes."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` to the file `path`, one after the other through the host's memory. Raises OSError.

    A type that safetensors lacks becomes bytes in a row.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    in_order = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # so that all are aligned
    end = 0
    for name, values in in_order:
        begin, end = end, end + values.numel() * values.dtype.itemsize
        header[name] = {"data_offsets": [begin, end], **_header_of(values.dtype, tuple(values.shape))}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for _, values in in_order:
            stream.write(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def _header_of(dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
    if dtype in CODES:
        return {"dtype": CODES[dtype], "shape": shape}
    count = dtype.itemsize
    for length in shape:
        count *= length
    return {"dtype": "U8", "shape": (count,)}


class TensorFile:
    """A file of tensors that is open. What it returns are views of the file, which is read where these are."""

    def __init__(self, path: Path, opened: Any) -> None:
        self._path, self._opened = path, opened

    def check(self, place: Place) -> None:
        """Raise `CheckpointError` where the file holds no tensor of the name, the shape and the type of a box."""
        name, shape, dtype = place.key_in_file, place.shape, place.dtype
        with _explained(self._path):
            there = self._opened.get_slice(name)
            found = {"dtype": str(there.get_dtype()), "shape": tuple(there.get_shape())}
        if found != _header_of(dtype, shape):
            raise CheckpointError(
                f"{self._path} holds {name} as {found['dtype']} in shape {found['shape']}, and {dtype} in {shape} is "
                "due",
                hint=DAMAGED,
            )

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return [*self._opened.keys()]

    def as_written(self, name: str) -> torch.Tensor:
        """Return the tensor `name`, which must be there, in the type and shape that the file says."""
        with _explained(self._path):
            found: torch.Tensor = self._opened.get_tensor(name)
        return found

    def tensor(self, place: Place) -> torch.Tensor:
        """Return the values of a box that `check` has found to be there."""
        found = self.as_written(place.key_in_file)
        # a file may have bytes at any place: complex numbers of 16 bytes must not lie at those
        return found if place.dtype in CODES else found.clone().view(place.dtype).view(place.shape)


@contextmanager
def opened(path: Path) -> Iterator[TensorFile]:
    """Open a file of tensors. Raises `CheckpointError` where it is none, or cut off, or missing."""
    if importlib.util.find_spec("safetensors") is None:
        raise UsageError("safetensors is not installed", hint="pip install safetensors")
    from safetensors import safe_open

    with _explained(path):
        file = safe_open(path, framework="pt")
    with file as entered:
        yield TensorFile(path, entered)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", hint=DAMAGED) from error
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:200]}", hint=DAMAGED) from error
