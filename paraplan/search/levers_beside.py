"""Levers beside a recommended plan: what makes it simpler, or leaves it room, priced in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from paraplan.cost.estimate import PlanEstimate, allocator_holds, leaves_room
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError
from paraplan.plan.executor import Executor
from paraplan.plan.parallel import ParallelPlan
from paraplan.progress import is_stopped, say
from paraplan.search.constraints import Constraints
from paraplan.search.evaluated_plans import complexities
from paraplan.search.lever_trials import MOST_GPUS, LeverTrials, named_offer, priced_offer
from paraplan.search.levers import Lever, growing_segments, lacking, smaller_loss
from paraplan.search.offers import NO_COST, LeverOffer
from paraplan.search.results import SearchResult
from paraplan.search.search import search
from paraplan.search.selection import is_data_parallel, is_small_rig

MUCH_BUBBLE = 0.25
"""Share of the step that ranks wait above which levers on memory are tried in place of the pipeline."""
MOST_SIMPLER = 2
"""So many levers are offered that make the plan simpler."""


def levers_beside(
    workload: Workload, result: SearchResult, *, executor: Executor, fixed: Constraints
) -> tuple[LeverOffer, ...]:
    """Return the levers under which a simpler plan is no slower, then those on memory where that is short.

    It is short where a plan offloads unasked, waits in its pipeline for much of the step, or leaves too little room.
    """
    if result.is_partial:
        return ()
    best = result.best
    offloads = best.plan.offload != "none" and fixed.offload is None
    if offloads:
        left = replace(fixed, offload="none")
        return LeverTrials(workload, executor, left, without=best).offers(looks_for_fewest=True)
    simpler = _simpler(workload, result, executor=executor, fixed=fixed)
    told = {one.options for one in simpler}
    return (*simpler, *(one for one in _on_memory(workload, best, executor, fixed) if one.options not in told))


def _on_memory(
    workload: Workload, best: PlanEstimate, executor: Executor, fixed: Constraints
) -> tuple[LeverOffer, ...]:
    """Return levers in place of a pipeline that stands still, or that leave a plan more room."""
    idles = best.step.pipeline_bubble_s > MUCH_BUBBLE * best.step.step_time_s
    if idles:  # a plan without a pipeline may fit
        found = LeverTrials(workload, executor, fixed, without=best, most_slowdown=-MUCH_BUBBLE).offers()
        return found if any(one.fits for one in found) else ()
    if leaves_room(workload, best):
        return ()
    return LeverTrials(workload, executor, fixed, without=best, leaves_room=True).offers()


def _simpler(
    workload: Workload, result: SearchResult, *, executor: Executor, fixed: Constraints
) -> tuple[LeverOffer, ...]:
    """Return levers that train the same and whose best plan is simpler and no slower, or as simple and faster.

    All are tried together where none does so alone.
    """
    levers = [one for one in _tried(workload, result, executor) if lacking(one, workload, executor) is None]
    together = [levers[0].beside(levers[1])] if len(levers) > 1 else []
    for group in (levers, together):
        found = [_offer(one, workload, result.best, executor, fixed) for one in group]
        offers = sorted((one for one in found if one is not None), key=lambda one: one.step_time_s or 0.0)
        if offers:
            return tuple(offers[:MOST_SIMPLER])
    return ()


def _tried(workload: Workload, result: SearchResult, executor: Executor) -> Iterator[Lever]:
    """Yield what may make the plan simpler.

    A segment of torch's allocator that grows, where a plan was passed over for what the allocator takes, or the
    recommended one has no room for it; and a loss that keeps fewer logits where small rigs get no plain data
    parallelism.
    """
    best, count = result.best, workload.cluster.num_gpus
    reasons = (result.reason, result.plain_reason, result.guide_reason)
    is_kept_from = any(one is not None and one.cause == "allocator" for one in reasons)
    if count <= MOST_GPUS and (is_kept_from or not allocator_holds(workload, best)):
        yield from growing_segments(workload)
    table = PlanTable.of_plans([best.plan])
    is_plain = bool(is_data_parallel(partial(getattr, table))[0])
    if count <= MOST_GPUS and is_small_rig(workload) and not is_plain:
        yield from smaller_loss(workload, executor)


def _offer(
    lever: Lever, workload: Workload, best: PlanEstimate, executor: Executor, fixed: Constraints
) -> LeverOffer | None:
    """Return a lever whose plan is no slower than the best without it, and simpler, faster or the same with room."""
    if is_stopped():
        return None
    say(f"pricing {lever.options}")
    try:
        under = lever.workload(workload)
        other = search(under, num_candidates=1, executor=executor, fixed=fixed).best
    except ParaplanError:  # options that exclude each other
        return None
    offer = priced_offer(named_offer(lever, workload), under, other, without=best)
    more = _level(under, other.plan) - _level(workload, best.plan)
    makes_room = other.plan == best.plan and not allocator_holds(workload, best)
    is_faster = (1 + NO_COST) * other.step.step_time_s < best.step.step_time_s
    gains = more < 0 or makes_room or (more == 0 and is_faster)
    return offer.replace(is_simpler=more < 0) if offer.is_free and allocator_holds(under, other) and gains else None


def _level(workload: Workload, plan: ParallelPlan) -> int:
    """Return how complex a plan is."""
    table = PlanTable.of_plans([plan])
    return int(complexities(workload, partial(getattr, table))[0])
