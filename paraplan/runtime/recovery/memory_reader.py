"""The copies in memory as a checkpoint to read from: those of this node, and through its ranks those of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from paraplan.runtime.checkpoints.safe_reader import CheckpointError
from paraplan.runtime.recovery.memory_copies import Box, Copied, boxes_of, dtype_of

Gather = Callable[[Any], list[Any]]


class OtherGaveUpError(CheckpointError):
    """Another rank cannot go on from the copy, and has said so where this one was to read."""


_SMALL_BYTES = 1 << 16
"""Boxes up to this size are given to all nodes at once: texts, counters, states of random numbers."""


class _Place(NamedTuple):
    """A box without values: a target to fill, or a source that some node has."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class _Transfer(NamedTuple):
    """A box that one rank sends to another."""

    source: int
    target: int
    key: str


class MemoryReader:
    """The boxes of one copy. Every rank calls `read`, as often as the others: what a node lacks comes from another."""

    name = "the copy in memory"

    def __init__(self, copied: Sequence[Copied], *, rank: int = 0, nodes: Sequence[int] = (0,)) -> None:
        """Take what slots of this node hold of one copy; `nodes` are those of the ranks.

        Of a box that several wrote that of the lowest rank is kept: rank 0 knows the seed.
        """
        in_order = sorted(copied, key=lambda each: -each.writer)
        self._held = {box.key: box for each in in_order for box in each.boxes}
        self._writers = {box.key: each.writer for each in in_order for box in each.boxes}
        self._rank, self._nodes = rank, nodes
        self._elsewhere: dict[int, dict[str, list[Any]]] = {}
        self._gather: Gather = lambda mine: [mine]
        self._has_given_up: Callable[[], bool] = lambda: False
        self._group: Any = None

    def join(self, gather: Gather, has_given_up: Callable[[], bool]) -> None:
        """Learn what other nodes have, and take the small boxes of them. Every rank calls it.

        `has_given_up` says whether another rank does not read: all who read ask it together.
        """
        is_first = self._nodes.index(self._nodes[self._rank]) == self._rank
        small = {key: (self._writers[key], box) for key, box in self._held.items() if box.num_bytes <= _SMALL_BYTES}
        told = gather(([box.words for box in self._held.values()], small) if is_first else None)
        by_node = {self._nodes[rank]: each for rank, each in enumerate(told) if each is not None}
        keys = {node: {_key(words): words for words in found} for node, (found, _) in by_node.items()}
        for _, boxes in by_node.values():
            for key, (writer, box) in boxes.items():
                if key not in self._held or writer < self._writers[key]:
                    self._held[key], self._writers[key] = box, writer
        every = {key for found in keys.values() for key in found}
        small_ones = {key for _, boxes in by_node.values() for key in boxes}
        if any(every - small_ones - found.keys() for found in keys.values()):
            self._elsewhere, self._gather, self._has_given_up = keys, gather, has_given_up
            self._group = dist.new_group(backend="gloo")

    @property
    def saved(self) -> Mapping[str, TensorStorageMetadata]:
        """What there is, as the index of a checkpoint says it."""
        words = [each for found in self._elsewhere.values() for each in found.values()]
        words += [box.words for box in self._held.values()]  # of a text in several lengths this node's own
        return {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype_of(kind)), size=torch.Size(whole), chunks=[]
            )
            for name, _, _, whole, kind in words
        }

    def read(self, entries: Mapping[str, torch.Tensor]) -> None:
        """Fill `entries`. Raises `CheckpointError` on every rank where not all is there, and `OtherGaveUpError`."""
        if self._elsewhere and self._has_given_up():
            raise OtherGaveUpError("another rank cannot go on from the copy in memory", hint="load a checkpoint")
        targets = [box for name, tensor in entries.items() for box in boxes_of(name, tensor)]
        lacking = _unfilled(targets, self._held.values())
        wanted = self._gather([_Place(box.name, box.offsets, tuple(box.values.shape)) for box in lacking])
        transfers = [each for rank, places in enumerate(wanted) for each in self._sources(rank, places)]
        _unfilled(lacking, self._sent([*dict.fromkeys(transfers)]))

    def _sources(self, rank: int, places: Sequence[_Place]) -> Iterator[_Transfer]:
        """Yield who sends what to a rank that lacks some boxes. Raises `CheckpointError` where nobody has them."""
        node = self._nodes[rank]
        own = self._elsewhere.get(node, {})
        place_of_rank = [each for each, other in enumerate(self._nodes) if other == node].index(rank)
        known = {key: (other, words) for other, found in self._elsewhere.items() for key, words in found.items()}
        known |= {key: (node, words) for key, words in own.items()}
        by_name: dict[str, list[tuple[str, int, _Place]]] = {}
        for key, (other, (name, offsets, shape, *_)) in known.items() if places else ():
            by_name.setdefault(name, []).append((key, other, _Place(name, tuple(offsets), tuple(shape))))
        for place in places:
            count = 0
            for key, other, source in by_name.get(place.name, ()):
                common = _common(place, source)
                count += common
                if common and other != node:
                    ranks = [each for each, there in enumerate(self._nodes) if there == other]
                    yield _Transfer(ranks[place_of_rank % len(ranks)], rank, key)
            if count < _volume(place.shape):
                raise CheckpointError(f"the copy in memory lacks some of {place.name}", hint="load a checkpoint")

    def _sent(self, transfers: Sequence[_Transfer]) -> list[Box]:
        """Send and receive what is to go between ranks; return what has come to this one."""
        works, come = [], list[Box]()
        for each in transfers:
            if each.source == self._rank:
                values = self._held[each.key].values.reshape(-1).view(torch.uint8)
                works.append(dist.isend(values, each.target, group=self._group))
            elif each.target == self._rank:
                words = next(found[each.key] for found in self._elsewhere.values() if each.key in found)
                name, offsets, shape, whole, kind = words
                box = Box(name, tuple(offsets), tuple(whole), torch.empty(shape, dtype=dtype_of(kind), device="cpu"))
                works.append(dist.irecv(box.values.view(-1).view(torch.uint8), each.source, group=self._group))
                come.append(box)
        for work in works:
            assert work is not None
            work.wait()
        return come


