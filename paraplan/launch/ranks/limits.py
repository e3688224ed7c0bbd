"""Limits of the system: cores next to GPUs, open files, processes, locked memory; and whom it killed for memory."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch on a CPU need not pay
    from paraplan.hardware.topology import Gpu

_PLENTY = 4096
_IPC_LOCK = 14  # linux/capability.h

MemoryKillScope = Literal["cgroup", "host"]


def usable_cores(*, cpu_folder: Path = Path("/sys/devices/system/cpu"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the physical cores that affinity and the CPU quota of the cgroup leave to this process, at least 1.

    Hardware threads of one core count once where /sys tells them apart: matmuls gain nothing from the second.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_siblings(cpu, cpu_folder) for cpu in cpus}
    quota = _quota_cores(cgroup)
    return max(1, min(len(siblings), math.floor(quota)) if quota is not None else len(siblings))


def machine_cores(cpu_folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the physical cores of this machine, whoever may use them."""
    return len({_siblings(cpu, cpu_folder) for cpu in range(os.cpu_count() or 1)})


def threads_per_rank(*, num_cores: int, ranks_per_node: int) -> int:
    """Return OMP_NUM_THREADS for each rank: the cores shared out evenly, at least 1."""
    return max(1, num_cores // ranks_per_node)


def cpus_of_ranks(gpus: Sequence[Gpu], *, num_ranks: int, allowed: set[int]) -> dict[int, tuple[int, ...]]:
    """Return the CPUs next to the GPU of each local rank; none where all GPUs are next to the same CPUs.

    `allowed` are the CPUs that this process may use. CPUs that no GPU's driver has named bind nobody.
    """
    near = {rank: frozenset(parse_cpus(gpu.cpu_affinity or "")) & allowed for rank, gpu in enumerate(gpus[:num_ranks])}
    if len(near) < num_ranks or not all(near.values()) or len(set(near.values())) < 2:
        return {}
    return {rank: tuple(sorted(cpus)) for rank, cpus in near.items()}


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs of a list such as `0-31,64-95`; none for another text."""
    cpus: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if not low.isdecimal() or not (high or low).isdecimal():
            return set()
        cpus |= set(range(int(low), int(high or low) + 1))
    return cpus


def _siblings(cpu: int, cpu_folder: Path) -> str:
    try:
        return (cpu_folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota_cores(cgroup: Path) -> float | None:
    """Return the CPU quota in cores, None for no quota. Files: cpu.max (cgroup 2), cpu.cfs_* (cgroup 1)."""
    with suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us, period_us = (int((cgroup / f"cpu/cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota_us / period_us if quota_us > 0 else None
    return None


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
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        effective = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
        return bool(int(effective, 16) >> _IPC_LOCK & 1)
    return False


def _count_tasks() -> int:
    """Return how many processes and threads this user has here."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            count += len([*(folder / "task").iterdir()]) if folder.stat().st_uid == os.geteuid() else 0
    return count


@dataclass(frozen=True)
class MemoryKills:
    """Kills so far in the cgroup of this process, and on the whole host; None where the kernel does not say.

    Files: memory.events (cgroup 2), memory.oom_control (cgroup 1), /proc/vmstat (since Linux 4.13).
    """

    in_cgroup: int | None
    on_host: int | None


def count_memory_kills(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryKills:
    """Return the counts as they are now."""
    counts = (_read_count(file) for file in _cgroup_files(proc, cgroup))
    in_cgroup = next((count for count in counts if count is not None), None)
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
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
