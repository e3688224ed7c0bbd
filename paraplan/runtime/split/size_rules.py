"""Rules for functions that name sizes or places in the split dimension of a `SplitTensor`.

A rule takes a function's name and arguments and returns its result, or None where the general way will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import (
    SplitError,
    SplitTensor,
    as_operand,
)

Rule = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


def reshaped_sharding(sharding: Sharding, before: Sequence[int], after: Sequence[int]) -> Sharding | None:
    """Return how a tensor of shape `before` with `sharding` is cut in shape `after`; None where parts are not even.

    In memory order the split dimension is a run of segments, repeated; a dimension of the new shape may take its place
    if the sizes before it count repeats, and those behind it divide every segment's part.
    """
    group = _matching_group(before, after, sharding.dim)
    if group is None:
        return None
    (start, end), (new_start, new_end) = group
    repeats = prod(before[start : sharding.dim]) * sharding.repeats
    inner = prod(before[sharding.dim + 1 : end])
    lengths = [segment * inner for segment in sharding.segments]
    for dim in range(new_start, new_end):
        count, rest = prod(after[new_start:dim]), prod(after[dim + 1 : new_end])
        segments = _one_of(lengths, repeats, count)
        if segments is None:
            continue
        is_as_before = rest == 1 and segments == (
            [*sharding.segments],
            sharding.repeats,
        )  # an uneven one stays as it is
        if not is_as_before and any(length % (rest * sharding.size) for length in segments[0]):
            continue
        return Sharding(
            dim=dim, segments=tuple(length // rest for length in segments[0]), size=sharding.size, repeats=segments[1]
        )
    return None


def _one_of(lengths: list[int], repeats: int, count: int) -> tuple[list[int], int] | None:
    """Return one of `count` equal runs that `repeats` times `lengths` fall into, as lengths and their repeats."""
    if repeats % count == 0:
        return lengths, repeats // count
    parts, rest = divmod(count, repeats)
    if rest or len(lengths) % parts:
        return None
    share = len(lengths) // parts
    runs = [lengths[number * share : (number + 1) * share] for number in range(parts)]
    return (runs[0], 1) if all(run == runs[0] for run in runs) else None


def _matching_group(
    before: Sequence[int], after: Sequence[int], dim: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the smallest runs of dimensions with `dim` among them that hold the same elements in both shapes."""
    start = new_start = 0
    while start < len(before) and new_start < len(after):
        end, new_end = start + 1, new_start + 1
        left, right = before[start], after[new_start]
        while left != right:
            if left < right:
                if end == len(before):
                    return None
                left *= before[end]
                end += 1
            else:
                if new_end == len(after):
                    return None
                right *= after[new_end]
                new_end += 1
        if dim < end:
            return (start, end), (new_start, new_end)
        start, new_start = end, new_end
    return None


