"""Parts of pages between marks, which scripts renew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

TextOf = Callable[[Path], str]
"""Returns the text of a file as it is to be, as far as it is renewed already."""


def between(text: str, start: str, end: str, new: str) -> str:
    """Return `text` with what stands between the marks `start` and `end` replaced by `new`."""
    before, found, rest = text.partition(start)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"no {start.strip()} with its {end.strip()}")
    return before + start + new + end + after
