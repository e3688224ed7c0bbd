"""When the state of a training is copied to memory, and how it comes back from there."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist

from paraplan.runtime.checkpoints.boxes import Box, CheckpointError, gather_sizes, owner_of_each
from paraplan.runtime.checkpoints.entries import CheckpointSource, State, state_of
from paraplan.runtime.exchange import gather_json
from paraplan.runtime.recovery.memory_copies import Copied, Copier, CopyName, Neighbour, Slot, newest_whole
from paraplan.runtime.recovery.memory_reader import MemoryReader
from paraplan.runtime.recovery.status import RankStatus
from paraplan.runtime.world import World
from paraplan.shared_memory import COPIES_VARIABLE, CopySlots
from paraplan.units import format_bytes

_COPY_IMMEDIATELY = ("model.", "random.")
"""Entries of which buffers and random numbers change before the next step's optimizer does."""


class MemoryKeeper:
    """Copies the state every so many steps, for as long as it fits."""

    def __init__(self, slots: CopySlots, world: World, status: RankStatus) -> None:
        """Open the slots of this node's ranks. Raises OSError where the launcher is gone."""
        self._every, self._limit = slots.every, slots.bytes_per_rank
        self._all = {rank: [Slot(path) for path in paths] for rank, paths in slots.paths.items()}
        self._of_neighbour = {rank: [Slot(path) for path in paths] for rank, paths in slots.of_neighbour.items()}
        self._copier = Copier(self._all[world.local_rank])
        self._world, self._status = world, status
        self._owned: set[int] | None = None
        self._shared_out: set[int] = set()
        self._alone: set[int] = set()
        self._neighbour: Neighbour | None = None
        self._attempt = 0
        self._is_full = False
        self._noted: Copied | None = None

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
        try:
            state = state_of(source)
        except CheckpointError as error:
            sys.stderr.write(f"paraplan: no copies in memory: {error.message}\n")
            self._every = sys.maxsize
            return
        boxes = state.boxes
        if self._owned is None and not self._share_out(boxes):
            self._every = sys.maxsize
            return
        parameters = {f"model.{name}" for name in source.parameters}
        # what an optimizer has begun to keep since then is written by all who hold it
        boxes = [box for box in boxes if box.place.key in (self._owned or ()) or box.place.key not in self._shared_out]
        num_bytes = sum(box.place.num_bytes for box in boxes)
        if num_bytes > self._limit and not self._is_full:
            self._refuse(num_bytes)
            self._is_full = True
        if self._is_full:
            boxes = []  # ranks of other nodes go on to exchange theirs with this one
        kept = [
            Box(box.place, box.values.clone())
            if box.name.startswith(_COPY_IMMEDIATELY) and box.name not in parameters
            else box
            for box in boxes
        ]
        name = CopyName(source.num_steps, self._attempt, self._world.size)
        self._noted = Copied(name, self._world.rank, State(kept, state.values))

    def begin(self) -> None:
        """Begin to copy what was noted, once all ranks have come to the next step."""
        if self._noted is not None:
            noted, self._noted = self._noted, None
            self._copier.begin(noted, None if self._neighbour is None else partial(self._mirror, self._neighbour))

    def finish(self, num_steps: int, *, is_good: bool) -> None:
        """Wait for the copy, before anything of the state changes. It counts if the loss of its step `is_good`."""
        if self._copier.finish(is_good=is_good and not self._is_full):
            self._status.set("copied_step", num_steps)

    def newest(self, has_given_up: Callable[[], bool]) -> tuple[int, MemoryReader] | None:
        """Return the steps of the newest copy that is whole over all nodes, and its reader on this one; None without.

        Every rank calls it. `has_given_up` is `MemoryReader.join`'s.
        """
        held: dict[CopyName, list[Copied]] = {}
        mine: dict[CopyName, list[int]] = {}
        for slot in (slot for kept in (self._all, self._of_neighbour) for slots in kept.values() for slot in slots):
            found = slot.read()
            if found is not None:
                held.setdefault(found.name, []).append(found)
                mine.setdefault(found.name, []).append(found.writer)
        told = gather_json((self._node(), [*mine.items()], time.time_ns()))
        self._attempt = told[0][2]
        newest = newest_whole([{CopyName(*name): ranks for name, ranks in each} for _, each, _ in told])
        if newest is None:
            return None
        reader = MemoryReader(held.get(newest, []), rank=self._world.rank, nodes=[node for node, _, _ in told])
        reader.join(has_given_up)
        return newest.num_steps, reader

    def _mirror(self, neighbour: Neighbour, written: Copied) -> Slot:
        """Give the next node what no other one has of what this rank has copied."""
        boxes, values = written.state.boxes, written.state.values
        alone = [box for box in boxes if box.place.key in self._alone or box.place.key not in self._shared_out]
        return neighbour.exchange(written._replace(state=State(alone, values)))

    def _share_out(self, boxes: list[Box]) -> bool:
        """Choose which rank of this node writes which box; return whether all fits in the memory that is kept."""
        mine = {box.place.key: box.place.num_bytes for box in boxes}
        held = [*zip(gather_json(self._node()), gather_sizes(mine), strict=True)]
        here = {rank: found for rank, (node, found) in enumerate(held) if node == self._node()}
        place, owners = [*here].index(self._world.rank), owner_of_each([*here.values()])
        self._owned, self._shared_out = {key for key, owner in owners.items() if owner == place}, {*mine}
        self._find_neighbour([(node, set(found)) for node, found in held])
        sent: list[int] = gather_json(sum(mine[key] for key in self._owned))
        if max(sent) > self._limit:
            if self._world.rank == 0:
                self._refuse(max(sent))
            return False
        if self._world.rank == 0:
            total = format_bytes(2 * sum(sent))
            again = "" if self._neighbour is None else ", and those of one node as much on the next one again"
            sys.stderr.write(
                f"paraplan: copies in memory, every {self._every} steps, take {total} over all nodes{again}\n"
            )
        return True

    def _find_neighbour(self, held: list[tuple[int, set[int]]]) -> None:
        """Find the ranks to exchange with, where some node holds what no other one does. Every rank calls it."""
        by_node: dict[int, list[int]] = {}
        keys: dict[int, set[int]] = {}
        for rank, (node, found) in enumerate(held):
            by_node.setdefault(node, []).append(rank)
            keys.setdefault(node, set()).update(found)
        nodes = sorted(by_node)
        counted = Counter(key for found in keys.values() for key in found)
        self._alone = {key for key in keys[self._node()] if counted[key] == 1}
        is_even = len({len(ranks) for ranks in by_node.values()}) == 1
        has_room = all(gather_json(bool(self._of_neighbour)))
        if len(nodes) == 1 or not is_even or not has_room or 1 not in counted.values():
            return
        here = nodes.index(self._node())
        place = by_node[self._node()].index(self._world.rank)
        self._neighbour = Neighbour(
            to_rank=by_node[nodes[(here + 1) % len(nodes)]][place],
            from_rank=by_node[nodes[here - 1]][place],
            slots=cycle(self._of_neighbour[self._world.local_rank]),
            group=dist.new_group(backend="gloo"),
        )

    def _refuse(self, num_bytes: int) -> None:
        need, limit = format_bytes(2 * num_bytes), format_bytes(2 * self._limit)
        sys.stderr.write(f"paraplan: no copies in memory: a rank needs {need}, and {limit} are kept for it\n")

    def _node(self) -> int:
        return int(os.environ.get("GROUP_RANK", "0"))


def is_finite(loss: torch.Tensor | None) -> bool:
    """Whether a loss is a number."""
    return loss is None or bool(torch.isfinite(loss).all().item())
