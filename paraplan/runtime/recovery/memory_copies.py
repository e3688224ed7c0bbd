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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from paraplan.runtime.checkpoints.chunks import CheckpointChunks
from paraplan.runtime.checkpoints.entries import OPTIONS, PROGRESS
from paraplan.runtime.checkpoints.safe_reader import CheckpointError

_HEAD = 64
_ALIGN = 64
_WORDS = 3  # of 8 bytes: whether it is whole, its step, the length of its index
_INDEX, _DATA = "index", "data"


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


def boxes_of(name: str, tensor: torch.Tensor) -> list[Box]:
    """Return the boxes that this rank holds of an entry of a checkpoint; values are those of the training."""
    if isinstance(tensor, DTensor):
        tensor = CheckpointChunks.of_shard(tensor)
    whole = tuple(tensor.shape)
    if isinstance(tensor, CheckpointChunks):
        return [Box(name, chunk.offsets, whole, chunk.values) for chunk in tensor.chunks]
    return [Box(name, (0,) * tensor.ndim, whole, tensor.detach())]


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

    def write(self, boxes: Sequence[Box], *, num_steps: int, world_size: int) -> None:
        """Replace what is there; it is not whole until `commit`."""
        places, at = [], 0
        for box in boxes:
            places.append(at)
            at += -(-box.num_bytes // _ALIGN) * _ALIGN
        index = json.dumps(
            {
                "world_size": world_size,
                "boxes": [
                    [box.name, box.offsets, list(box.values.shape), box.whole, str(box.values.dtype), place]
                    for box, place in zip(boxes, places, strict=True)
                ],
            }
        ).encode()
        begin = -(-(_HEAD + len(index)) // _ALIGN) * _ALIGN
        held = self._mapped(begin + at)
        words = memoryview(held).cast("B")[: _WORDS * 8].cast("Q")
        words[0] = 0
        words[1], words[2] = num_steps, len(index)
        held[_HEAD : _HEAD + len(index)] = index
        for box, place in zip(boxes, places, strict=True):
            if box.num_bytes:
                target = torch.frombuffer(held, dtype=torch.uint8, count=box.num_bytes, offset=begin + place)
                target.view(box.values.dtype).view(box.values.shape).copy_(box.values)

    def commit(self) -> None:
        """Have it count."""
        assert self._map is not None
        memoryview(self._map).cast("B")[:8].cast("Q")[0] = 1

    def read(self) -> tuple[int, int, list[Box]] | None:
        """Return steps, number of ranks, and boxes; None where nothing whole is there."""
        size = os.fstat(self._descriptor).st_size
        if size < _HEAD:
            return None
        held = self._mapped(size)
        is_whole, num_steps, length = memoryview(held).cast("B")[: _WORDS * 8].cast("Q")
        if not is_whole:
            return None
        index = json.loads(held[_HEAD : _HEAD + length])
        begin = -(-(_HEAD + length) // _ALIGN) * _ALIGN
        boxes = []
        for name, offsets, shape, whole, kind, place in index["boxes"]:
            dtype = getattr(torch, kind.removeprefix("torch."))
            count = dtype.itemsize
            for length_of_dim in shape:
                count *= length_of_dim
            flat = torch.frombuffer(held, dtype=torch.uint8, count=count, offset=begin + place) if count else None
            values = torch.empty(shape, dtype=dtype) if flat is None else flat.view(dtype).view(shape)
            boxes.append(Box(name, tuple(offsets), tuple(whole), values))
        return num_steps, int(index["world_size"]), boxes

    def _mapped(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return self._map


class Copier:
    """Writes the copies of one rank, in turn to its two slots, each from a thread of its own."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = list(slots)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._slot = self._slots[0]

    def begin(self, boxes: Sequence[Box], *, num_steps: int, world_size: int) -> None:
        """Begin to write. What the boxes hold must not change until `finish`."""
        self._slot = self._slots.pop(0)
        self._slots.append(self._slot)

        def work() -> None:
            try:
                self._slot.write(boxes, num_steps=num_steps, world_size=world_size)
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
        return is_good


class MemoryReader:
    """The boxes of one step, of all ranks of this node, as a checkpoint to read from."""

    name = "the copy in memory"

    def __init__(self, boxes: Sequence[Box]) -> None:
        """Take the boxes; of replicas one is enough."""
        self._boxes: dict[str, list[Box]] = {}
        for box in boxes:
            self._boxes.setdefault(box.name, []).append(box)

    @property
    def saved(self) -> Mapping[str, TensorStorageMetadata]:
        """What there is, as the index of a checkpoint says it."""
        return {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=found[0].values.dtype), size=torch.Size(found[0].whole), chunks=[]
            )
            for name, found in self._boxes.items()
        }

    def read(self, entries: Mapping[str, torch.Tensor]) -> None:
        """Fill `entries`. Raises `CheckpointError` where not all of one is there."""
        for name, tensor in entries.items():
            for target in boxes_of(name, tensor):
                filled = sum(_fill(target, source) for source in self._boxes.get(name, ()))
                if filled < target.values.numel():
                    raise CheckpointError(f"the copy in memory lacks some of {name}", hint="load a checkpoint")


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


def whole_step(found: Sequence[Mapping[int, Mapping[int, int]]]) -> int | None:
    """Return the newest step that all ranks wrote. `found` has, by who looks, writers, steps, and worlds' sizes."""
    steps: dict[int, set[int]] = {}
    worlds: dict[int, int] = {}
    for each in found:
        for writer, written in each.items():
            for step, world_size in written.items():
                steps.setdefault(step, set()).add(writer)
                worlds[step] = world_size
    whole = [step for step, writers in steps.items() if len(writers) == worlds[step]]
    return max(whole, default=None)


def describe(entries: Mapping[str, Any]) -> list[Box]:
    """Return the boxes of all entries."""
    return [box for name, tensor in entries.items() for box in boxes_of(name, tensor)]
