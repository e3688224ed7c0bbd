"""Processes that the kernel has killed for want of host memory, as it counts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MemoryKillScope = Literal["cgroup", "host"]


@dataclass(frozen=True)
class MemoryKills:
    """Kills so far in the cgroup of this process, and on the whole host; None where the kernel does not say.

    Files: memory.events (cgroup 2), memory.oom_control (cgroup 1), /proc/vmstat (since Linux 4.13).
    """

    in_cgroup: int | None
    on_host: int | None


def count_memory_kills(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryKills:
    """Return the counts as they are now."""
    in_cgroup = None
    for file in _cgroup_files(proc, cgroup):
        in_cgroup = _read_count(file)
        if in_cgroup is not None:
            break
    return MemoryKills(in_cgroup=in_cgroup, on_host=_read_count(proc / "vmstat"))


def new_memory_kill(before: MemoryKills, after: MemoryKills) -> MemoryKillScope | None:
    """Return where a process was killed between two counts: "cgroup" if in there, else "host"; None for nowhere."""
    if before.in_cgroup is not None and after.in_cgroup is not None and after.in_cgroup > before.in_cgroup:
        return "cgroup"
    if before.on_host is not None and after.on_host is not None and after.on_host > before.on_host:
        return "host"
    return None


def _cgroup_files(proc: Path, cgroup: Path) -> list[Path]:
    """Return the files that may hold the count, that of this process's own cgroup first.

    In a container the path in /proc/self/cgroup may be the host's, and the mounted root then is the own cgroup.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files += [cgroup / path.lstrip("/") / "memory.events", cgroup / "memory.events"]
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            files += [root / path.lstrip("/") / "memory.oom_control", root / "memory.oom_control"]
    return files


def _read_count(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        return None
    return None
