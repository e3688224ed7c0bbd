"""CPU cores that this process may use, and the threads of each rank that follow from them."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(*, cpu_folder: Path = Path("/sys/devices/system/cpu"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the physical cores that affinity and the CPU quota of the cgroup leave to this process, at least 1.

    Hardware threads of one core count once where /sys tells them apart: matmuls gain nothing from the second.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_siblings(cpu, cpu_folder) for cpu in cpus}
    quota = _quota_cores(cgroup)
    return max(1, min(len(siblings), math.floor(quota)) if quota is not None else len(siblings))


def threads_per_rank(*, num_cores: int, ranks_per_node: int) -> int:
    """Return OMP_NUM_THREADS for each rank: the cores shared out evenly, at least 1."""
    return max(1, num_cores // ranks_per_node)


def _siblings(cpu: int, cpu_folder: Path) -> str:
    try:
        return (cpu_folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota_cores(cgroup: Path) -> float | None:
    """Return the CPU quota in cores, None for no quota. Files: cpu.max (cgroup 2), cpu.cfs_* (cgroup 1)."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota_us / period_us if quota_us > 0 else None
