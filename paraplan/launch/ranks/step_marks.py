"""The times of a rank's steps, kept for the launcher in a file that both map: a ring of records, the newest last.

A step begins where the first backward pass after an optimizer's step begins. Of each step the rank notes, on its own
clock, how long its main thread waited in collectives, for its data loader and for garbage collection, how long the
backward pass and the optimizer took, and what the kernel says: CPU time, time in the run queue, page faults. Other
ranks' lateness follows without a common clock: the ranks of a step wait less, the later they come.
Where steps are short every second pair of them is noted, or fewer: the same ones on all ranks, by their numbers.

Standard library only, and importable alone: see `bootstrap`. torch calls it through `torch_private.step_hooks`.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import resource
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MARKS_FILE = "steps.ring"
"""Name of the file beside the error file that holds the ring."""

FIELDS = (
    "step", "ended_s", "period_s", "wait_s", "loader_s", "backward_s", "optimizer_s", "cpu_s",
    "loader_cpu_s", "queue_s", "gc_s", "major_faults", "num_waits",
)  # fmt: skip
"""Fields of a record, one double each."""

CAPACITY = 1024
"""Records in the ring: the launcher looks several times a second."""

# seconds that a look at the run queue takes in a step, whose passes have emptied the caches: 25 us after 5 ms of
# matmuls, on a 2-core virtual machine, where it is 1.4 us again and again
_READING_S = 25e-6
_RUSAGE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
# the share of a step that looks at the run queue may take; where a step has more waits, only its end is looked at
_SHARE_OF_READINGS = 0.004
# seconds that noting a step takes by itself: 210 to 222 us of steps of 9 to 15 ms, on the same machine; in pairs less
_NOTING_S = 220e-6
_SHARE_OF_NOTES = 0.007  # the share of the time that notes may take: of shorter steps fewer are noted
_MOST_STRIDE = 64
_TOGETHER = 2  # so many steps in a row are noted: where one ends, the next one begins, and the kernel is asked once
_UNUSUAL = 1.1
# page faults are counted in steps that are longer by so much than usual, and in every so many th record: those since
# the last count, of steps that nobody noted too
_LOOKS_AT_FAULTS = 16
_SETTLED = 32  # so many steps are all noted: the first ones tell how long steps are

HEADER = struct.Struct("=8sqq")
RECORD = struct.Struct(f"={1 + len(FIELDS)}d")
"""A record: its number, from 1, and the fields."""

MAGIC = b"ppsteps4"

REQUEST = struct.Struct("=qdd")
"""A profile that the launcher asks for: its number (0: none), seconds, and until when it may begin (of the epoch)."""

ANSWER = struct.Struct("=qq240s")
"""The number of the request that the rank has seen last, its state, and why it failed."""

STATES = ("", "began", "done", "failed", "late")
"""States of an answer. late: the step came after the time by which the profile was to begin."""

_COUNT_WORD, _REQUEST_WORD = 2, 3  # in words of eight bytes: the end of the header, the number of a request

REQUEST_AT = HEADER.size
ANSWER_AT = REQUEST_AT + REQUEST.size
RECORDS_AT = ANSWER_AT + ANSWER.size
_FIRST_VALUE = RECORDS_AT // 8
_NUM_VALUES = 1 + len(FIELDS)
_DRIFT = 1.2  # by so much steps may be taken for longer or shorter at a time: one of another length is no rule
SIZE = RECORDS_AT + CAPACITY * RECORD.size


def trace_name(rank: int, number: int) -> str:
    """Return the name of the file beside the error file that a profile is written to."""
    return f"trace-rank{rank}-{number}.json"


class StepMarks:
    """Takes the marks of the main thread of one process, no child's, and writes a record at the end of each step."""

    def __init__(self, path: str, *, load_profiling: Callable[[], Any] | None = None) -> None:
        """Make the file `path`. Raises OSError where it cannot be made.

        `load_profiling` returns the module that profiles, once that is asked for; None never does.
        """
        self._load_profiling = load_profiling
        self.thread = threading.main_thread().ident
        """The thread whose time is kept."""
        self._queue_file: int | None = None
        with suppress(OSError):
            path_of_queue = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._queue_file = os.open(path_of_queue, os.O_RDONLY | os.O_CLOEXEC)
        with open(path, "w+b") as file:  # noqa: PTH123 (pathlib costs every rank an import)
            os.posix_fallocate(file.fileno(), 0, SIZE)  # to write where a full disk has no block is a SIGBUS
            self._ring = mmap.mmap(file.fileno(), SIZE)
        HEADER.pack_into(self._ring, 0, MAGIC, os.getpid(), 0)
        # to write numbers one by one costs less than to pack them
        self._words, self._values = memoryview(self._ring).cast("q"), memoryview(self._ring).cast("d")
        self._folder = os.path.dirname(path)  # noqa: PTH120
        self._profile: Any = None
        self._request = 0
        self._num_steps = self._num_records = 0
        self._stride, self._usual_s = 1, 0.0
        self.is_on = True
        self.is_noting = False
        """Whether the step that runs is one that is noted."""
        self.depth = 0
        """How many waits, data loaders and gaps contain each other: the outermost counts."""
        self._has_stepped = self._uses_optimizer = False
        self._began_s = 0.0
        self.wait_s = self._loader_s = self._backward_s = self._optimizer_s = self._gc_s = 0.0
        self._loader_cpu_s = self._waited_cpu_s = self._gc_began_s = 0.0
        self.num_waits = 0
        self._waited_queue_s = 0.0
        self._kernel = (0.0, 0.0)
        self._num_faults = resource.getrusage(_RUSAGE).ru_majflt
        self.reads_often = self._queue_file is not None
        os.register_at_fork(after_in_child=self._stop)
        gc.callbacks.append(self._on_collection)

    def _stop(self) -> None:
        self.is_on = self.is_noting = False

    def is_here(self) -> bool:
        """Whether the calling thread is the one whose time is kept, outside of what is kept already."""
        return self.is_noting and not self.depth and threading.get_ident() == self.thread

    def wait_begins(self) -> tuple[float, float]:
        """Return when this wait in a collective begins; to be followed by `wait_ends`."""
        self.depth += 1
        return time.perf_counter(), self._read_queue() if self.reads_often else 0.0

    def wait_ends(self, began: tuple[float, float]) -> None:
        """Add a wait in a collective."""
        if self.reads_often:
            self._waited_queue_s += self._read_queue() - began[1]
        self.wait_s += time.perf_counter() - began[0]
        self.num_waits += 1
        self.depth -= 1

    def gap_begins(self) -> tuple[float, float, float]:
        """Return when the graph of a backward pass is done, and what follows is the end of its collectives."""
        is_own = threading.get_ident() == self.thread  # that of a GPU's graph is done in a thread of autograd's
        return *self.wait_begins(), time.thread_time() if is_own else -1.0

    def gap_ends(self, began: tuple[float, float, float]) -> None:
        """Add the wait for collectives at the end of a backward pass."""
        if began[2] >= 0:
            self._waited_cpu_s += time.thread_time() - began[2]
        self.wait_ends(began[:2])

    def load_begins(self) -> tuple[float, float]:
        """Return when the data loader is asked for a batch."""
        self.depth += 1
        return time.perf_counter(), time.thread_time()

    def load_ends(self, began: tuple[float, float]) -> None:
        """Add the time in a data loader."""
        self._loader_s += time.perf_counter() - began[0]
        self._loader_cpu_s += time.thread_time() - began[1]
        self.depth -= 1

    def backward_begins(self) -> tuple[float, float]:
        """Return the time and the waits so far; a step ends here if an optimizer has stepped since the last pass.

        What this returns is for `backward_ends`, of a step that is noted.
        """
        if self._has_stepped or not self._uses_optimizer:
            self._has_stepped = False
            self._end_step()
        return (time.perf_counter(), self.wait_s) if self.is_noting else (0.0, 0.0)

    def backward_ends(self, began: tuple[float, float]) -> None:
        """Add the time of a backward pass without the waits in it."""
        self._backward_s += time.perf_counter() - began[0] - (self.wait_s - began[1])

    def optimizer_begins(self) -> tuple[float, float]:
        """Return the time and the waits so far."""
        return (time.perf_counter(), self.wait_s) if self.is_noting else (0.0, 0.0)

    def optimizer_ends(self, began: tuple[float, float]) -> None:
        """Add the time of an optimizer's step without the waits in it."""
        self._has_stepped = self._uses_optimizer = True
        if self.is_noting:
            self._optimizer_s += time.perf_counter() - began[0] - (self.wait_s - began[1])

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        if not self.is_noting or threading.get_ident() != self.thread:
            return
        now_s = time.perf_counter()
        if phase == "start":
            self._gc_began_s = now_s
        elif not self.depth:  # in a wait it costs nobody anything
            self._gc_s += now_s - self._gc_began_s

    def _end_step(self) -> None:
        if not self.is_on or threading.get_ident() != self.thread:
            return
        if self._profile is not None or self._words[_REQUEST_WORD] != self._request:
            self._go_on_profiling()
        self._num_steps += 1  # one begins here
        is_next = self._is_noted(self._num_steps)
        if self.is_noting or is_next:
            now_s, kernel = time.perf_counter(), (time.thread_time(), self._read_queue())
            if self.is_noting:
                self._write(now_s, kernel)
                is_next = self._is_noted(self._num_steps)
            self._began_s, self._kernel = now_s, kernel
            self.wait_s = self._loader_s = self._backward_s = self._optimizer_s = self._gc_s = 0.0
            self._loader_cpu_s = self._waited_cpu_s = self._waited_queue_s = 0.0
            self.num_waits = 0
        self.is_noting = is_next

    def _is_noted(self, step: int) -> bool:
        return step // _TOGETHER % self._stride == 0

    def _write(self, now_s: float, kernel: tuple[float, float]) -> None:
        """Write the record of the step that ends, and choose which steps are noted from here on."""
        before, period_s = self._kernel, now_s - self._began_s
        usual_s = self._usual_s or period_s
        num_faults = self._num_faults
        if period_s > _UNUSUAL * usual_s or self._num_records % _LOOKS_AT_FAULTS == 0:
            num_faults = resource.getrusage(_RUSAGE).ru_majflt
        at = _FIRST_VALUE + self._num_records % CAPACITY * _NUM_VALUES
        self._num_records += 1
        values = self._values
        values[at], values[at + 1], values[at + 2] = self._num_records, self._num_steps - 1, time.time()
        values[at + 3], values[at + 4], values[at + 5] = period_s, self.wait_s, self._loader_s
        values[at + 6], values[at + 7] = self._backward_s, self._optimizer_s
        values[at + 8], values[at + 9] = kernel[0] - before[0] - self._waited_cpu_s, self._loader_cpu_s
        values[at + 10], values[at + 11] = kernel[1] - before[1] - self._waited_queue_s, self._gc_s
        values[at + 12], values[at + 13] = num_faults - self._num_faults, self.num_waits
        self._num_faults = num_faults
        self._words[_COUNT_WORD] = self._num_records
        # two readings of each wait
        affordable = _SHARE_OF_READINGS * period_s / (2 * _READING_S)
        self.reads_often = self._queue_file is not None and self.num_waits < affordable
        self._usual_s = min(max(period_s, usual_s / _DRIFT), _DRIFT * usual_s)
        wanted = _NOTING_S / (_SHARE_OF_NOTES * max(self._usual_s, 1e-6))
        if self._num_records >= _SETTLED and not self._stride / 2 < wanted <= self._stride:
            # powers of two: where ranks differ by one, they still have steps in common
            self._stride = min(_MOST_STRIDE, 1 << max(0, math.ceil(math.log2(wanted))))

    def _read_queue(self) -> float:
        """Return how long the main thread has waited for a core so far."""
        if self._queue_file is None:
            return 0.0
        try:
            return int(os.pread(self._queue_file, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def _go_on_profiling(self) -> None:
        """Begin a profile that is asked for, or go on with it: a step of the script ends here. It never raises."""
        try:
            if self._profile is None:
                self._begin_profile(*REQUEST.unpack_from(self._ring, REQUEST_AT))
            elif self._profile.end_step():
                self._profile = None
                self._say_of_profile(STATES.index("done"))
        except Exception as error:  # whatever torch says, or a full disk
            self._profile = None
            self._say_of_profile(STATES.index("failed"), f"{type(error).__name__}: {error}")

    def _begin_profile(self, number: int, seconds: float, begin_by_s: float) -> None:
        self._request = number
        if not number or self._load_profiling is None:
            return
        if time.time() > begin_by_s:
            self._say_of_profile(STATES.index("late"))
            return
        path = os.path.join(self._folder, trace_name(int(os.environ.get("RANK", "0")), number))  # noqa: PTH118
        self._profile = self._load_profiling().start_profile(path, seconds=seconds)
        self._say_of_profile(STATES.index("began"))

    def _say_of_profile(self, state: int, text: str = "") -> None:
        line = " ".join(text.split()).encode(errors="replace")[:240]
        ANSWER.pack_into(self._ring, ANSWER_AT, self._request, state, line)
