"""Clocks of steps: the host's, with the time in which other processes had its CPU, and events on a GPU."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from paraplan.units import format_seconds

WARM_STEPS = 1
"""The first step allocates, compiles and meets its peers."""
_WORTH_SAYING = 0.05  # of the steps: less without a CPU goes unsaid


class HostClock:
    """The clock of the process, where a step is done when its call returns."""

    def __init__(self) -> None:
        self._started_s, self._waited_before_s = time.perf_counter(), waited_for_cpu_s()
        self._times_s: list[float] = []
        self._waits_s: list[float] = []

    def begin(self) -> None:
        """Take note of the start of a step."""
        self._started_s, self._waited_before_s = time.perf_counter(), waited_for_cpu_s()

    def end(self) -> None:
        """Take note of the end of a step."""
        self._times_s.append(time.perf_counter() - self._started_s)
        waited_s = waited_for_cpu_s()
        if waited_s is not None and self._waited_before_s is not None:
            self._waits_s.append(waited_s - self._waited_before_s)

    def times_s(self) -> list[float]:
        """Return the times of all steps so far, in seconds."""
        return list(self._times_s)

    def waits_s(self) -> list[float]:
        """Return how long this thread waited for a CPU in each step; nothing where the system does not say."""
        return list(self._waits_s)


def waited_for_cpu_s() -> float | None:
    """Return how long this thread waited for a CPU so far, that others had; None where Linux does not say.

    The second figure of schedstat (Documentation/scheduler/sched-stats.rst of Linux), in nanoseconds.
    """
    try:
        words = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(words[1]) / 1e9 if len(words) > 1 else None


def running_s(clock: StepClock | None) -> float | None:
    """Return the median of the steps without the time in which other processes had the CPU; None where nobody says."""
    times, waits = (clock.times_s(), clock.waits_s()) if isinstance(clock, HostClock) else ([], [])
    if not times or len(waits) != len(times):
        return None
    pairs = list(zip(times, waits, strict=True))
    alone_s = statistics.median(each - waited for each, waited in pairs[WARM_STEPS:] or pairs)
    return alone_s if alone_s > 0 else None


def without_waits(clock: StepClock | None) -> tuple[float | None, str]:
    """Return what a step takes while it has its CPU, and the words for it, where waits are worth a word."""
    alone_s = running_s(clock)
    if alone_s is None or not isinstance(clock, HostClock):
        return None, ""
    share = sum(clock.waits_s()) / sum(clock.times_s())
    if share < _WORTH_SAYING:
        return None, ""
    return alone_s, f", {format_seconds(alone_s)} without the {share:.0%} in which other processes had the CPU"


class DeviceClock:
    """Events on the current stream of the GPU, between which it works on a step or waits for the host."""

    def __init__(self) -> None:
        self._started: torch.cuda.Event | None = None
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._times_s: list[float] = []

    def begin(self) -> None:
        """Take note of the start of a step."""
        self._started = _event()

    def end(self) -> None:
        """Take note of the end of a step."""
        if self._started is not None:
            self._open.append((self._started, _event()))
        while self._open and self._open[0][1].query():  # type: ignore[no-untyped-call]
            self._read()

    def times_s(self) -> list[float]:
        """Return the times of all steps so far, in seconds; waits for the last one."""
        while self._open:
            self._open[0][1].synchronize()
            self._read()
        return list(self._times_s)

    def _read(self) -> None:
        started, ended = self._open.pop(0)
        self._times_s.append(started.elapsed_time(ended) / 1e3)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


StepClock = HostClock | DeviceClock
"""Times steps one after another."""


def clock_of(device: torch.device) -> StepClock:
    """Return a clock for steps on `device`."""
    return DeviceClock() if device.type == "cuda" else HostClock()
