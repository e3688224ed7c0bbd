"""How long steps take, without waiting for them: on a GPU its own clock tells, once they are done."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class StepClock(Protocol):
    """Times steps one after another."""

    def begin(self) -> None:
        """Take note of the start of a step."""
        ...

    def end(self) -> None:
        """Take note of the end of a step."""
        ...

    def times_s(self) -> list[float]:
        """Return the times of all steps so far, in seconds; waits for the last one."""
        ...


def clock_of(device: torch.device) -> StepClock:
    """Return a clock for steps on `device`."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class HostClock:
    """The clock of the process, where a step is done when its call returns."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._times_s: list[float] = []

    def begin(self) -> None:
        """Take note of the start of a step."""
        self._started_s = time.perf_counter()

    def end(self) -> None:
        """Take note of the end of a step."""
        self._times_s.append(time.perf_counter() - self._started_s)

    def times_s(self) -> list[float]:
        """Return the times of all steps so far, in seconds."""
        return list(self._times_s)


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
