"""What the system lets this user have (`ulimit`): open files, processes and locked memory, and what to do about one."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PLENTY = 4096
_IPC_LOCK = 14  # linux/capability.h


@dataclass(frozen=True)
class Limit:
    """A limit of this process: what holds, and up to what its user may raise it. None: without limit."""

    soft: int | None
    hard: int | None

    @classmethod
    def read(cls, which: int) -> Limit:
        """Return a limit of this process, one of `resource.RLIMIT_*`."""
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
        return cls(soft, hard)

    def is_below(self, needed: int) -> bool:
        """Whether it is less than what is needed."""
        return self.soft is not None and self.soft < needed

    def way_out(self, option: str, name: str, wanted: int | None) -> str:
        """Return the command that raises it to `wanted` (None: no limit) before the launch, or who can raise it."""
        words = "unlimited" if wanted is None else str(wanted)
        if self.hard is None or (wanted is not None and self.hard >= wanted):
            return f"ulimit {option} {words}"
        return (
            f"the hard limit is {self.hard}: root raises it in /etc/security/limits.conf (* hard {name} {words}), "
            f"docker run by --ulimit {name}={-1 if wanted is None else wanted}"
        )


@dataclass(frozen=True)
class Limits:
    """The limits of a launcher, whose ranks inherit them; None for one that does not hold here."""

    files: Limit
    tasks: Limit | None
    num_tasks: int
    """Processes and threads that this user has already."""
    locked_bytes: Limit | None

    @classmethod
    def read(cls) -> Limits:
        """Return the limits of this process. Root has none of processes, and who may lock memory none of that."""
        is_root = os.geteuid() == 0
        locks = _may_lock() or not hasattr(resource, "RLIMIT_MEMLOCK")
        return cls(
            files=Limit.read(resource.RLIMIT_NOFILE),
            tasks=None if is_root else Limit.read(resource.RLIMIT_NPROC),
            num_tasks=0 if is_root else _count_tasks(),
            locked_bytes=None if locks else Limit.read(resource.RLIMIT_MEMLOCK),
        )


def raise_open_files(needed: int) -> None:
    """Let this process open so many files where its user may; children that it has already keep what they have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(OSError, ValueError):  # a sandbox that takes no limits
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))


def advice_on_limits(message: str, *, limits: Limits | None = None) -> str | None:
    """Return what to do about an error of a rank that a limit makes, with its value; None for other errors."""
    if "Too many open files" in message or "received 0 items of ancdata" in message:
        held = (limits or Limits.read()).files
        way_out = held.way_out("-n", "nofile", max(_PLENTY, 4 * (held.soft or 0)))
        return (
            f"a process may have {held.soft} open files: {way_out}; data loaders need fewer with "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        )
    if "can't start new thread" in message or "Resource temporarily unavailable" in message:
        found = (limits or Limits.read()).tasks
        if found is None or found.soft is None:
            return "the container has as many processes and threads as it may: see docker run --pids-limit"
        way_out = found.way_out("-u", "nproc", max(_PLENTY, 4 * found.soft))
        return f"this user may have {found.soft} processes and threads: {way_out}"
    return None


def _may_lock() -> bool:
    """Whether this process may lock memory without limit (CAP_IPC_LOCK)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        effective = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    except (OSError, StopIteration):
        return False
    return bool(int(effective, 16) >> _IPC_LOCK & 1)


def _count_tasks() -> int:
    """Return how many processes and threads this user has here."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.geteuid():
                count += sum(1 for _ in (folder / "task").iterdir())
        except OSError:  # it has ended
            continue
    return count
