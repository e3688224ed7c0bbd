"""How what a call on parts returned lies in what it returns whole, told by the shapes of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch

from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.torch_private import tensors_in

Shape = tuple[int, ...]

_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"})
_SPLITS = frozenset({"split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "tensor_split"})
_FILLS = frozenset({"zeros", "ones", "empty", "full"})
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})


class SplitError(Exception):
    """A computation that ranks cannot do each on its part. It never leaves the search for a split.

    `source` is the layer whose output was split. `segments` is another way to cut that output, if one may help.
    `is_mixed` says that parts would have to be brought together: the layer may then be left whole.
    """

    def __init__(
        self, message: str, *, source: str, segments: tuple[int, ...] | None = None, is_mixed: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.source = source
        self.segments = segments
        self.is_mixed = is_mixed


@dataclass(frozen=True)
class Part:
    """How a tensor is the part of a whole one, and the layer `source` that it comes from.

    `is_open`: it has one value in all entries, as what a cache is made as; it may be in any segments of that length.
    """

    sharding: Sharding
    source: str
    is_open: bool = False


def part_of(tensor: Any) -> Part | None:
    """Return how `tensor` is split; None for one that every rank has whole."""
    found: Part | None = getattr(tensor, "_paraplan_part", None) if isinstance(tensor, torch.Tensor) else None
    return found


def known_part(tensor: torch.Tensor) -> Part:
    """Return how `tensor`, which is split, is split."""
    part = part_of(tensor)
    assert part is not None
    return part


def as_part(tensor: torch.Tensor, sharding: Sharding, source: str, *, is_open: bool = False) -> torch.Tensor:
    """Return `tensor`, known as a part."""
    tensor._paraplan_part = Part(sharding, source, is_open)  # type: ignore[attr-defined]
    return tensor


@dataclass(frozen=True)
class Call:
    """A call in the run on whole tensors: shapes in and out, and by what an index took some of a dimension."""

    name: str
    given: tuple[Shape, ...]
    returned: tuple[Shape, ...]
    index: Any = None


def shapes_in(tree: Any) -> tuple[Shape, ...]:
    """Return the shapes of the tensors of a nest."""
    return tuple(tuple(one.shape) for one in tensors_in(tree))


def entries_of(index: Any, ndim: int) -> dict[int, Any]:
    """Return what an index asks for of each dimension."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        taken = sum(entry is not None for entry in entries) - 1
        entries[place : place + 1] = [slice(None)] * (ndim - taken)
    return dict(enumerate(entry for entry in entries if entry is not None))


@dataclass(frozen=True)
class PartialResult:
    """A call that has run, as far as it is known: the call on whole tensors, and the parts and arguments it ran on."""

    name: str
    call: Call
    split: list[torch.Tensor]
    given: Any

    @property
    def part(self) -> Part:
        """How the first of the parts is split."""
        return known_part(self.split[0])

    def error(self, message: str) -> SplitError:
        """Return the error for parts that would have to be brought together."""
        return SplitError(message.format(source=self.part.source), source=self.part.source, is_mixed=True)


def mark_parts(of: PartialResult, result: Any) -> None:
    """Mark what a call on parts returned as parts of what it returns whole; raise `SplitError` where it is not."""
    found, first, cut = tensors_in(result), of.split[0], of.part.sharding
    if len(found) != len(of.call.returned):
        raise of.error(f"{of.name} returns as many tensors as the output of {{source}} has entries")
    if of.name in _RESHAPES:
        cuts = [_reshaped(of, cut.whole_shape(first.shape), of.call.returned[0])]
    elif of.name in _SPLITS:
        cuts = _pieces(of, first, found)
    elif of.name in ("__getitem__", "narrow") and of.call.index is not None and part_of(of.given[0][0]):
        cuts = [_taken(of, first, found[0])]
    elif of.name in ("cat", "concat"):
        cuts = [_joined(of, found[0])]
    elif of.name.startswith("new_") and shapes_in(result) == of.call.returned:
        return
    else:
        cuts = [_cut_of(of, local, whole) for local, whole in zip(found, of.call.returned, strict=True)]
    for local, whole, sharding in zip(found, of.call.returned, cuts, strict=True):
        if tuple(local.shape) != sharding.local_shape(whole):
            raise of.error(f"{of.name} mixes what the ranks hold of the output of {{source}}")
    is_open = of.part.is_open and len(tensors_in(of.given)) == 1
    for local, sharding in zip(found, cuts, strict=True):
        as_part(local, sharding, of.part.source, is_open=is_open)


def mark_made(name: str, result: Any, call: Call, group: TensorGroup, source: str) -> Any:
    """Return what code made in sizes that it saw parts of `source` have, known as parts too."""
    for local, whole in zip(tensors_in(result), call.returned, strict=True):
        differing = [dim for dim, (one, all_) in enumerate(zip(local.shape, whole, strict=True)) if one != all_]
        if len(differing) != 1 or local.shape[differing[0]] * group.size != whole[differing[0]]:
            raise SplitError(f"{name} makes what has sizes of parts", source=source, is_mixed=True)
        cut = Sharding(differing[0], (whole[differing[0]],), group.size)
        as_part(local, cut, source, is_open=name in _FILLS)
    return result


