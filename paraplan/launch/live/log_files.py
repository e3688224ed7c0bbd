"""A piece of a log that grows."""

from __future__ import annotations

import os
from pathlib import Path

MAX_BYTES = 1 << 16
"""Of one piece."""


def read_log(path: str, offset: int) -> tuple[int, str]:
    """Return where the next bytes of a log begin, and those behind `offset`, one character for each byte."""
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size + offset) if offset < 0 else min(offset, size))
            data = file.read(MAX_BYTES)
            return file.tell(), data.decode("latin-1")
    except OSError:
        return max(0, offset), ""
