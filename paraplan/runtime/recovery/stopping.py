"""Ending in time: the state is saved at the end of a step that all ranks agree on, and the process ends by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from paraplan.errors import PREEMPTED_EXIT_STATUS
from paraplan.runtime.recovery.status import RankStatus


def stop_here(save: Callable[[Path], None], folder: Path, status: RankStatus, *, num_steps: int) -> NoReturn:
    """Save to `folder` and end this rank with the status that says so. Every rank comes here after the same step."""
    save(folder)
    status.set("stopped_at", num_steps)
    sys.exit(PREEMPTED_EXIT_STATUS)