def _cut_of(of: PartialResult, local: torch.Tensor, whole: Shape) -> Sharding:
    """Return how a result is cut: in the dimension in which it is shorter than the whole."""
    cut = of.part.sharding
    differing = [dim for dim, (part, all_) in enumerate(zip(local.shape, whole, strict=True)) if part != all_]
    if len(differing) != 1 or whole[differing[0]] != local.shape[differing[0]] * cut.size:
        raise of.error(f"{of.name} mixes what the ranks hold of the output of {{source}}")
    dim, length = differing[0], whole[differing[0]]
    times = length // cut.length
    if length == cut.length:
        return cut.at(dim)
    if of.name == "repeat_interleave" and length == times * cut.length:
        return replace(cut, dim=dim, segments=tuple(one * times for one in cut.segments))
    if of.name in ("repeat", "tile") and length == times * cut.length:
        return replace(cut, dim=dim, repeats=cut.repeats * times)
    # Grouped queries: more heads than the first operand has; both are cut in the plainest way.
    if of.name in CONVOLUTIONS:
        return replace(cut, dim=dim, segments=tuple(one * length // cut.length for one in cut.segments))
    if len(cut.segments) > 1 or cut.repeats > 1:
        raise of.error(f"{of.name} changes the length of the output of {{source}}")
    return Sharding(dim=dim, segments=(length,), size=cut.size)


def _pieces(of: PartialResult, first: torch.Tensor, found: list[torch.Tensor]) -> list[Sharding]:
    cut, whole = of.part.sharding, of.part.sharding.whole_shape(first.shape)
    along = {dim for shape in of.call.returned for dim in range(len(whole)) if shape[dim] != whole[dim]}
    if along != {cut.dim}:
        return [cut] * len(found)
    bounds = [0, *accumulate(shape[cut.dim] for shape in of.call.returned)]
    return [_run_of(of, start, stop) for start, stop in pairwise(bounds)]


def _taken(of: PartialResult, first: torch.Tensor, local: torch.Tensor) -> Sharding:
    cut, whole = of.part.sharding, of.call.returned[0]
    length = cut.length
    now = of.given[0][1:]
    if of.name == "narrow":
        dim, start, count = of.call.index
        bounds = (start, start + count) if dim % first.ndim == cut.dim else (0, length)
        own_start = now[1] if dim % first.ndim == cut.dim else 0
    else:
        entry, own = (entries_of(index, first.ndim).get(cut.dim, slice(None)) for index in (of.call.index[0], now[0]))
        start, stop, step = entry.indices(length)
        if step != 1:
            raise of.error("a stride along the output of {source}")
        bounds, own_start = (start, stop), own.indices(first.shape[cut.dim])[0]
    taken = cut if bounds == (0, length) else _run_of(of, *bounds)
    if own_start * cut.size != bounds[0]:
        raise of.error(f"{of.name} takes another part of the output of {{source}}")
    short = [dim for dim, (part, all_) in enumerate(zip(local.shape, whole, strict=True)) if part != all_]
    return taken.at(short[0] if len(short) == 1 else 0)


def _run_of(of: PartialResult, start: int, stop: int) -> Sharding:
    """Return the cut of the entries from `start` to `stop`, which must begin and end between segments."""
    cut = of.part.sharding
    bounds = [0, *accumulate(cut.segments * cut.repeats)]
    if start not in bounds or stop not in bounds:
        lengths = tuple(after - before for before, after in pairwise(sorted({*bounds, start, stop})))
        if any(one % cut.size for one in (start, stop)):
            message = f"tp={cut.size} does not divide the entries {start} to {stop} that its code takes"
        else:
            message = f"its code takes the entries {start} to {stop} of {cut.length}"
        error = of.error(f"{message} of the output of {{source}}")
        error.segments = lengths if cut.repeats == 1 else None
        raise error
    return Sharding(cut.dim, (cut.segments * cut.repeats)[bounds.index(start) : bounds.index(stop)], cut.size)


def _joined(of: PartialResult, local: torch.Tensor) -> Sharding:
    """Return how tensors are cut that were put one behind the other: along what is split, in all of their segments."""
    args, kwargs = of.given
    tensors, dim = args[0] if args else kwargs["tensors"], kwargs.get("dim", args[1] if len(args) > 1 else 0)
    cut, kept = of.part.sharding, [one for one in tensors if part_of(one) or one.numel()]
    if dim % local.ndim != cut.dim or len(kept) == 1:
        return _cut_of(of, local, of.call.returned[0])
    if not all(part_of(one) for one in kept):
        raise of.error(f"{of.name} of split and whole tensors along the output of {{source}}")
    cuts = [known_part(one).sharding for one in kept]
    return Sharding(cut.dim, tuple(one for each in cuts for one in each.segments * each.repeats), cut.size)


def _reshaped(of: PartialResult, before: Shape, after: Shape) -> Sharding:
    cut = of.part.sharding
    sharding = reshaped_sharding(cut, before, after)
    if sharding is not None:
        return sharding
    group = _matching_group(before, after, cut.dim)
    segments, numbers = None, [size for size in after if size > 1]
    if group is not None:
        numbers = [size for size in after[group[1][0] : group[1][1]] if size > 1]
        if len(numbers) > 2 and cut.length % numbers[0] == 0 and cut.repeats == 1:
            segments = (cut.length // numbers[0],) * numbers[0]
    of_heads = f"{numbers[0]} heads" if len(numbers) == 2 else f"sizes {numbers}"
    raise SplitError(
        f"tp={cut.size} does not divide the {of_heads} that the output of {of.part.source} is viewed as",
        source=of.part.source,
        segments=segments,
    )


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
