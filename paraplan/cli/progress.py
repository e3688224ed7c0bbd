"""A line on the terminal about work that takes longer than half a second, and Ctrl-C that ends a search early."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from paraplan.cli.terminal import unfiltered
from paraplan.progress import watched_by
from paraplan.units import printable

if TYPE_CHECKING:
    from threading import Timer

QUIET_S = 0.5
"""Seconds below which work shows no progress."""
_ERASE = "\r\x1b[K"


@contextmanager
def shown_progress() -> Iterator[None]:
    """Show on standard error, where it is a terminal, what the commands in this context are doing."""
    line = TerminalLine()
    try:
        with watched_by(line):
            yield
    finally:
        line.show(None)


class TerminalLine:
    """One line that is written again and again, and erased at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: Timer | None = None
        self._text: str | None = None
        self._is_shown = False
        self._is_stopped = False

    def show(self, text: str | None) -> None:
        """Write `text` in place of what stands there, at first after half a second; erase the line for None."""
        if not sys.stderr.isatty():
            return
        with self._lock:
            self._text = text
            if text is None:
                self._end()
            elif self._is_shown:
                self._write()
            elif self._timer is None:
                self._timer = threading.Timer(QUIET_S, self._begin)
                self._timer.daemon = True
                self._timer.start()

    def is_stopped(self) -> bool:
        """Whether Ctrl-C was pressed since the work began that can end early."""
        return self._is_stopped

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Take the first Ctrl-C as the wish for the best so far; the second interrupts."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_stopped = False

        def stop(_number: int, _frame: FrameType | None) -> None:
            if self._is_stopped:
                raise KeyboardInterrupt
            self._is_stopped = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _begin(self) -> None:
        with self._lock:
            if self._timer is not None and self._text is not None:
                self._is_shown = True
                self._write()

    def _write(self) -> None:
        import shutil  # only where something takes long

        width = shutil.get_terminal_size().columns
        _draw(f"{_ERASE}{printable(self._text or '')[: width - 1]}")

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_shown:
            self._is_shown = False
            _draw(_ERASE)


def _draw(text: str) -> None:
    stream = unfiltered(sys.stderr)
    stream.write(text)
    stream.flush()