def _reshape(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    sizes: Sequence[Any] = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
    if name == "reshape" and "shape" in kwargs:
        sizes = kwargs["shape"]
    if not all(isinstance(size, int) for size in sizes) or isinstance(sizes, torch.dtype):
        return None  # view(dtype)
    return _as_shape(name, tensor, list(sizes))


def _as_shape(name: str, tensor: SplitTensor, sizes: list[int]) -> SplitTensor:
    before = tuple(tensor.shape)
    if -1 in sizes:
        known = prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = prod(before) // known
    if prod(before) != prod(sizes):
        raise SplitError(f"{name} of {before} to {tuple(sizes)}", source=tensor.source)
    sharding = reshaped_sharding(tensor.sharding, before, sizes)
    if sharding is None:
        raise _uneven(name, tensor, before, sizes)
    parts = (
        sharding.local_shape(tuple(sizes))
        if sharding.divides
        else (*sizes[: sharding.dim], -1, *sizes[sharding.dim + 1 :])
    )
    local = tensor.local.reshape(parts)
    return SplitTensor(local, sharding, tensor.group, tensor.source)


def _uneven(name: str, tensor: SplitTensor, before: Sequence[int], after: Sequence[int]) -> SplitError:
    """Return the error for a shape without a dimension to split, with the segments that its first size suggests."""
    group = _matching_group(before, after, tensor.sharding.dim)
    segments, numbers = None, [size for size in after if size > 1]
    if group is not None:
        numbers = [size for size in after[group[1][0] : group[1][1]] if size > 1]
        if len(numbers) > 2 and tensor.sharding.length % numbers[0] == 0 and tensor.sharding.repeats == 1:
            segments = (tensor.sharding.length // numbers[0],) * numbers[0]
    of_heads = f"{numbers[0]} heads" if len(numbers) == 2 else f"sizes {numbers}"
    return SplitError(
        f"{_ranks(tensor)} does not divide the {of_heads} that the output of {tensor.source} is viewed as",
        source=tensor.source,
        segments=segments,
    )


def _ranks(tensor: SplitTensor) -> str:
    return f"tp={tensor.sharding.size}"


def _flatten(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0) % tensor.local.ndim
    end = kwargs.get("end_dim", args[2] if len(args) > 2 else -1) % tensor.local.ndim
    shape = tuple(tensor.shape)
    return _as_shape(name, tensor, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


def _unflatten(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None) % tensor.local.ndim
    sizes = list(kwargs["sizes"] if "sizes" in kwargs else args[2])
    shape = tuple(tensor.shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // prod(size for size in sizes if size != -1)
    return _as_shape(name, tensor, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def _like(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, other = args[0], args[1]
    if not isinstance(tensor, SplitTensor):
        return None
    if name == "expand_as":
        return _expand(name, (tensor, *other.shape), {})
    return _as_shape(name, tensor, list(other.shape))


def _expand(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    sizes = list(args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:])
    place = len(sizes) - tensor.local.ndim + tensor.sharding.dim
    if sizes[place] not in (-1, tensor.sharding.length):
        raise SplitError(f"{name} stretches the split dimension", source=tensor.source)
    sizes[place] = -1
    return SplitTensor(tensor.local.expand(*sizes), tensor.sharding.at(place), tensor.group, tensor.source)


def _split(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    default = -1 if name == "unsafe_chunk" else 0
    dim = kwargs.get("dim", args[2] if len(args) > 2 else default) % tensor.local.ndim
    if dim != tensor.sharding.dim:
        return None
    named = ("chunks",) if "chunk" in name else ("split_size_or_sections", "split_size", "sections")
    asked = args[1] if len(args) > 1 else next(kwargs[key] for key in named if key in kwargs)
    length = tensor.sharding.length
    if isinstance(asked, int):
        step = -(-length // asked) if "chunk" in name else asked
        asked = [min(step, length - start) for start in range(0, length, step)]
    pieces, start = [], 0
    for size in asked:
        pieces.append(_slice(tensor, start, start + size))
        start += size
    return tuple(pieces)


def _slice(tensor: SplitTensor, start: int, stop: int) -> SplitTensor:
    """Return `tensor[start:stop]` along its split dimension, which must begin and end between segments."""
    sharding = tensor.sharding
    if (start, stop) == (0, sharding.length):
        return tensor
    bounds = [0]
    for segment in sharding.segments * sharding.repeats:
        bounds.append(bounds[-1] + segment)
    if start not in bounds or stop not in bounds:
        wanted = sorted({*bounds, start, stop})
        lengths = tuple(after - before for before, after in pairwise(wanted))
        raise SplitError(
            f"{_ranks(tensor)} does not divide the pieces {start}:{stop} of the output of {tensor.source}",
            source=tensor.source,
            segments=lengths if sharding.repeats == 1 else None,
        )
    segments = (sharding.segments * sharding.repeats)[bounds.index(start) : bounds.index(stop)]
    local = tensor.local.narrow(sharding.dim, start // sharding.size, (stop - start) // sharding.size)
    return SplitTensor(
        local, Sharding(dim=sharding.dim, segments=segments, size=sharding.size), tensor.group, tensor.source
    )


def _narrow(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, start, length = args
    return _slice(tensor, start, start + length) if dim % tensor.local.ndim == tensor.sharding.dim else None


def _unbind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % tensor.local.ndim
    if dim == tensor.sharding.dim:
        raise _taken_apart(tensor)
    return None


def _taken_apart(tensor: SplitTensor) -> SplitError:
    """Return the error for a split dimension whose entries are taken one by one: they are segments of the source."""
    return SplitError(
        f"the {tensor.sharding.length} parts of the output of {tensor.source} are taken apart",
        source=tensor.source,
        segments=(-tensor.sharding.length,),  # resolved by the search: so many segments of the source's own length
    )


def _getitem(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, index = args
    if not isinstance(tensor, SplitTensor):
        return None
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(entry, torch.Tensor) for entry in entries):
        return None
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        taken = sum(entry is not None for entry in entries) - 1
        entries[place : place + 1] = [slice(None)] * (tensor.local.ndim - taken)
    dim = -1
    for place, entry in enumerate(entries):
        dim += entry is not None
        if dim == tensor.sharding.dim and entry is not None:
            if not isinstance(entry, slice):
                raise _taken_apart(tensor)
            start, stop, step = entry.indices(tensor.sharding.length)
            if step != 1:
                raise SplitError("a stride along the split dimension", source=tensor.source, is_mixed=True)
            if (start, stop) != (0, tensor.sharding.length):
                entries[place] = slice(None)
                return _slice(tensor, start, stop)[tuple(entries)]
            entries[place] = slice(None)
            return None if index == tuple(entries) or not isinstance(index, tuple) else tensor[tuple(entries)]
    return None


def _cat(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if args else kwargs["tensors"]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    is_split = [isinstance(tensor, SplitTensor) for tensor in tensors]
    first = tensors[is_split.index(True)]
    kept = [(tensor, split) for tensor, split in zip(tensors, is_split, strict=True) if split or tensor.numel()]
    if len(kept) == 1 and name != "stack":
        return first  # what caches do that begin with an empty tensor
    if dim % first.local.ndim == first.sharding.dim and name != "stack":
        raise SplitError(f"{name} along the split dimension", source=first.source, is_mixed=True)
    if all(split for _, split in kept):
        return None
    parts = [tensor if split else _as_part(name, tensor, first) for tensor, split in kept]
    return (torch.stack if name == "stack" else torch.cat)(parts, dim=dim)


def _as_part(name: str, whole: torch.Tensor, like: SplitTensor) -> torch.Tensor:
    """Return what every rank has whole as a tensor split like another."""
    dim = like.sharding.dim
    if whole.ndim != like.ndim or whole.shape[dim] != like.sharding.length:
        raise SplitError(f"{name} of split and whole tensors", source=like.source, is_mixed=True)
    own = like.sharding.part(as_operand(whole, like), like.group.index)
    part: torch.Tensor = SplitTensor(own, like.sharding, like.group, like.source)
    return part


def _repeat_interleave(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if dim is None or not isinstance(repeats, int):
        raise SplitError(f"{name} of a whole split tensor", source=tensor.source, is_mixed=True)
    if dim % tensor.local.ndim != tensor.sharding.dim:
        return None
    sharding = tensor.sharding
    longer = Sharding(
        sharding.dim, tuple(segment * repeats for segment in sharding.segments), sharding.size, sharding.repeats
    )
    return SplitTensor(tensor.local.repeat_interleave(repeats, dim=dim), longer, tensor.group, tensor.source)


def _sizes(given: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return sizes that stand by themselves, in a sequence or under the name that the function has for them."""
    for name in ("repeats", "size"):
        if name in kwargs:
            return list(kwargs.pop(name))
    return list(given[0] if len(given) == 1 and not isinstance(given[0], int) else given)


def _repeat(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, sizes = args[0], _sizes(args[1:], dict(kwargs))
    place = len(sizes) - tensor.local.ndim + tensor.sharding.dim
    if sizes[place] == 1:
        return None
    if not tensor.sharding.divides:
        raise SplitError(f"{name} along the split dimension", source=tensor.source, is_mixed=True)
    sharding = replace(tensor.sharding, dim=place, repeats=tensor.sharding.repeats * sizes[place])
    return SplitTensor(tensor.local.repeat(*sizes), sharding, tensor.group, tensor.source)


def _new_empty(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return room for a tensor that is split like another: what is written there is of this rank's part."""
    kwargs = dict(kwargs)
    tensor, sizes = args[0], _sizes(args[1:], kwargs)
    dim = tensor.sharding.dim
    if len(sizes) != tensor.local.ndim or sizes[dim] != tensor.sharding.length:
        return tensor.local.new_empty(sizes, **kwargs)
    sizes[dim] = tensor.local.shape[dim]
    return SplitTensor(tensor.local.new_empty(sizes, **kwargs), tensor.sharding, tensor.group, tensor.source)


SIZE_RULES: dict[str, Rule] = {
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "view_as": _like,
    "reshape_as": _like,
    "expand_as": _like,
    "expand": _expand,
    "broadcast_to": _expand,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "narrow": _narrow,
    "unbind": _unbind,
    "__getitem__": _getitem,
    "cat": _cat,
    "concat": _cat,
    "stack": _cat,
    "repeat_interleave": _repeat_interleave,
    "repeat": _repeat,
    "new_empty": _new_empty,
}
