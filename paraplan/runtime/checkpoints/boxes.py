"""The state of a training as boxes of whole tensors: what a rank holds of them, and how boxes of two splits meet.

A fused projection of which a rank holds some rows of each of three thirds is several boxes, which no placement of
DTensor describes. Checkpoints on disk and the copies in memory are both made of these boxes.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from paraplan.errors import ParaplanError
from paraplan.runtime.exchange import gather_bytes
from paraplan.runtime.shards.sharding import ShardLocation
from paraplan.runtime.torch_private import local_shape_and_offset

DAMAGED = "it is damaged; load an older one"


class CheckpointError(ParaplanError):
    """A checkpoint that does not exist, cannot be read, or belongs to another model."""


def key_of(text: str) -> int:
    """Return 64 bits that stand for the name of a box or a value; that ranks compare."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@dataclass(frozen=True)
class Description:
    """The shape and the type of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Place:
    """Where a box lies: at `offsets`, of `shape`, in the tensor `name` of shape `whole`."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype

    @property
    def key(self) -> int:
        """The key that tells it from other boxes: replicas hold boxes of one key."""
        return key_of(f"{self.name}@{self.offsets}+{self.shape}")

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def key_in_file(self) -> str:
        """The name under which a file holds the box: the tensor's own where it is whole, else with its offsets."""
        if self.shape == self.whole and "@" not in self.name:
            return self.name
        return f"{self.name}@{','.join(map(str, self.offsets))}"

    @property
    def words(self) -> list[Any]:
        """The place as JSON holds it."""
        return [self.name, self.offsets, self.shape, self.whole, str(self.dtype).removeprefix("torch.")]

    @classmethod
    def of_words(cls, words: Sequence[Any]) -> Place:
        """Return the place that `words` describe."""
        name, offsets, shape, whole, kind = words
        return cls(name, tuple(offsets), tuple(shape), tuple(whole), getattr(torch, kind))

    def common(self, other: Place) -> int:
        """Return how many elements two boxes of one tensor have in common."""
        return math.prod(
            max(0, min(first + length, second + other_length) - max(first, second))
            for first, length, second, other_length in zip(
                self.offsets, self.shape, other.offsets, other.shape, strict=True
            )
        )


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor, with its values."""

    place: Place
    values: torch.Tensor

    @classmethod
    def of(cls, name: str, offsets: Sequence[int], whole: Sequence[int], values: torch.Tensor) -> Box:
        """Return the box of `values` at `offsets` in the tensor `name` of shape `whole`."""
        return cls(Place(name, tuple(offsets), tuple(values.shape), tuple(whole), values.dtype), values)

    @property
    def name(self) -> str:
        """The name of the whole tensor."""
        return self.place.name

    @property
    def bytes(self) -> torch.Tensor:
        """The values, which are in the host's memory, as bytes in their place."""
        return self.values.view(-1).view(torch.uint8)

    def copied(self) -> Box:
        """Return the box with a copy of its values in the host's memory."""
        return replace(self, values=self.values.to("cpu", copy=True))

    def fill(self, source: Box) -> int:
        """Copy what `source`, a box of the same tensor, has in common with this one; return the number of elements."""
        count = self.place.common(source.place)
        if count:
            here, there = self.values, source.values
            for dim, (start, other) in enumerate(zip(self.place.offsets, source.place.offsets, strict=True)):
                first = max(start, other)
                length = min(start + self.place.shape[dim], other + source.place.shape[dim]) - first
                here, there = here.narrow(dim, first - start, length), there.narrow(dim, first - other, length)
            here.copy_(there)
        return count


