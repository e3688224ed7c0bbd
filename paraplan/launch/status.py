"""The live status of a job on a terminal: in its title, where it never comes between the lines that ranks write."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_SAVE_TITLE, _RESTORE_TITLE = "\033[22;0t", "\033[23;0t"  # xterm's stack of titles; other terminals ignore it
_INTERVAL_S = 1.0


class StatusTitle:
    """Shows a text in the title of the terminal that `stream` is; does nothing where it is none."""

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_shown = self._stream.isatty()
        self._clock = clock
        self._started = clock()
        self._shown_at = self._started
        self._is_saved = False

    def show(self, text: str) -> None:
        """Show `text` with the time since the start, once a second at most."""
        now = self._clock()
        if not self._is_shown or now - self._shown_at < _INTERVAL_S:
            return
        self._shown_at = now
        begin = "" if self._is_saved else _SAVE_TITLE
        self._is_saved = True
        self._write(f"{begin}\033]0;paraplan: {text}, {_duration(now - self._started)}\007")

    def close(self) -> None:
        """Put back the title that was there before."""
        if self._is_saved:
            self._write(_RESTORE_TITLE)
            self._is_saved = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # a terminal that is gone
            self._is_shown = False


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
