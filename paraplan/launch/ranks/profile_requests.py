"""A profile that is asked for from outside: the launcher's side of what stands in the ring of a rank's steps.

Nothing but the ring is written, so that nothing is left of a request. The rank answers there (`StepMarks`).
"""

from __future__ import annotations

import os
from pathlib import Path

from paraplan.launch.ranks.step_marks import (
    ANSWER,
    ANSWER_AT,
    HEADER,
    MAGIC,
    MARKS_FILE,
    REQUEST,
    REQUEST_AT,
    SIZE,
    STATES,
    trace_name,
)

LONGEST_S = 600.0
"""Seconds of a profile at most: torch keeps all its events in memory until the end."""


def trace_path(folder: Path, *, rank: int, number: int) -> Path:
    """Return the trace that a rank with its error file in `folder` writes for a request."""
    return folder / trace_name(rank, number)


def ask_for_profile(folder: Path, *, number: int, seconds: float, begin_by_s: float) -> bool:
    """Ask a rank to profile itself from its next step on; return whether it notes steps, at which it could begin.

    A step that comes after `begin_by_s`, in seconds from the epoch, begins nothing.
    """
    try:
        ring = os.open(folder / MARKS_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.fstat(ring).st_size != SIZE or HEADER.unpack(os.pread(ring, HEADER.size, 0))[0] != MAGIC:
            return False
        # the number last: the rank looks at it between two steps, whenever these are
        details = REQUEST.pack(number, seconds, begin_by_s)
        os.pwrite(ring, details[8:], REQUEST_AT + 8)
        os.pwrite(ring, details[:8], REQUEST_AT)
    finally:
        os.close(ring)
    return True


def read_profile(folder: Path, *, number: int) -> tuple[str, str]:
    """Return how far a rank is with a request, "" where it has not begun, and why where it failed."""
    try:
        data = (folder / MARKS_FILE).read_bytes()[ANSWER_AT : ANSWER_AT + ANSWER.size]
    except OSError:
        return "", ""
    if len(data) != ANSWER.size:
        return "", ""
    answered, state, text = ANSWER.unpack(data)
    if answered != number or not 0 < state < len(STATES):
        return "", ""
    return STATES[state], bytes(text).rstrip(b"\0").decode(errors="replace")
