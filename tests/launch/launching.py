"""Launching in tests: the command, its environment, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Launch = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., "subprocess.Popen[str]"]
WriteScript = Callable[[str], Path]


def launcher_environment(scratch: Path, **changes: str) -> dict[str, str]:
    """Return an environment without torchrun's or our variables, whose temporary files go to `scratch`."""
    ours = ("PET_", "PARAPLAN_", "TORCHELASTIC_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"TMPDIR": str(scratch)} | changes


def launcher_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paraplan", "launch", *map(str, arguments)]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def names_in(folder: Path) -> list[str]:
    """Return the names of what is in `folder`."""
    return sorted(path.name for path in folder.iterdir())
