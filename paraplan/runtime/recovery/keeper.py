"""When the state of a training is copied to memory, and how it comes back from there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from paraplan.runtime.checkpoints.entries import CheckpointSource, entries_to_write
from paraplan.runtime.checkpoints.saving import random_entries
from paraplan.runtime.recovery.memory_copies import (
    Box,
    Copier,
    MemoryReader,
    Slot,
    describe,
    sizes,
    unique,
    whole_step,
)
from paraplan.runtime.recovery.status import RankStatus
from paraplan.runtime.world import World
from paraplan.shared_memory import COPIES_VARIABLE, CopySlots
from paraplan.units import format_bytes

_COPY_IMMEDIATELY = ("model.", "random.", "progress", "options.")
"""Entries of which buffers, random numbers and texts change before the next step's optimizer does."""


class MemoryKeeper:
    """Copies the state every so many steps, for as long as it fits."""

    def __init__(self, slots: CopySlots, world: World, status: RankStatus) -> None:
        """Open the slots of this node's ranks. Raises OSError where the launcher is gone."""
        self._every, self._limit = slots.every, slots.bytes_per_rank
        self._all = {rank: [Slot(path) for path in paths] for rank, paths in slots.paths.items()}
        self._copier = Copier(self._all[world.local_rank])
        self._world, self._status = world, status
        self._owned: set[str] | None = None
        self._shared_out: set[str] = set()
        self._noted: tuple[int, list[Box]] | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str], world: World, status: RankStatus) -> MemoryKeeper | None:
        """Return the keeper of this rank; None where the launcher keeps no copies."""
        text = environment.get(COPIES_VARIABLE)
        if not text or status.page is None:
            return None
        try:
            return cls(CopySlots.parse(text), world, status)
        except (OSError, ValueError, KeyError):
            return None

    def note(self, source: CheckpointSource) -> None:
        """Take note of the state behind a step, if its copy is due: what changes before the next step is copied now."""
        if source.num_steps % self._every:
            return
        entries = entries_to_write(source) | random_entries(source.mesh.world)
        boxes = describe(entries)
        if self._owned is None and not self._share_out(boxes):
            self._every = sys.maxsize
            return
        parameters = {f"model.{name}" for name in source.parameters}
        # what an optimizer has begun to keep since then is written by all who hold it
        boxes = [box for box in boxes if box.key in (self._owned or ()) or box.key not in self._shared_out]
        num_bytes = sum(box.num_bytes for box in boxes)
        if num_bytes > self._limit:
            self._refuse(num_bytes)
            self._every = sys.maxsize
            return
        self._noted = (
            source.num_steps,
            [
                Box(box.name, box.offsets, box.whole, box.values.clone())
                if box.name.startswith(_COPY_IMMEDIATELY) and box.name not in parameters
                else box
                for box in boxes
            ],
        )

    def begin(self) -> None:
        """Begin to copy what was noted, once all ranks have come to the next step."""
        if self._noted is not None:
            num_steps, boxes = self._noted
            self._noted = None
            self._copier.begin(boxes, num_steps=num_steps, world_size=self._world.size)

    def finish(self, num_steps: int, *, is_good: bool) -> None:
        """Wait for the copy, before anything of the state changes. It counts if the loss of its step `is_good`."""
        if self._copier.finish(is_good=is_good):
            self._status.set("copied_step", num_steps)

    def newest(self) -> tuple[int, MemoryReader] | None:
        """Return the newest whole step of all nodes and its reader on this one; None without. Every rank calls it."""
        held: dict[int, list[Box]] = {}
        mine: dict[int, dict[int, int]] = {}
        for rank, slots in self._all.items():
            for slot in slots:
                found = slot.read()
                if found is not None:
                    step, world_size, boxes = found
                    held.setdefault(step, []).extend(boxes)
                    mine.setdefault(self._node() * len(self._all) + rank, {})[step] = world_size
        newest = whole_step(self._gather(mine))
        return None if newest is None else (newest, MemoryReader(held.get(newest, [])))

    def _share_out(self, boxes: list[Box]) -> bool:
        """Choose which rank of this node writes which box; return whether all fits in the memory that is kept."""
        held = self._gather((self._node(), sizes(boxes)))
        here = [(rank, found) for rank, (node, found) in enumerate(held) if node == self._node()]
        place = [rank for rank, _ in here].index(self._world.rank)
        owned = unique(boxes, [found for _, found in here], place)
        self._owned, self._shared_out = {box.key for box in owned}, {box.key for box in boxes}
        sent: list[int] = self._gather(sum(box.num_bytes for box in owned))
        if max(sent) > self._limit:
            if self._world.rank == 0:
                self._refuse(max(sent))
            return False
        if self._world.rank == 0:
            total = format_bytes(2 * sum(sent))
            sys.stderr.write(f"paraplan: copies in memory, every {self._every} steps, take {total} over all nodes\n")
        return True

    def _refuse(self, num_bytes: int) -> None:
        need, limit = format_bytes(2 * num_bytes), format_bytes(2 * self._limit)
        sys.stderr.write(f"paraplan: no copies in memory: a rank needs {need}, and {limit} are kept for it\n")

    def _node(self) -> int:
        return int(os.environ.get("GROUP_RANK", "0"))

    def _gather(self, mine: Any) -> list[Any]:
        if not dist.is_initialized():
            return [mine]
        found: list[Any] = [None] * self._world.size
        dist.all_gather_object(found, mine)
        return found


def is_finite(loss: torch.Tensor | None) -> bool:
    """Whether a loss is a number."""
    return loss is None or bool(torch.isfinite(loss).all().item())
