"""Memory that a launcher owns and its ranks map: it has no name in any file system, and is gone with its owner.

The `StatusPage` is a page of numbers: each has one writer, so that nobody waits for anybody.
"""

from __future__ import annotations

import json
import mmap
import os
from typing import Literal, NamedTuple, Self

STATUS_PAGE_VARIABLE = "PARAPLAN_STATUS_PAGE"
"""Environment variable of ranks: the path of the page of their node's launcher."""

LauncherField = Literal["stop_by"]
RankField = Literal[
    "first_began", "first_step", "last_ended", "last_step", "saved_step", "can_stop", "stopped_at",
    "save_s", "num_saves", "write_s", "load_s", "num_loads", "evaluation_s", "copied_step",
]  # fmt: skip

_LAUNCHER_FIELDS: dict[LauncherField, int] = {"stop_by": 0}
"""stop_by: when the ranks are to have saved and ended, in seconds from the epoch; 0: they may go on;
-1: they end at once, as the signal says that they get."""

_RANK_FIELDS: dict[RankField, int] = {
    "first_began": 0,  # seconds from the epoch, as the other moments
    "first_step": 1,  # steps done before it
    "last_ended": 2,
    "last_step": 3,
    "saved_step": 4,  # of the last checkpoint that is whole
    "can_stop": 5,  # 1 where the rank knows where to save at the end of a step
    "stopped_at": 6,  # the step that it has saved at because it was to stop
    "save_s": 7,
    "num_saves": 8,
    "write_s": 9,
    "load_s": 10,
    "num_loads": 11,
    "evaluation_s": 12,
    "copied_step": 13,
}
_HEAD, _BLOCK = 16, 32  # numbers, with room for more
_BYTES = 8


def is_available() -> bool:
    """Whether this system has memory without a name (Linux)."""
    return hasattr(os, "memfd_create")


def path_of(descriptor: int) -> str:
    """Return the path by which other processes of this user open a descriptor of this process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class StatusPage:
    """The page of one node: numbers of its launcher, and of each local rank. All are 0 at first."""

    def __init__(self, descriptor: int, *, num_ranks: int) -> None:
        """Map the page that `descriptor` holds; it stays the caller's to close."""
        size = (_HEAD + num_ranks * _BLOCK) * _BYTES
        self._map = mmap.mmap(descriptor, size)
        self._numbers = memoryview(self._map).cast("d")
        self._descriptor = descriptor
        self.num_ranks = num_ranks

    @classmethod
    def make(cls, num_ranks: int) -> Self:
        """Make a page, which holds as long as this process lives or until it is forgotten."""
        descriptor = os.memfd_create("paraplan-status", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, (_HEAD + num_ranks * _BLOCK) * _BYTES)
        return cls(descriptor, num_ranks=num_ranks)

    @classmethod
    def open(cls, path: str) -> Self:
        """Map the page of the launcher. Raises OSError where it is gone."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            num_ranks = (os.fstat(descriptor).st_size // _BYTES - _HEAD) // _BLOCK
            return cls(descriptor, num_ranks=num_ranks)
        finally:
            os.close(descriptor)

    @property
    def path(self) -> str:
        """The path by which the ranks of the process that has made the page open it."""
        return path_of(self._descriptor)

    def forget(self) -> None:
        """Let no more ranks open the page that this process has made; its numbers can still be read."""
        os.close(self._descriptor)

    @property
    def stop_by(self) -> float:
        """When the ranks are to have saved and ended, in seconds from the epoch; 0: they may go on."""
        return self._numbers[_LAUNCHER_FIELDS["stop_by"]]

    @stop_by.setter
    def stop_by(self, value: float) -> None:
        """Write it: the launcher alone does."""
        self._numbers[_LAUNCHER_FIELDS["stop_by"]] = value

    def get(self, rank: int, name: RankField) -> float:
        """Return a number of a local rank."""
        return self._numbers[_HEAD + rank * _BLOCK + _RANK_FIELDS[name]]

    def set(self, rank: int, name: RankField, value: float) -> None:
        """Write a number of a local rank: that rank alone does."""
        self._numbers[_HEAD + rank * _BLOCK + _RANK_FIELDS[name]] = value

    def add(self, rank: int, name: RankField, value: float) -> None:
        """Add to a number of a local rank."""
        self.set(rank, name, self.get(rank, name) + value)

    def clear(self) -> None:
        """Set what ranks have written to 0: for those of another attempt."""
        for place in range(_HEAD, len(self._numbers)):
            self._numbers[place] = 0.0


COPIES_VARIABLE = "PARAPLAN_MEMORY_CHECKPOINT"
"""Environment variable of ranks: how often to copy the state, and to which memory of the launcher (`CopySlots`)."""
_SLOTS = 2


class CopySlots(NamedTuple):
    """Memory for copies of the state of each local rank: the paths of two slots, written in turn.

    Of several nodes each has as many again, for what another node would take with it.
    """

    every: int
    """Steps from one copy to the next."""
    bytes_per_rank: int
    """Most of one copy of one rank."""
    paths: dict[int, tuple[str, ...]]
    """By local rank."""
    of_neighbour: dict[int, tuple[str, ...]]
    """By local rank, empty on a single node."""

    @classmethod
    def make(cls, *, every: int, num_ranks: int, most_bytes: int, has_neighbour: bool = False) -> CopySlots:
        """Make the slots of a node, empty; together they take no more than `most_bytes`."""
        paths, of_neighbour = (
            {rank: _memory(f"paraplan-{name}-{rank}") for rank in range(count)}
            for name, count in (("copy", num_ranks), ("neighbour", num_ranks if has_neighbour else 0))
        )
        return cls(every, most_bytes // (_SLOTS * (len(paths) + len(of_neighbour))), paths, of_neighbour)

    @classmethod
    def parse(cls, text: str) -> CopySlots:
        """Read what `text` wrote. Raises ValueError and KeyError for anything else."""
        found = json.loads(text)
        paths, of_neighbour = (
            {rank: tuple(map(str, slots)) for rank, slots in enumerate(found[name])}
            for name in ("paths", "of_neighbour")
        )
        return cls(int(found["every"]), int(found["bytes_per_rank"]), paths, of_neighbour)

    def free(self) -> None:
        """Let go of the memory; the process that made it does."""
        for slots in (*self.paths.values(), *self.of_neighbour.values()):
            for path in slots:
                os.close(int(path.rpartition("/")[2]))

    def text(self) -> str:
        """Return it as the value of a variable."""
        named = {"paths": self.paths, "of_neighbour": self.of_neighbour}
        lists = {name: [list(found[rank]) for rank in sorted(found)] for name, found in named.items()}
        return json.dumps({"every": self.every, "bytes_per_rank": self.bytes_per_rank, **lists})


def _memory(name: str) -> tuple[str, ...]:
    """Make memory of as many slots as a rank has, and return their paths."""
    return tuple(path_of(os.memfd_create(name, os.MFD_CLOEXEC)) for _ in range(_SLOTS))


def available_bytes() -> int | None:
    """Return the memory of this machine that is free or can be made free; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123
            found = next(line for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return int(found.split()[1]) * 1024
