"""Several kinds of GPU in one machine: what the slower cost, and the faster alone where a step takes clearly less."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, find_gpu
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.profiles import GpuProfile
from paraplan.plan.executor import Executor
from paraplan.search.constraints import Constraints
from paraplan.search.idle_gpus import LeavingIdle, fastest_part
from paraplan.search.results import SearchResult
from paraplan.search.search import search
from paraplan.search.sizes import SearchOn
from paraplan.units import format_bytes, format_seconds


def without_slower(
    workload: Workload, result: SearchResult | None, search_on: SearchOn, *, executor: Executor, fixed: Constraints
) -> LeavingIdle | None:
    """Return the search on the faster kinds of GPU alone where a step takes clearly less than on all (`result`).

    Without a `result` no plan is there for all. None where the slower kinds are worth their place.
    """
    best = fastest_part(workload, _faster_parts(workload.cluster), result, executor=executor, fixed=fixed)
    if best is None:
        return None
    fewer = search_on(best)
    used, count = best.cluster.num_gpus, workload.cluster.num_gpus
    step = f"uses {used} of {count} GPUs, {best.cluster.kinds}: {format_seconds(fewer.best.step.step_time_s)} a step"
    if result is None:
        return LeavingIdle(best, fewer, f"{step}, no plan with all {count}")
    all_s, slow = format_seconds(result.best.step.step_time_s), workload.cluster.gpu.title
    return LeavingIdle(best, fewer, f"{step}, {all_s} with all {count}, where each rank waits for the {slow}")


def mixed_remark(workload: Workload, result: SearchResult, *, executor: Executor, fixed: Constraints) -> str | None:
    """Return in a sentence what the slower GPUs of a machine cost, and what the others do alone.

    None for GPUs of one kind, and of kinds that no profile describes.
    """
    parts = _faster_parts(workload.cluster)
    if not parts:
        return None
    slow = workload.cluster.gpu.title
    memory = format_bytes(workload.cluster.gpu_memory_bytes)
    words = (
        f"all ranks wait for the slowest, the {slow}, and have the least memory, {memory}: every rank gets as much of "
        "the batch, for no framework planned for here gives the faster card more"
    )
    best = max(parts, key=lambda part: part.num_gpus * _speed(part.gpu))
    return f"{words}; {_alone(workload, result, best, executor=executor, fixed=fixed)}"


def _alone(
    workload: Workload, result: SearchResult, cluster: Cluster, *, executor: Executor, fixed: Constraints
) -> str:
    """Return what the GPUs of a part of the machines take without the others."""
    who = f"{cluster.kinds} alone"
    try:
        alone = search(replace(workload, cluster=cluster), num_candidates=1, executor=executor, fixed=fixed).best
    except ParaplanError:
        return f"no plan fits {who}"
    ratio = alone.step.step_time_s / result.best.step.step_time_s
    change = f"{ratio - 1:.0%} longer" if ratio >= 1 else f"{1 - ratio:.0%} less"
    takes = "takes" if cluster.num_gpus == 1 else "take"
    return f"{who} {takes} {format_seconds(alone.step.step_time_s)} a step, {change} (--profile {cluster.name})"


def _faster_parts(cluster: Cluster) -> list[Cluster]:
    """Return the machines with their fastest kind of GPU alone, then with the next ones too, but for the slowest.

    Nothing for GPUs of one kind, and of kinds that no profile describes.
    """
    counts = Counter(gpu.name for gpu in cluster.node.gpus if gpu.name is not None)
    kinds = {name: gpu for name in counts if (gpu := find_gpu(name)) is not None}
    if len(kinds) < len(counts) or len(kinds) < 2:
        return []
    faster = sorted(
        (name for name in kinds if kinds[name].name != cluster.gpu.name), key=lambda name: -_speed(kinds[name])
    )
    link = "-no-p2p" if cluster.name.endswith("-no-p2p") else ""
    parts = []
    for size in range(1, len(faster) + 1):
        names = faster[:size]
        profile = "+".join(f"{counts[name]}x{kinds[name].name}" for name in names) + link
        gpu = cluster_from_profile(profile).gpu
        indices = [gpu.index for gpu in cluster.node.gpus if gpu.name in names]
        node = cluster.node.only(indices)
        parts.append(cluster.replace(name=profile, gpu=gpu, node=node, measured=()))
    return parts


def _speed(gpu: GpuProfile) -> float:
    return max(gpu.peak_flops_per_s.values())
