"""Batches of ranks put together into the batch of one process, whatever structure they come in."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from paraplan.errors import UsageError

_IGNORED_TARGET = -100
MOST_COPIED = 1 << 22
"""Numbers of what is read at once, above which it is not kept, and known by its sum alone."""


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a structure of mappings, sequences, slices and data classes, each with its key's name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item, name)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step), name)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), field.name)


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return `value` with its tensors replaced by `tensors`, in the order in which `tensors_in` yields them."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        made = copy.copy(value)
        for key, item in value.items():  # also a mapping of a kind of its own, as a tokenizer's
            made[key] = with_tensors(item, tensors)  # type: ignore[index]
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[with_tensors(item, tensors) for item in value])
    if isinstance(value, list | tuple):
        return type(value)([with_tensors(item, tensors) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        same: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(same, field.name, with_tensors(getattr(value, field.name), tensors))
        return same
    return value


def joined(parts: Sequence[torch.Tensor], name: str = "") -> torch.Tensor:
    """Return `parts` one after another along their first dimension; of numbers the first.

    Rows of other lengths are filled at their end: with -100 where `name` says labels or targets, else with zeros.
    Raises `UsageError` where they differ in their number of dimensions.
    """
    first = parts[0]
    if first.ndim == 0:
        return first
    if any(part.ndim != first.ndim for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UsageError(
            f"what ranks read has the shapes {shapes}, which make no common batch",
            hint="give every rank tensors of as many dimensions, samples along the first",
        )
    longest = [max(part.shape[dim] for part in parts) for dim in range(1, first.ndim)]
    fill = _IGNORED_TARGET if "label" in name or "target" in name else 0
    return torch.cat([_filled(part, longest, fill) for part in parts])


def sums_of(value: Any) -> tuple[float, float, float]:
    """Return sums over the numbers in `value`: of their squares, of themselves and of their sizes.

    They are NaN where a tensor is of a kind of its own, as a DTensor.
    """
    found = [tensor for _, tensor in tensors_in(value) if tensor.ndim > 0 and tensor.is_floating_point()]
    if any(type(tensor) is not torch.Tensor for tensor in found):
        return (math.nan,) * 3
    numbers = torch.cat([tensor.double().flatten() for tensor in found]) if found else torch.zeros(0)
    return float(numbers.square().sum()), float(numbers.sum()), float(numbers.abs().sum())


def print_of(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return what tells the tensors of two ranks apart."""
    made = hashlib.blake2b(digest_size=12)
    for _, tensor in tensors:
        whole = tensor.detach()
        made.update(f"{tuple(whole.shape)} {whole.dtype}".encode())
        if whole.numel() > MOST_COPIED:
            made.update(str(whole.double().sum().item()).encode())
        elif whole.numel():
            # a copy: a storage that NumPy has seen is resized no more, as FSDP does
            made.update(whole.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def _filled(part: torch.Tensor, sizes: Sequence[int], fill: int) -> torch.Tensor:
    if list(part.shape[1:]) == list(sizes):
        return part
    larger = part.new_full((part.shape[0], *sizes), fill)
    larger[tuple(slice(0, size) for size in part.shape)] = part
    return larger
