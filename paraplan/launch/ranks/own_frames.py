"""Tracebacks of a script without the frames of the launcher: around the script, and around calls of torch.

Standard library only, and importable alone: see `bootstrap`.
"""

from __future__ import annotations

import os
from types import TracebackType

_OWN_FOLDER = os.path.normpath(f"{os.path.dirname(os.path.abspath(__file__))}/..") + os.sep  # noqa: PTH100, PTH120


def take_out_own_frames(error: BaseException | None) -> TracebackType | None:
    """Take the launcher's frames out of the tracebacks of `error` and of its causes; return the one of `error`."""
    rest, seen = [error], set[int]()
    while rest:
        one = rest.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = frame = _first_of_others(one.__traceback__)
        while frame is not None:
            later = _first_of_others(frame.tb_next)
            frame.tb_next = later
            frame = later
        rest += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return None if error is None else error.__traceback__


def _first_of_others(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        traceback = traceback.tb_next
    return traceback
