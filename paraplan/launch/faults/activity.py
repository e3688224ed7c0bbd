"""Activity of a rank and its child processes so far, by the kernel's counters and the files that it writes."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paraplan.launch.ranks.live import LiveRank
from paraplan.launch.ranks.step_marks import HEADER, MAGIC, MARKS_FILE

_LOGS = ("stdout.log", "stderr.log")
_BUSY = 0.1
_BYTES_PER_S = 16 << 10
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Activity:
    """Counters of one rank at `time_s`. `shown` are its noted steps and what it wrote to its logs."""

    time_s: float
    waits: int
    """How often its main thread has begun to wait: voluntary context switches."""
    cpu_s: float
    """Time on a core, or in wait of one."""
    children_cpu_s: float
    moved_bytes: int
    """Read and written by it and its children."""
    shown: tuple[int, ...]

    def works_since(self, before: Activity) -> bool:
        """Whether it has used, or wanted, a tenth of a core or more since `before`: it may compute, and may spin."""
        return self.cpu_s - before.cpu_s >= _BUSY * (self.time_s - before.time_s)

    def has_progressed_since(self, before: Activity) -> bool:
        """Whether it has made a step, written a line, read or written data, or had children that worked."""
        seconds = self.time_s - before.time_s
        return (
            self.shown != before.shown
            or self.moved_bytes - before.moved_bytes >= _BYTES_PER_S * seconds
            or self.children_cpu_s - before.children_cpu_s >= _BUSY * seconds
        )


@dataclass(frozen=True)
class _Process:
    session: int
    cpu_s: float
    reaped_cpu_s: float


def read_activities(ranks: Iterable[LiveRank], *, proc: Path = Path("/proc")) -> dict[int, Activity]:
    """Return the activity of each rank whose process is there.

    Children are the processes of its session, which every rank begins.
    """
    table = _processes(proc)
    return {one.rank: _activity(one.pid, one.folder, table, proc) for one in ranks if one.pid in table}


def _activity(pid: int, folder: Path | None, table: Mapping[int, _Process], proc: Path) -> Activity:
    children = [child for child, process in table.items() if process.session == pid and child != pid]
    reaped_s = sum(table[one].reaped_cpu_s for one in (pid, *children))
    return Activity(
        time_s=time.monotonic(),
        waits=_waits(proc / str(pid)),
        cpu_s=table[pid].cpu_s + _wanted_s(proc / str(pid)),
        children_cpu_s=reaped_s + sum(table[child].cpu_s + _wanted_s(proc / str(child)) for child in children),
        moved_bytes=sum(_moved_bytes(proc / str(one)) for one in (pid, *children)),
        shown=() if folder is None else (_num_steps(folder), *(_size(folder / name) for name in _LOGS)),
    )


def _processes(proc: Path) -> dict[int, _Process]:
    table = {}
    for name in os.listdir(proc):  # noqa: PTH208 (many names, most of them no numbers)
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                words = (proc / name / "stat").read_bytes().rpartition(b")")[2].split()
                user, system, reaped_user, reaped_system = (int(ticks) / _TICKS_PER_S for ticks in words[11:15])
                table[int(name)] = _Process(int(words[3]), user + system, reaped_user + reaped_system)
    return table


def _waits(process: Path) -> int:
    with suppress(OSError):
        for line in (process / "task" / process.name / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return 0


def _wanted_s(process: Path) -> float:
    """Return how long the main thread has stood ready without a core: on a busy machine that is most of the time."""
    with suppress(OSError, ValueError, IndexError):  # a kernel without CONFIG_SCHED_INFO has none
        return int((process / "schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _moved_bytes(process: Path) -> int:
    with suppress(OSError, ValueError, IndexError):  # not everywhere may it be read
        lines = (process / "io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar", "read_bytes")))
    return 0


def _num_steps(folder: Path) -> int:
    with suppress(OSError, struct.error), (folder / MARKS_FILE).open("rb") as file:
        magic, _, count = HEADER.unpack(file.read(HEADER.size))
        return int(count) if magic == MAGIC else 0
    return 0


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
