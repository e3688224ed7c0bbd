"""Signals that wait while a message is sent, and those that ask the ranks to save before they end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

from paraplan.launch.preemption import STOP_SIGNALS


def raise_signal(number: int, frame: FrameType | None) -> None:
    """End the job as torch's own handlers do."""
    raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))


class HeldSignals:
    """torch's signal handlers raise wherever they strike; inside `held` they wait, so that no message is torn.

    `count` is the number of signals so far.
    """

    def __init__(self, ask_to_stop: Callable[[signal.Signals], bool]) -> None:
        self._ask_to_stop = ask_to_stop
        self._depth = 0
        self.count = 0
        self._pending: list[tuple[Callable[[int, FrameType | None], Any], int]] = []

    def wrap_handlers(self, names: Sequence[str]) -> None:
        """Put this object before the Python handlers of the signals `names`."""
        for name in names:
            number = signal.Signals.__members__.get(name.strip())
            if number is None:
                continue  # torch has warned of it
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler:
                signal.signal(number, self._holding(handler))

    def _holding(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], Any]:
        def handle(number: int, frame: FrameType | None) -> None:
            if number in STOP_SIGNALS and self._ask_to_stop(signal.Signals(number)):
                return
            self.count += 1
            if self._depth:
                self._pending.append((handler, number))
            else:
                handler(number, frame)

        return handle

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let signals wait until the end of this block."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and not self._depth:
            handler, number = self._pending.pop(0)
            self._pending.clear()
            handler(number, None)
