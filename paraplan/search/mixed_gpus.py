"""Several kinds of GPU in one machine: what the slower ones cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, find_gpu
from paraplan.hardware.profiles import GpuProfile
from paraplan.plan.executor import Executor
from paraplan.search.constraints import Constraints
from paraplan.search.results import SearchResult
from paraplan.search.search import search
from paraplan.units import format_bytes, format_seconds


def mixed_remark(workload: Workload, result: SearchResult, *, executor: Executor, fixed: Constraints) -> str | None:
    """Return in a sentence what the slower GPUs of a machine cost, and what the others do alone.

    None for GPUs of one kind, and of kinds that no profile describes.
    """
    counts = Counter(gpu.name for gpu in workload.cluster.node.gpus if gpu.name is not None)
    kinds = {name: gpu for name in counts if (gpu := find_gpu(name)) is not None}
    faster = [name for name, gpu in kinds.items() if gpu.name != workload.cluster.gpu.name]
    if len(kinds) < len(counts) or not faster:
        return None
    slow = workload.cluster.gpu.title
    memory = format_bytes(workload.cluster.gpu_memory_bytes)
    words = (
        f"all ranks wait for the slowest, the {slow}, and have the least memory, {memory}: every rank gets as much of "
        "the batch, for no framework planned for here gives the faster card more"
    )
    best = max(faster, key=lambda name: counts[name] * (max(kinds[name].peak_flops_per_s.values())))
    return f"{words}; {_alone(workload, result, counts[best], kinds[best], executor=executor, fixed=fixed)}"


def _alone(
    workload: Workload, result: SearchResult, count: int, gpu: GpuProfile, *, executor: Executor, fixed: Constraints
) -> str:
    """Return what `count` GPUs of a kind take without the others."""
    link = "-no-p2p" if workload.cluster.name.endswith("-no-p2p") else ""
    name = f"{count}x{gpu.name}{link}"
    cluster = cluster_from_profile(name, num_nodes=workload.cluster.num_nodes)
    cluster = cluster.replace(host_memory_bytes=workload.cluster.host_memory_bytes)
    who = f"{count} x {gpu.title} alone"
    try:
        part = replace(workload, cluster=cluster)
        alone = search(part, num_candidates=1, executor=executor, fixed=fixed).best
    except ParaplanError:
        return f"no plan fits {who}"
    ratio = alone.step.step_time_s / result.best.step.step_time_s
    change = f"{ratio - 1:.0%} longer" if ratio >= 1 else f"{1 - ratio:.0%} less"
    takes = "takes" if count == 1 else "take"
    return f"{who} {takes} {format_seconds(alone.step.step_time_s)} a step, {change} (--profile {name})"
