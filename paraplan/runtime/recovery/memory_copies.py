"""Copies of the training's state in memory that the launcher owns: they outlive the ranks, and go with the launcher.

Each rank has two slots and writes them in turn, during the forward and backward passes of the next step, when nothing
of the state changes. A slot counts once it is whole. Ranks begin a step together, and end their copy before they sum
gradients: so some step is whole on all of them at any moment.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from paraplan.runtime.checkpoints.chunks import CheckpointChunks
from paraplan.runtime.checkpoints.entries import OPTIONS, PROGRESS

_HEAD = 64
_ALIGN = 64
_WORDS = 3  # of 8 bytes: whether it is whole, its step, the length of its index


@dataclass(frozen=True)
class Box:
    """A box of the whole tensor `name` at `offsets`, with its values."""

    name: str
    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    values: torch.Tensor

    @property
    def key(self) -> str:
        """What tells it from other boxes: replicas hold the same. Texts differ in length from step to step."""
        if self.is_text:
            return self.name
        return f"{self.name}@{self.offsets}+{tuple(self.values.shape)}"

    @property
    def is_text(self) -> bool:
        """Whether it is a text in bytes, and no tensor of the model."""
        return self.name == PROGRESS or self.name.startswith(OPTIONS)

    @property
    def num_bytes(self) -> int:
        """The size of its values."""
        return self.values.numel() * self.values.element_size()

    @property
    def words(self) -> list[Any]:
        """What it is, without its values, as JSON holds it."""
        return [self.name, self.offsets, list(self.values.shape), self.whole, str(self.values.dtype)]


def boxes_of(name: str, tensor: torch.Tensor) -> list[Box]:
    """Return the boxes that this rank holds of an entry of a checkpoint; values are those of the training."""
    if isinstance(tensor, DTensor):
        tensor = CheckpointChunks.of_shard(tensor)
    whole = tuple(tensor.shape)
    if isinstance(tensor, CheckpointChunks):
        return [Box(name, chunk.offsets, whole, chunk.values) for chunk in tensor.chunks]
    return [Box(name, (0,) * tensor.ndim, whole, tensor.detach())]


class CopyName(NamedTuple):
    """Which copy it is: those of one step that belong together have the same name. The newest has the largest."""

    num_steps: int
    attempt: int
    """When the ranks that wrote it had started, in nanoseconds: those before them had other steps of this number."""
    world_size: int
    """The ranks that wrote it."""


class Copied(NamedTuple):
    """What one slot holds."""

    name: CopyName
    writer: int
    """The rank that wrote it."""
    boxes: list[Box]


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

    def write(self, boxes: Sequence[Box], *, name: CopyName, writer: int) -> list[Box]:
        """Replace what is there; it is not whole until `commit`. Return the boxes with the values in the slot."""
        room = self.lay_out([box.words for box in boxes], name=name, writer=writer)
        for box, there in zip(boxes, room, strict=True):
            there.values.copy_(box.values)
        return room

    def lay_out(self, words: Sequence[Sequence[Any]], *, name: CopyName, writer: int) -> list[Box]:
        """Make room for boxes in place of what is there, and return them; it is not whole until `commit`."""
        index = json.dumps({"name": name, "writer": writer, "boxes": words}).encode()
        begin = -(-(_HEAD + len(index)) // _ALIGN) * _ALIGN
        size = begin + sum(-(-_num_bytes(each) // _ALIGN) * _ALIGN for each in words)
        held = self._mapped(size)
        head = memoryview(held).cast("B")[: _WORDS * 8].cast("Q")
        head[0] = 0
        head[1], head[2] = name.num_steps, len(index)
        held[_HEAD : _HEAD + len(index)] = index
        return _boxes_in(held, begin, words)

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
        index = json.loads(held[_HEAD : _HEAD + length])
        begin = -(-(_HEAD + length) // _ALIGN) * _ALIGN
        return Copied(CopyName(*index["name"]), index["writer"], _boxes_in(held, begin, index["boxes"]))

    def _mapped(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return self._map


def dtype_of(kind: str) -> torch.dtype:
    """Return the type that the words of a box name."""
    found = getattr(torch, kind.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def _num_bytes(words: Sequence[Any]) -> int:
    _, _, shape, _, kind = words
    count = dtype_of(kind).itemsize
    for length in shape:
        count *= length
    return count


def _boxes_in(held: mmap.mmap, begin: int, words: Sequence[Sequence[Any]]) -> list[Box]:
    """Return boxes whose values are views of memory, one behind the other."""
    boxes, place = [], begin
    for each in words:
        name, offsets, shape, whole, kind = each
        count, dtype = _num_bytes(each), dtype_of(kind)
        flat = torch.frombuffer(held, dtype=torch.uint8, count=count, offset=place) if count else None
        values = torch.empty(shape, dtype=dtype, device="cpu") if flat is None else flat.view(dtype).view(shape)
        boxes.append(Box(name, tuple(offsets), tuple(whole), values))
        place += -(-count // _ALIGN) * _ALIGN
    return boxes


class Copier:
    """Writes the copies of one rank, in turn to its two slots, each from a thread of its own."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = list(slots)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._slot = self._slots[0]
        self._mirrored: Slot | None = None

    def begin(
        self,
        boxes: Sequence[Box],
        *,
        name: CopyName,
        writer: int,
        mirror: Callable[[Sequence[Box]], Slot] | None = None,
    ) -> None:
        """Begin to write. What the boxes hold must not change until `finish`.

        `mirror` gets them as they are in the slot, and returns the slot of another node's rank that it has filled.
        """
        self._slot = self._slots.pop(0)
        self._slots.append(self._slot)
        self._mirrored = None

        def work() -> None:
            try:
                written = self._slot.write(boxes, name=name, writer=writer)
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
        if is_good:
            self._slot.commit()
            if self._mirrored is not None:
                self._mirrored.commit()
        return is_good


def unique(boxes: Sequence[Box], held_by_all: Sequence[Mapping[str, int]], rank: int) -> list[Box]:
    """Return those of `boxes` that rank `rank` of these writes: each box is written once, by who has least to write."""
    loads = [0] * len(held_by_all)
    owners: dict[str, int] = {}
    for key in sorted({key for held in held_by_all for key in held}):
        holders = [number for number, held in enumerate(held_by_all) if key in held]
        # rank 0 knows the seed: its texts are the ones to keep
        is_text = key == PROGRESS or key.startswith(OPTIONS)
        owner = holders[0] if is_text else min(holders, key=lambda number: loads[number])
        owners[key], loads[owner] = owner, loads[owner] + held_by_all[owner][key]
    return [box for box in boxes if owners[box.key] == rank]


def sizes(boxes: Sequence[Box]) -> dict[str, int]:
    """Return the bytes of each box by its key."""
    return {box.key: box.num_bytes for box in boxes}


def newest_whole(found: Sequence[Mapping[CopyName, Sequence[int]]]) -> CopyName | None:
    """Return the newest copy that is there of all ranks that wrote it. `found` has writers by copy, by who looks."""
    writers: dict[CopyName, set[int]] = {}
    for each in found:
        for name, ranks in each.items():
            writers.setdefault(name, set()).update(ranks)
    whole = [name for name, ranks in writers.items() if len(ranks) == name.world_size]
    return max(whole, default=None)


def describe(entries: Mapping[str, Any]) -> list[Box]:
    """Return the boxes of all entries."""
    return [box for name, tensor in entries.items() for box in boxes_of(name, tensor)]
