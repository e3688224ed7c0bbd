"""CPU cores: those that this process may use, the threads of each rank that follow, and those next to its GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch on a CPU need not pay
    from paraplan.hardware.topology import Gpu


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
