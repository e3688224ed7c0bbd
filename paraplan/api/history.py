"""The user's own runs: those that were kept, and what they say of predictions."""

from __future__ import annotations

import socket
from pathlib import Path

from paraplan.accuracy.history import History as History
from paraplan.accuracy.history import HistoryEffect as HistoryEffect
from paraplan.accuracy.history import effect_of_history as effect_of_history
from paraplan.plan.kept_runs import KeptRunsError as KeptRunsError
from paraplan.plan.kept_runs import kept_runs_path, read_kept_runs


def has_history() -> bool:
    """Return whether any run of the user was kept."""
    return kept_runs_path().exists()


def load_history(path: str | Path | None = None) -> History:
    """Return the runs that `paraplan launch` and `paraplan validate --keep` kept; `.applied_to(workload)` uses them.

    `path` is the file, by default the user's own ($PARAPLAN_HISTORY, or `~/.local/state/paraplan/runs.json`): none are
    there without it. Raises `ParaplanError` for a file that is damaged.
    """
    found = kept_runs_path() if path is None else Path(path)
    return History(read_kept_runs(found), host=socket.gethostname())
