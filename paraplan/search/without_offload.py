"""What a recommended plan pays for offload, and what would do without it."""

from __future__ import annotations

from dataclasses import replace

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.workload import Workload
from paraplan.search.fixed import FixedChoices
from paraplan.search.what_fits import fewest_nodes, some_plan_fits
from paraplan.units import format_seconds


def offload_remark(
    workload: Workload, estimate: PlanEstimate, *, runnable_only: bool, fixed: FixedChoices
) -> str | None:
    """Return in a sentence how long the host takes of a step, and what lets a plan without offload fit.

    None for a plan without offload, for one that was asked to offload, and where a plan without it fits, and is slower.
    """
    if estimate.plan.offload == "none" or fixed.offload is not None:
        return None
    without = replace(fixed, offload="none")
    nodes = fewest_nodes(workload, runnable_only=runnable_only, fixed=without)
    if nodes == workload.cluster.num_nodes:
        return None
    ways = [f"{nodes * workload.cluster.gpus_per_node} GPUs (--nodes {nodes})"] if nodes else []
    smaller = replace(workload, training=workload.training.replace(optimizer="adamw_8bit"))
    if workload.training.optimizer == "adamw" and some_plan_fits(smaller, runnable_only=runnable_only, fixed=without):
        ways.append("--optimizer adamw_8bit")
    step = estimate.step
    words = (
        f"nothing fits without offload: the optimizer's step on the host takes {format_seconds(step.optimizer_s)} of "
        f"{format_seconds(step.step_time_s)}"
    )
    return f"{words}. It would fit with {' or '.join(ways)}" if ways else words
