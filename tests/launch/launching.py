"""Launching in tests: the command, its environment, and what is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from forked_launch import Ended
from forked_launcher import ForkedLauncher
from free_ports import free_port as free_port
from waiting import PATIENCE_S, wait_until

import paraplan

Launch = Callable[..., subprocess.CompletedProcess[str]]
ForkedLaunch = Callable[..., Ended]
Start = Callable[..., "subprocess.Popen[str]"]
StartForked = Callable[..., ForkedLauncher]
WriteScript = Callable[[str], Path]

NEVER_S = 100 * PATIENCE_S
"""What a launcher is told to wait at most where the test says that it does not wait: the test's own end comes first."""


def launcher_environment(scratch: Path, **changes: str) -> dict[str, str]:
    """Return an environment without torchrun's or our variables, whose temporary files go to `scratch`.

    A PYTHONPATH that leads to the paraplan under test stays: another one may be installed.
    """
    root = str(Path(paraplan.__file__).parent.parent)
    ours = ("PET_", "PARAPLAN_", "TORCHELASTIC_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    if root in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        kept["PYTHONPATH"] = root
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


def wait_until_dead(*pids: int) -> None:
    """Return once none of `pids` is alive."""
    wait_until(lambda: not any(map(is_alive, pids)), told=lambda: [pid for pid in pids if is_alive(pid)])


def read_until(stream: IO[str], is_enough: Callable[[str], bool]) -> str:
    """Return what a process writes up to the point where it `is_enough`; the stream must not end before."""
    text = ""
    while not is_enough(text):
        character = stream.read(1)
        assert character, f"the process has ended after {text!r}"
        text += character
    return text


def names_in(folder: Path) -> list[str]:
    """Return the names of what is in `folder`."""
    return sorted(path.name for path in folder.iterdir())
