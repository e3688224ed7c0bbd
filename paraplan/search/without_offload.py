"""What a recommended plan pays for offload, and what would do without it."""

from __future__ import annotations

from dataclasses import replace

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.workload import Workload
from paraplan.hardware.cluster import Cluster
from paraplan.search.fixed import Constraints
from paraplan.search.what_fits import fewest_gpus, fewest_nodes, some_plan_fits
from paraplan.units import format_seconds


def offload_remark(
    workload: Workload, estimate: PlanEstimate, *, asked: Cluster, runnable_only: bool, fixed: Constraints
) -> str | None:
    """Return in a sentence how long the host takes of a step, and what lets a plan without offload fit.

    `asked` are the machines of the question, of which the workload may have a part. None for a plan without offload,
    for one that was asked to offload, and where a plan without it fits, and is slower.
    """
    if estimate.plan.offload == "none" or fixed.offload is not None:
        return None
    without = replace(fixed, offload="none")
    whole = replace(workload, cluster=asked)
    machines = None
    if asked != workload.cluster:
        machines = fewest_gpus(whole, runnable_only=runnable_only, fixed=without)
    if machines is None:
        nodes = fewest_nodes(whole, runnable_only=runnable_only, fixed=without)
        machines = asked.replace(num_nodes=nodes) if nodes else None
    if machines is not None and machines.num_gpus <= workload.cluster.num_gpus:
        return None
    ways = [_gpus(machines, asked)] if machines else []
    smaller = replace(workload, training=workload.training.replace(optimizer="adamw_8bit"))
    if workload.training.optimizer == "adamw" and some_plan_fits(smaller, runnable_only=runnable_only, fixed=without):
        ways.append("--optimizer adamw_8bit")
    step = estimate.step
    words = (
        f"nothing fits without offload: the optimizer's step on the host takes {format_seconds(step.optimizer_s)} of "
        f"{format_seconds(step.step_time_s)}"
    )
    return f"{words}. It would fit with {' or '.join(ways)}" if ways else words


def _gpus(machines: Cluster, asked: Cluster) -> str:
    part = f"--gpus-per-node {machines.gpus_per_node}" if machines.gpus_per_node < asked.gpus_per_node else ""
    return f"{machines.num_gpus} GPUs ({part or f'--nodes {machines.num_nodes}'})"
