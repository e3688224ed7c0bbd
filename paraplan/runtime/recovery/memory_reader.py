"""The copies in memory as a checkpoint to read from: those of this node, and through its ranks those of the others."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paraplan.runtime.checkpoints.boxes import Box, CheckpointError, Description, Place
from paraplan.runtime.exchange import gather_json
from paraplan.runtime.recovery.memory_copies import Copied


class OtherGaveUpError(CheckpointError):
    """Another rank cannot go on from the copy, and has said so where this one was to read."""


_SMALL_BYTES = 1 << 16
"""Boxes up to this size are given to all nodes at once: counters, states of random numbers."""


class _Transfer(NamedTuple):
    """A box that one rank sends to another."""

    source: int
    target: int
    key: int


class MemoryReader:
    """The boxes of one copy. Every rank calls `read`, as often as the others: what a node lacks comes from another."""

    name = "the copy in memory"

    def __init__(self, copied: Sequence[Copied], *, rank: int = 0, nodes: Sequence[int] = (0,)) -> None:
        """Take what slots of this node hold of one copy; `nodes` are those of the ranks.

        Of a box that several wrote that of the lowest rank is kept: rank 0 knows the seed.
        """
        in_order = sorted(copied, key=lambda each: -each.writer)
        self._held = {box.place.key: box for each in in_order for box in each.state.boxes}
        self._writers = {box.place.key: each.writer for each in in_order for box in each.state.boxes}
        self._values = {name: (each.writer, value) for each in in_order for name, value in each.state.values.items()}
        self._rank, self._nodes = rank, nodes
        self._elsewhere: dict[int, dict[int, Place]] = {}
        self._has_given_up: Callable[[], bool] = lambda: False
        self._group: Any = None

    def join(self, has_given_up: Callable[[], bool]) -> None:
        """Learn what other nodes have, and take the small boxes of them. Every rank calls it.

        `has_given_up` says whether another rank does not read: all who read ask it together.
        """
        is_first = self._nodes.index(self._nodes[self._rank]) == self._rank
        small = [
            (self._writers[key], box.place.words, base64.b64encode(box.bytes.numpy().tobytes()).decode())
            for key, box in self._held.items()
            if box.place.num_bytes <= _SMALL_BYTES
        ]
        mine = {"places": [box.place.words for box in self._held.values()], "small": small, "values": self._values}
        told = gather_json(mine if is_first else None)
        by_node = {self._nodes[rank]: each for rank, each in enumerate(told) if each is not None}
        places = {node: [Place.of_words(words) for words in each["places"]] for node, each in by_node.items()}
        keys = {node: {place.key: place for place in found} for node, found in places.items()}
        small_ones = set()
        for each in by_node.values():
            for name, (writer, value) in each["values"].items():
                if name not in self._values or writer < self._values[name][0]:
                    self._values[name] = (writer, value)
            for writer, words, text in each["small"]:
                place = Place.of_words(words)
                small_ones.add(place.key)
                if place.key not in self._held or writer < self._writers[place.key]:
                    self._held[place.key], self._writers[place.key] = _box_of(place, base64.b64decode(text)), writer
        every = {key for found in keys.values() for key in found}
        if any(every - small_ones - found.keys() for found in keys.values()):
            self._elsewhere, self._has_given_up = keys, has_given_up
            self._group = dist.new_group(backend="gloo")

    @property
    def tensors(self) -> Mapping[str, Description]:
        """The tensors that there are."""
        places = [place for found in self._elsewhere.values() for place in found.values()]
        places += [box.place for box in self._held.values()]
        return {place.name: Description(place.whole, place.dtype) for place in places}

    @property
    def values(self) -> Mapping[str, Any]:
        """The values that are no tensor."""
        return {name: value for name, (_, value) in self._values.items()}

    def read(self, boxes: Sequence[Box]) -> None:
        """Fill `boxes`. Raises `CheckpointError` on every rank where not all is there, and `OtherGaveUpError`."""
        if self._elsewhere and self._has_given_up():
            raise OtherGaveUpError("another rank cannot go on from the copy in memory", hint="load a checkpoint")
        lacking = _unfilled(boxes, self._held.values())
        wanted = [[box.place.words for box in lacking]]
        if self._elsewhere:
            wanted = gather_json(wanted[0])
        transfers = [
            each
            for rank, places in enumerate(wanted)
            for each in self._sources(rank, [Place.of_words(words) for words in places])
        ]
        _unfilled(lacking, self._sent([*dict.fromkeys(transfers)]))

    def _sources(self, rank: int, places: Sequence[Place]) -> Iterator[_Transfer]:
        """Yield who sends what to a rank that lacks some boxes. Raises `CheckpointError` where nobody has them."""
        node = self._nodes[rank]
        place_of_rank = [each for each, other in enumerate(self._nodes) if other == node].index(rank)
        known = {key: (other, source) for other, found in self._elsewhere.items() for key, source in found.items()}
        known |= {key: (node, source) for key, source in self._elsewhere.get(node, {}).items()}
        by_name: dict[str, list[tuple[int, int, Place]]] = {}
        for key, (other, source) in known.items() if places else ():
            by_name.setdefault(source.name, []).append((key, other, source))
        for place in places:
            count = 0
            for key, other, source in by_name.get(place.name, ()):
                common = place.common(source)
                count += common
                if common and other != node:
                    ranks = [each for each, there in enumerate(self._nodes) if there == other]
                    yield _Transfer(ranks[place_of_rank % len(ranks)], rank, key)
            if count < math.prod(place.shape):
                raise CheckpointError(f"the copy in memory lacks some of {place.name}", hint="load a checkpoint")

    def _sent(self, transfers: Sequence[_Transfer]) -> list[Box]:
        """Send and receive what is to go between ranks; return what has come to this one."""
        works, come = [], list[Box]()
        for each in transfers:
            if each.source == self._rank:
                works.append(dist.isend(self._held[each.key].bytes, each.target, group=self._group))
            elif each.target == self._rank:
                place = next(found[each.key] for found in self._elsewhere.values() if each.key in found)
                box = Box(place, torch.empty(place.shape, dtype=place.dtype, device="cpu"))
                works.append(dist.irecv(box.bytes, each.source, group=self._group))
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
        if sum(target.fill(source) for source in by_name.get(target.name, ())) < target.values.numel()
    ]


def _box_of(place: Place, data: bytes) -> Box:
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return Box(place, values.view(place.dtype).view(place.shape))
