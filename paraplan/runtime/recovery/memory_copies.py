"""Copies of the training's state in memory that the launcher owns: they outlive the ranks, and go with the launcher.

Each rank has two slots and writes them in turn, during the forward and backward passes of the next step, when nothing
of the state changes. A slot counts once it is whole. Ranks begin a step together, and end their copy before they sum
gradients: so some step is whole on all of them at any moment. What no other node holds goes to the next node's memory
too: a node that dies does not take it along.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paraplan.runtime.checkpoints.boxes import Box, Place
from paraplan.runtime.checkpoints.entries import State

_HEAD = 64
_ALIGN = 64
_WORDS = 3  # of 8 bytes: whether it is whole, its step, the length of its index


class CopyName(NamedTuple):
    """Which copy it is: those of one step that belong together have the same name. The newest has the largest."""

    num_steps: int
    attempt: int
    """When the ranks that wrote it had started, in nanoseconds: those before them had other steps of this number."""
    world_size: int
    """The ranks that wrote it."""


class Copied(NamedTuple):
    """The contents of one slot."""

    name: CopyName
    writer: int
    """The rank that wrote it."""
    state: State

    @property
    def words(self) -> dict[str, Any]:
        """All but the values of boxes, as JSON holds it."""
        places = [box.place.words for box in self.state.boxes]
        return {"name": self.name, "writer": self.writer, "places": places, "values": self.state.values}


class Slot:
    """One copy of the state of one rank, in a file without a name."""

    def __init__(self, path: str) -> None:
        """Open the slot at `path`. Raises OSError where its owner is gone."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None

    def close(self) -> None:
        """Let go of it."""
        self._map = None
        os.close(self._descriptor)

    def write(self, copied: Copied) -> Copied:
        """Replace what is there; it is not whole until `commit`. Return what was written, with values in the slot."""
        room = self.lay_out(copied.words)
        for box, there in zip(copied.state.boxes, room.state.boxes, strict=True):
            there.values.copy_(box.values)
        return room

    def lay_out(self, words: Mapping[str, Any]) -> Copied:
        """Make room for what `words` describe in place of what is there; it is not whole until `commit`."""
        index = json.dumps(words).encode()
        places = map(Place.of_words, words["places"])
        size = _begin_of(len(index)) + sum(-(-place.num_bytes // _ALIGN) * _ALIGN for place in places)
        held = self._mapped(size)
        head = memoryview(held).cast("B")[: _WORDS * 8].cast("Q")
        head[0] = 0
        head[1], head[2] = words["name"][0], len(index)
        held[_HEAD : _HEAD + len(index)] = index
        return _copied_in(held, len(index), words)

    def commit(self) -> None:
        """Have it count."""
        assert self._map is not None
        memoryview(self._map).cast("B")[:8].cast("Q")[0] = 1

    def read(self) -> Copied | None:
        """Return what is there; None where nothing whole is."""
        size = os.fstat(self._descriptor).st_size
        if size < _HEAD:
            return None
        held = self._mapped(size)
        is_whole, _, length = memoryview(held).cast("B")[: _WORDS * 8].cast("Q")
        if not is_whole:
            return None
        return _copied_in(held, length, json.loads(held[_HEAD : _HEAD + length]))

    def _mapped(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return self._map


def _begin_of(length: int) -> int:
    """Return where values begin behind an index of so many bytes."""
    return -(-(_HEAD + length) // _ALIGN) * _ALIGN


def _copied_in(held: mmap.mmap, length: int, words: Mapping[str, Any]) -> Copied:
    """Return what `words`, an index of `length` bytes, describe: values are views of memory, one behind the other."""
    boxes, start = [], _begin_of(length)
    for place in map(Place.of_words, words["places"]):
        count = place.num_bytes
        flat = torch.frombuffer(held, dtype=torch.uint8, count=count, offset=start) if count else None
        flat = torch.empty(0, dtype=torch.uint8, device="cpu") if flat is None else flat
        boxes.append(Box(place, flat.view(place.dtype).view(place.shape)))
        start += -(-count // _ALIGN) * _ALIGN
    return Copied(CopyName(*words["name"]), words["writer"], State(boxes, words["values"]))


class Copier:
    """Writes the copies of one rank, in turn to its two slots, each from a thread of its own."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = cycle(slots)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._slot: Slot | None = None
        self._mirrored: Slot | None = None

    def begin(self, copied: Copied, mirror: Callable[[Copied], Slot] | None = None) -> None:
        """Begin to write. What the boxes hold must not change until `finish`.

        `mirror` gets what was written, in the slot, and returns the slot of another node's rank that it has filled.
        """
        self._slot = slot = next(self._slots)
        self._mirrored = None

        def work() -> None:
            try:
                written = slot.write(copied)
                self._mirrored = None if mirror is None else mirror(written)
            except BaseException as error:  # raised by `finish`, in the thread that trains
                self._failure = error

        self._thread = threading.Thread(target=work, daemon=True, name="paraplan-copy")
        self._thread.start()

    def finish(self, *, is_good: bool) -> bool:
        """Wait for the copy, if one is written, and have it count if the state `is_good`. Return whether one was."""
        if self._thread is None:
            return False
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        for slot in (self._slot, self._mirrored) if is_good else ():
            if slot is not None:
                slot.commit()
        return is_good


def newest_whole(found: Sequence[Mapping[CopyName, Sequence[int]]]) -> CopyName | None:
    """Return the newest copy that is there of all ranks that wrote it. `found` has writers by copy, by who looks."""
    writers: dict[CopyName, set[int]] = {}
    for each in found:
        for name, ranks in each.items():
            writers.setdefault(name, set()).update(ranks)
    whole = [name for name, ranks in writers.items() if len(ranks) == name.world_size]
    return max(whole, default=None)


_MOST_AT_ONCE = 1 << 28


@dataclass
class Neighbour:
    """The rank of the next node that keeps what this one holds alone, and that of the node before, for which it does.

    `slots` are written in turn. `group` is a group of gloo that nothing else uses: copies run beside the training.
    """

    to_rank: int
    from_rank: int
    slots: Iterator[Slot]
    group: Any = field(repr=False)

    def exchange(self, copied: Copied) -> Slot:
        """Send what this rank has copied; return the slot with what has come, which is not whole yet.

        Every rank calls it, from the thread that copies.
        """
        words = json.dumps(copied.words).encode()
        text = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        size = torch.tensor([len(words)], device="cpu")  # whatever torch's default device is
        other_size = torch.empty_like(size)
        self._swap([size], [other_size])
        other_text = torch.empty(int(other_size), dtype=torch.uint8, device="cpu")
        self._swap([text], [other_text])
        slot = next(self.slots)
        room = slot.lay_out(json.loads(other_text.numpy().tobytes()))
        self._swap([box.bytes for box in copied.state.boxes], [box.bytes for box in room.state.boxes])
        return slot

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Send to the one and receive from the other, both at once."""
        works = [
            start(piece, rank, group=self.group)
            for start, rank, tensors in ((dist.isend, self.to_rank, sent), (dist.irecv, self.from_rank, received))
            for tensor in tensors
            for piece in torch.split(tensor.view(torch.uint8), _MOST_AT_ONCE)
            if len(piece)
        ]
        for work in works:
            assert work is not None
            work.wait()
