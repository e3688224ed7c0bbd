"""The ranks of this node as they run: what the launcher knows of them, for answers to commands from outside."""

from __future__ import annotations

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
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "ended"
    return {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}.get(state, "running")


def catches(pid: int, number: int, *, proc: Path = Path("/proc")) -> bool:
    """Whether a process has a handler for a signal: one that it does not catch, as after an exec, would end it."""
    try:
        lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
