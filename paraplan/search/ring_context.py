"""Long sequences whose attention heads do not divide over the ranks: what a framework makes of them that rings keys."""

from __future__ import annotations

from collections.abc import Callable

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.framework_files import load_framework
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.plan.context_heads import context_reason
from paraplan.plan.executor import Executor
from paraplan.search.constraints import Constraints
from paraplan.search.degrees import divisors
from paraplan.search.lever_trials import offer_of
from paraplan.search.levers import Lever
from paraplan.search.offers import LeverOffer
from paraplan.search.results import RANGE

RINGS = "fsdp"
"""torch's context parallelism passes keys and values around a ring, for any number of heads."""


def ring_offers(
    workload: Workload,
    best: PlanEstimate,
    *,
    executor: Executor,
    executors: Callable[[Workload], Executor],
    fixed: Constraints,
) -> tuple[LeverOffer, ...]:
    """Return what FSDP's ring makes of fewer sequences than GPUs whose heads paraplan's runtime cannot exchange.

    Nothing where it can, and where the ring is not faster by more than the 80 % range.
    """
    gpus, batch = workload.cluster.num_gpus, workload.training.global_batch_size
    if not executor.is_own or batch >= gpus:
        return ()
    refused = (context_reason(workload.model, tp=1, cp=cp) for cp in divisors(gpus) if cp > best.plan.cp)
    reason = next((one for one in refused if one is not None), None)
    if reason is None:
        return ()
    profile = load_framework(RINGS)
    lever = Lever(f"{profile.title}'s ring", f"--framework {RINGS}", framework=profile)
    try:
        there = executors(lever.workload(workload))
    except ParaplanError:  # it lacks the training
        return ()
    found = offer_of(lever, workload, executor=there, fixed=fixed, without=best)
    if found is None or not found[0].fits or (found[0].slowdown or 0.0) > -RANGE / (1 + RANGE):
        return ()
    return (found[0].replace(note=f"in paraplan's runtime {reason}; {profile.title} passes keys around a ring"),)
