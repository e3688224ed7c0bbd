"""The ranks of this node as they run: what the launcher knows of them, for answers to commands from outside."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from paraplan.launch.ranks.bootstrap import STACK_FILE


@dataclass(frozen=True)
class LiveRank:
    """A rank of this node. `folder` is where its error file is, None for none; `logs` are the files of its streams."""

    rank: int
    """In the whole job."""
    local_rank: int
    pid: int
    folder: Path | None = None
    logs: tuple[str, ...] = ()

    @property
    def stack_file(self) -> Path | None:
        """The file that gets the stacks of its threads, None for a rank that has not begun."""
        path = None if self.folder is None else self.folder / STACK_FILE
        return path if path is not None and path.exists() else None


def process_state(pid: int) -> str:
    """Return `running`, `stopped` (by a signal or a debugger) or `ended`."""
    states = {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}
    return states.get("".join(_stat(pid)[:1]) or "X", "running")


def send_signal(rank: LiveRank, number: int) -> None:
    """Send a signal that the process catches: one that it does not catch, as after an exec, would end it.

    Nothing is sent to a process that is no child of a child of ours: that process has ended, and its number is used
    again. Raises OSError where the process is gone.
    """
    handle = os.pidfd_open(rank.pid)
    try:
        if _is_ours(rank.pid) and catches(rank.pid, number):
            signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def catches(pid: int, number: int, *, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def _is_ours(pid: int) -> bool:
    """Whether the parent of a process, the spawner, is a child of this one."""
    parent = _stat(pid)[1:2]
    return bool(parent) and _stat(int(parent[0]))[1:2] == [str(os.getpid())]


def _stat(pid: int) -> list[str]:
    """Return the state and what follows it of a process (proc(5)); nothing for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
