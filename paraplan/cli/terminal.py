"""What commands print with: rich's console without spaces at the ends of lines."""

from __future__ import annotations

import re
import sys
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich, which --json does without
    from rich.console import Console

_ENDS = re.compile(r" +((?:\x1b\[[0-9;]*m)*)(?=\n|\Z)")


class _WithoutEnds:
    """A stream that leaves out spaces at the ends of lines: tables fill their last column with them."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write whole lines, as rich's console gives them."""
        self._stream.write(_ENDS.sub(r"\1", text) if text.endswith("\n") else text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_console(**options: Any) -> Console:
    """Return a console on standard output; `options` are rich's."""
    from rich.console import Console

    stream: Any = _WithoutEnds(sys.stdout)
    return Console(highlight=False, file=stream, **options)