def boxes_of(name: str, tensor: torch.Tensor, *locations: ShardLocation) -> list[Box]:
    """Return what this rank holds of the whole tensor `name`; values are views of `tensor`.

    That is a whole tensor, a part of it by `locations`, or a DTensor of any mesh that shards either.
    """
    local, offsets = tensor.detach(), (0,) * tensor.ndim
    shape = tuple(local.shape)
    if isinstance(local, DTensor):
        _, offsets = local_shape_and_offset(local.shape, local.device_mesh, local.placements)
        local = local.to_local()
    if not locations and (local.numel() or tuple(local.shape) == shape):
        return [Box.of(name, offsets, shape, _plain(name, local))]
    parts = [(list(offsets), local)] if local.numel() else []
    for location in locations:
        parts = [found for start, values in parts for found in _placed(start, values, location)]
        shape = location.sharding.whole_shape(shape)
    return [Box.of(name, start, shape, _plain(name, values)) for start, values in parts]


def _placed(
    offsets: Sequence[int], values: torch.Tensor, location: ShardLocation
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield `values`, which begin at `offsets` of a part, by the pieces of it that lie together in the larger one."""
    dim = location.sharding.dim
    first = offsets[dim]
    for whole_start, part_start, length in location.sharding.pieces(location.index):
        start, stop = max(part_start, first), min(part_start + length, first + values.shape[dim])
        if start < stop:
            moved = [*offsets]
            moved[dim] = whole_start + start - part_start
            yield moved, values.narrow(dim, start - first, stop - start)


def _plain(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return `values`, which a file is to hold. Raises `CheckpointError` where they are more than numbers in a row."""
    is_plain = type(values) is torch.Tensor and values.layout == torch.strided
    if not is_plain or values.is_quantized or values.is_conj() or values.is_neg():
        raise CheckpointError(
            f"{name} is a tensor of type {type(values).__name__}, {values.layout}, which cannot be written",
            hint="keep plain tensors in the model and in the optimizer's state",
        )
    return values


def gather_sizes(sizes: Mapping[int, int], group: dist.ProcessGroup | None = None) -> list[dict[int, int]]:
    """Return the bytes of what each rank holds, by keys. Every rank calls it."""
    told = gather_bytes(np.array([*sizes.items()], dtype=np.uint64).tobytes(), group)
    assert told is not None
    columns = [np.frombuffer(each, dtype=np.uint64).reshape(-1, 2).T.tolist() for each in told]
    return [dict(zip(keys, counts, strict=True)) for keys, counts in columns]


def owner_of_each(sizes_by_rank: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return the rank that writes each box, by its key: the one with the least to write so far of those that hold it.

    `sizes_by_rank` are the bytes of the boxes that each rank holds. What takes none (a text) is rank 0's, or the
    next one's: rank 0 knows the seed.
    """
    holders: dict[int, list[int]] = {}
    for rank, sizes in enumerate(sizes_by_rank):
        for key in sizes:
            holders.setdefault(key, []).append(rank)
    loads, owners = [0] * len(sizes_by_rank), {}
    for key in sorted(holders):
        size = sizes_by_rank[holders[key][0]][key]
        owners[key] = min(holders[key], key=loads.__getitem__) if size else holders[key][0]
        loads[owners[key]] += size
    return owners


def covers(whole: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes, offsets and shapes, lie in a tensor of shape `whole` and have each element of it once.

    Boxes whose corners cancel out, but for those of the whole, cover each element an odd number of times. With the
    volume of the whole that is once.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    num_elements, num_covered = math.prod(whole), 0
    for offsets, shape in boxes:
        if not len(offsets) == len(shape) == len(whole):
            return False
        ends = [start + length for start, length in zip(offsets, shape, strict=True)]
        if any(end > length for end, length in zip(ends, whole, strict=True)):
            return False
        count = math.prod(shape)
        num_covered += count
        if len(boxes) > 1 and count:
            corners.update(itertools.product(*zip(offsets, ends, strict=True)))
    if not boxes or num_covered != num_elements:
        return False
    if len(boxes) == 1 or not num_elements:
        return True
    odd = {corner for corner, count in corners.items() if count % 2}
    return odd == set(itertools.product(*((0, length) for length in whole)))
