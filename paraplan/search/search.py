"""The search: evaluate the whole space, keep what fits, rank it, and set the guide's answer beside it."""

from __future__ import annotations

from paraplan.cost.cost_model import CostModel
from paraplan.cost.loading import loading_of
from paraplan.cost.workload import Workload
from paraplan.plan.executor import OWN_RUNTIME, Executor
from paraplan.progress import doing, is_stopped, stoppable
from paraplan.search.choice import Choice, price_the_choice
from paraplan.search.constraints import FREE, Constraints
from paraplan.search.evaluated_plans import EvaluatedPlans
from paraplan.search.evaluation import Plans, Survey
from paraplan.search.failure import nothing_fits, nothing_loads
from paraplan.search.front import pareto_front, spread
from paraplan.search.results import Objective, SearchResult
from paraplan.search.space import PlanSpace
from paraplan.search.tree import decide, family, tree_facts

STOPPED = "stopped early: the best of the plans priced until then"


def search(
    workload: Workload,
    *,
    objective: Objective = "throughput",
    num_candidates: int = 10,
    executor: Executor = OWN_RUNTIME,
    fixed: Constraints = FREE,
    with_front: bool = False,
    with_second: bool = False,
) -> SearchResult:
    """Return the plan to use and the ranked plans for a workload, best by `objective` first.

    Plans are those that `executor` executes, and all have what is `fixed`. Raises
    `NoPlanFitsError` where no plan fits, or none can be loaded by any way that leaves it as it is, with the plan that
    comes nearest and what it lacks, and `PlanError` where what is fixed cannot be had.
    """
    workload = CostModel.of_workload(workload)
    space = PlanSpace(workload, executor, fixed)
    answer = decide(tree_facts(workload))
    with doing("counting plans"), stoppable():
        found, is_memory = Plans.of(workload, space), objective == "memory"
        survey = Survey(workload, found, num_kinds=num_candidates, smallest_first=is_memory, fronts=with_front)
        survey.run()
        if survey.num_timed:
            price_the_choice(survey, objective, lambda plan: family(plan) in answer.families)
        is_partial = is_stopped()
    plans = EvaluatedPlans(workload, survey.priced(), answer) if survey.num_timed else None
    chosen = None if plans is None else Choice.of(plans, objective, num_candidates)
    if plans is None or chosen is None:
        if is_partial:  # nobody knows whether something fits
            raise KeyboardInterrupt
        raise nothing_fits(workload, space, survey.too_large)
    _check_loading(workload, chosen)
    second, second_reason = chosen.second if with_second else (None, None)
    return SearchResult(
        decisions=answer.decisions,
        families=answer.families,
        best=chosen.best,
        second=second,
        second_reason=second_reason,
        fastest=None if is_memory else chosen.fastest,
        guide=chosen.guide,
        roomier=chosen.roomier,
        candidates=chosen.candidates(num_candidates),
        baselines=chosen.baselines(space),
        rejections=survey.rejections(space, is_partial=is_partial),
        is_partial=is_partial,
        plans_considered=space.considered,
        plans_priced=survey.num_priced,
        times_priced=survey.num_timed,
        front=plans.fitting_candidates(pareto_front(plans.priced)) if with_front else (),
        cloud=plans.fitting_candidates(spread(plans.priced)) if with_front else (),
        remark="; ".join(filter(None, [STOPPED * is_partial, chosen.remark])) or None,
        reason=chosen.reason,
        guide_reason=chosen.guide_reason,
        plain_reason=chosen.plain_reason,
        objective=objective,
        is_runnable=executor.is_own,
    )


def _check_loading(workload: Workload, chosen: Choice) -> None:
    """Raise `NoPlanFitsError` for a plan that no way of loading, under which it stays as it is, has memory for."""
    loading = loading_of(workload, chosen.best)
    if loading is not None and not chosen.loads and not loading.keeps_plan:
        raise nothing_loads(workload, chosen.best, loading)
