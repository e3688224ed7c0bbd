"""How a tensor is cut over the ranks of `tp` or `ep`: which rank holds which part of which dimension."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class Sharding:
    """A dimension that `size` ranks share. It consists of `segments`, repeated `repeats` times.

    Every segment is cut into `size` equal parts, one a rank, so a rank holds the parts of all segments in order. A
    fused projection of query, key and value has three segments; a dimension cut in the plainest way has one. That one
    need not divide (a vocabulary): then the last ranks have fewer, or none. With an `owner` that rank has all of it (a
    layer of one expert).
    """

    dim: int
    segments: tuple[int, ...]
    size: int
    repeats: int = 1
    owner: int | None = None
    divides: bool = field(init=False, compare=False, repr=False)
    """Whether every segment has equal parts."""
    is_plain: bool = field(init=False, compare=False, repr=False)
    """Whether it is one segment in equal parts."""

    def __post_init__(self) -> None:
        divides = self.owner is None and {0}.issuperset([segment % self.size for segment in self.segments])
        object.__setattr__(self, "divides", divides)
        object.__setattr__(self, "is_plain", divides and len(self.segments) == self.repeats == 1)

    @property
    def length(self) -> int:
        """Length of the whole dimension."""
        return self.repeats * sum(self.segments)

    def at(self, dim: int) -> Sharding:
        """Return the same cut of another dimension."""
        return replace(self, dim=dim)

    def local_length(self, index: int) -> int:
        """Return how much of the dimension rank `index` holds."""
        return sum(length for _, _, length in self.pieces(index))

    def local_shape(self, whole: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one rank's part of a tensor of shape `whole`, which divides."""
        return (*whole[: self.dim], whole[self.dim] // self.size, *whole[self.dim + 1 :])

    def whole_shape(self, local: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor of which one rank's part has shape `local`."""
        length = local[self.dim] * self.size if self.divides else self.length
        return (*local[: self.dim], length, *local[self.dim + 1 :])

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """Return what rank `index` holds along the dimension: (start in the whole, start in the part, length)."""
        if self.owner is not None:
            return [(0, 0, self.length)] if index == self.owner else []
        if not self.divides:
            assert len(self.segments) == self.repeats == 1
            share = -(-self.length // self.size)
            start = min(index * share, self.length)
            return [(start, 0, min(share, self.length - start))]
        found = []
        whole_start = local_start = 0
        for _ in range(self.repeats):
            for segment in self.segments:
                length = segment // self.size
                found.append((whole_start + index * length, local_start, length))
                whole_start += segment
                local_start += length
        return found

    def part(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return rank `index`'s part of `whole`; gradients flow back to it."""
        if self.is_plain:
            length = self.segments[0] // self.size
            return whole.narrow(self.dim, index * length, length)
        pieces = self.pieces(index)
        if not pieces:
            return whole.narrow(self.dim, 0, 0)
        if len(pieces) == 1:
            start, _, length = pieces[0]
            return whole.narrow(self.dim, start, length)
        if len(set(self.segments)) == 1:  # no loop over the repeats, of which there may be thousands
            length = self.segments[0]
            shape = (*whole.shape[: self.dim], -1, length, *whole.shape[self.dim + 1 :])
            share = length // self.size
            rows = whole.reshape(shape).narrow(self.dim + 1, index * share, share)
            return rows.reshape(self.local_shape(whole.shape))
        return torch.cat([whole.narrow(self.dim, start, length) for start, _, length in pieces], dim=self.dim)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the whole of the `parts` of all ranks in order."""
        if len(self.segments) == 1 and self.repeats == 1:
            return torch.cat(parts, dim=self.dim)
        views = [torch.unflatten(part, self.dim, (self.repeats, -1)) for part in parts]
        lengths = [segment // self.size for segment in self.segments]
        split = [torch.split_with_sizes(view, lengths, dim=self.dim + 1) for view in views]
        ordered = [part[number] for number in range(len(lengths)) for part in split]
        return torch.cat(ordered, dim=self.dim + 1).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class ShardLocation:
    """Where a part lies in a larger one: rank `index` of those that share it has it by `sharding`."""

    sharding: Sharding
    index: int