def _unfilled(targets: Sequence[Box], sources: Iterable[Box]) -> list[Box]:
    """Copy what boxes have in common; return the targets that are not whole by that."""
    by_name: dict[str, list[Box]] = {}
    for source in sources:
        by_name.setdefault(source.name, []).append(source)
    return [
        target
        for target in targets
        if sum(_fill(target, source) for source in by_name.get(target.name, ())) < target.values.numel()
    ]


def _key(words: Sequence[Any]) -> str:
    name, offsets, shape, whole, kind = words
    return Box(name, tuple(offsets), tuple(whole), torch.empty(shape, dtype=dtype_of(kind), device="meta")).key


def _volume(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _common(here: _Place, there: _Place) -> int:
    """Return how many elements two boxes of one tensor have in common."""
    count = 1
    for first, length, other, other_length in zip(here.offsets, here.shape, there.offsets, there.shape, strict=True):
        count *= max(0, min(first + length, other + other_length) - max(first, other))
    return count


def _fill(target: Box, source: Box) -> int:
    """Copy what two boxes have in common; return the number of elements."""
    if not target.values.ndim:
        target.values.copy_(source.values)
        return 1
    here, there, count = target.values, source.values, 1
    for dim, (start, other) in enumerate(zip(target.offsets, source.offsets, strict=True)):
        first = max(start, other)
        length = min(start + target.values.shape[dim], other + source.values.shape[dim]) - first
        if length <= 0:
            return 0
        here, there = here.narrow(dim, first - start, length), there.narrow(dim, first - other, length)
        count *= length
    here.copy_(there)
    return count
