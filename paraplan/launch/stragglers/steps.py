"""The ring of a rank: its steps as it has noted them, what a step is made of, and profiles that are asked for there."""

from __future__ import annotations

import math
import os
import statistics
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paraplan.launch.ranks import step_marks as ring

_PARTS = ("wait_s", "loader_s", "backward_s", "optimizer_s")


@dataclass(frozen=True)
class Step:
    """One step of one rank, in seconds of its own clock; the fields are those of `ranks.step_marks`.

    `wait_s` is the time in collectives: for the slowest rank, and for what is sent. `cpu_s` is without that time.
    """

    step: int
    ended_s: float
    period_s: float
    wait_s: float
    loader_s: float
    backward_s: float
    optimizer_s: float
    cpu_s: float
    loader_cpu_s: float
    queue_s: float
    gc_s: float
    major_faults: float
    num_waits: float

    @property
    def work_s(self) -> float:
        """The seconds of the rank's own work: the step without its waits for others."""
        return self.period_s - self.wait_s

    @property
    def own_s(self) -> float:
        """`work_s` without the time in which other processes had its core."""
        return max(0.0, self.work_s - self.queue_s)

    @property
    def stalled_s(self) -> float:
        """Time outside of collectives and of the data loader in which it neither ran nor was in the run queue."""
        return max(0.0, self.own_s - self.loader_s - (self.cpu_s - self.loader_cpu_s))

    @property
    def compute_s(self) -> float:
        """CPU time outside of collectives, the data loader and garbage collection."""
        return max(0.0, self.cpu_s - self.loader_cpu_s - self.gc_s)


class StepReader:
    """Reads the ring of one rank from where it was read last."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ring.MARKS_FILE
        self._num_read = 0

    def read(self) -> list[Step]:
        """Return the steps since the last time; those that the ring has lost are left out."""
        data = b""
        with suppress(OSError):  # it has not begun
            data = self._path.read_bytes()
        if len(data) != ring.SIZE or not data.startswith(ring.MAGIC):
            return []
        count = ring.HEADER.unpack_from(data)[2]
        oldest = count - ring.CAPACITY + 1  # those before may be overwritten as they are read
        numbers = range(max(self._num_read, oldest), count)
        self._num_read = max(self._num_read, count)
        places = (ring.RECORDS_AT + index % ring.CAPACITY * ring.RECORD.size for index in numbers)
        records = (ring.RECORD.unpack_from(data, place) for place in places)
        return [_step(one[1:]) for index, one in zip(numbers, records, strict=True) if one[0] == index + 1]


def usual_parts(folder: Path) -> dict[str, float] | None:
    """Return the medians of the parts of the steps that a rank has noted, in seconds; None where it has noted none."""
    with suppress(ValueError, OverflowError):  # the rank may write anything, or nothing
        steps = StepReader(folder).read()
        parts = {name: round(statistics.median(getattr(step, name) for step in steps), 6) for name in _PARTS}
        return parts if all(map(math.isfinite, parts.values())) else None
    return None


def last_step(folder: Path) -> tuple[int, float]:
    """Return the number of the last step of the rank with its error file in `folder`, and when it ended (0: none)."""
    with suppress(ValueError, OverflowError, IndexError):  # the rank may write anything, or nothing
        last = StepReader(folder).read()[-1]
        return last.step, last.ended_s
    return 0, 0.0


def _step(values: Sequence[float]) -> Step:
    return Step(int(values[0]), *values[1:])


def as_rows(steps: Iterable[Step]) -> list[list[float]]:
    """Return steps as lists of numbers, for another node."""
    return [[round(getattr(step, name), 6) for name in ring.FIELDS] for step in steps]


def of_rows(rows: Iterable[Sequence[float]]) -> list[Step]:
    """Return the steps of `as_rows`; rows of another version are left out."""
    return [_step([float(value) for value in row]) for row in rows if len(row) == len(ring.FIELDS)]


LONGEST_S = 600.0
"""Seconds of a profile at most: torch keeps all its events in memory until the end."""


def trace_path(folder: Path, *, rank: int, number: int) -> Path:
    """Return the trace that a rank with its error file in `folder` writes for a request."""
    return folder / ring.trace_name(rank, number)


def ask_for_profile(folder: Path, *, number: int, seconds: float, begin_by_s: float) -> bool:
    """Ask a rank to profile itself from its next step on; return whether it notes steps, at which it could begin.

    A step that comes after `begin_by_s`, in seconds from the epoch, begins nothing.
    """
    try:
        descriptor = os.open(folder / ring.MARKS_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        magic = os.pread(descriptor, len(ring.MAGIC), 0)
        if os.fstat(descriptor).st_size != ring.SIZE or magic != ring.MAGIC:
            return False
        # the number last: the rank looks at it between two steps, whenever these are
        details = ring.REQUEST.pack(number, seconds, begin_by_s)
        os.pwrite(descriptor, details[8:], ring.REQUEST_AT + 8)
        os.pwrite(descriptor, details[:8], ring.REQUEST_AT)
    finally:
        os.close(descriptor)
    return True


def read_profile(folder: Path, *, number: int) -> tuple[str, str]:
    """Return how far a rank is with a request, "" where it has not begun, and why where it failed."""
    with suppress(OSError, struct.error):
        answered, state, text = ring.ANSWER.unpack_from((folder / ring.MARKS_FILE).read_bytes(), ring.ANSWER_AT)
        if answered == number and 0 < state < len(ring.STATES):
            return ring.STATES[state], bytes(text).rstrip(b"\0").decode(errors="replace")
    return "", ""
