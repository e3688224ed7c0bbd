"""The search: price the whole space, keep what fits, rank it, and set the tree's answer beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paraplan.cost.estimate import PlanEstimate, estimate_plan
from paraplan.cost.kernels import effective_peak
from paraplan.cost.table import Ints
from paraplan.cost.workload import Workload
from paraplan.search.constraints import FREE, Constraints
from paraplan.search.evaluation import MemorySurvey, Priced, TimeSurvey, kinds_of, pareto_front, spread
from paraplan.search.failure import nothing_fits
from paraplan.search.results import Candidate, Objective, SearchResult, rank, simplest_of_the_best
from paraplan.search.space import PlanSpace
from paraplan.search.tree import TreeAnswer, decide, family, tree_facts

WORTH_NAMING = 1.02
"""A plan outside the tree's answer is named where it is faster by more than this factor."""


def search(
    workload: Workload,
    *,
    objective: Objective = "throughput",
    num_candidates: int = 10,
    runnable_only: bool = True,
    fixed: Constraints = FREE,
    with_front: bool = False,
    explains_failure: bool = True,
    with_second: bool = False,
) -> SearchResult:
    """Return the ranked plans for a workload, best by `objective` first.

    `runnable_only` keeps to what paraplan's runtime executes, and all plans have what is `fixed`. Raises
    `NoPlanFitsError` where no plan fits, with the plan that comes nearest, what it lacks and what would help (which
    takes more searches, `explains_failure`), and `PlanError` where what is fixed cannot be had.
    """
    space = PlanSpace(workload, runnable_only, fixed)
    memory = MemorySurvey.of(workload, space)
    if not memory.fitting.columns:
        raise nothing_fits(workload, space, memory.too_large, with_ways_out=explains_failure)
    answer = decide(tree_facts(workload))
    times = TimeSurvey(
        workload,
        space.orders,
        num_kinds=num_candidates,
        is_in_tree=lambda plan: family(plan) in answer.families,
        smallest_first=objective == "memory",
        fronts=with_front,
    )
    priced = times.run(memory.fitting)
    plans = _Checked(workload, priced, answer)
    chosen = _Choice.of(plans, objective, num_candidates)
    if chosen is None:
        raise nothing_fits(workload, space, memory.too_large, with_ways_out=explains_failure)
    best, second, fastest = chosen.best, chosen.second if with_second else None, chosen.fastest
    return SearchResult(
        decisions=answer.decisions,
        families=answer.families,
        best=best,
        second=second,
        fastest=fastest if objective == "throughput" else None,
        candidates=tuple(plans.candidate(row) for row in chosen.rows[:num_candidates]),
        rejections=memory.rejections,
        plans_considered=space.considered,
        plans_priced=memory.num_priced,
        times_priced=times.num_priced,
        front=plans.fitting_candidates(pareto_front(priced)) if with_front else (),
        cloud=plans.fitting_candidates(spread(priced)) if with_front else (),
        remark=chosen.remark,
        is_runnable=runnable_only,
    )


@dataclass(frozen=True, eq=False)
class _Choice:
    """The plan to use among the priced ones, and those to set beside it.

    `rows` are the best of each kind, ranked, `named` those whose families the tree names, or all where it has none.
    """

    plans: _Checked
    objective: Objective
    rows: list[int]
    named: list[int]
    row: int

    @classmethod
    def of(cls, plans: _Checked, objective: Objective, count: int) -> _Choice | None:
        """Return the choice, None where no priced plan fits in all of its stages."""
        priced = plans.priced
        ranked = best_of_each_kind(priced, rank(objective, seconds=priced.seconds, peak_bytes=priced.peak_bytes))
        rows = plans.first_fitting(ranked, count)
        if not rows:  # the best of no kind does: some other plan of a kind may
            every = rank(objective, seconds=priced.seconds, peak_bytes=priced.peak_bytes)
            rows = plans.first_fitting([int(row) for row in every], 0)
        if not rows:
            return None
        named = plans.first_fitting([row for row in ranked if plans.is_named(row)], count) or rows
        rows, named = (plans.in_order(objective, each) for each in (rows, named))
        row = simplest_of_the_best(objective, priced.table, named, seconds=priced.seconds, peak_bytes=priced.peak_bytes)
        return cls(plans, objective, rows, named, row)

    @property
    def best(self) -> PlanEstimate:
        return self.plans.estimate(self.row)

    @property
    def second(self) -> PlanEstimate | None:
        others = [row for row in self.rows if row != self.row]
        return self.plans.estimate(others[0]) if others else None

    @property
    def fastest(self) -> PlanEstimate | None:
        seconds = self.plans.priced.seconds
        row = min(self.rows, key=lambda each: float(seconds[each]))
        return self.plans.estimate(row) if seconds[self.row] > WORTH_NAMING * seconds[row] else None

    @property
    def remark(self) -> str | None:
        """Return why a plan that is not the first of its list is recommended, None where it is."""
        first, priced = self.named[0], self.plans.priced
        if first == self.row:
            return None
        is_memory = self.objective == "memory"
        values, what = (priced.peak_bytes, "more memory") if is_memory else (priced.seconds, "slower")
        more = values[self.row] / values[first] - 1
        simpler, other = priced.plan(self.row).describe(), priced.plan(first).describe()
        return f"{simpler} is the simpler of equals: {more:.1%} {what} than {other}"


@dataclass(frozen=True, eq=False)
class _Checked:
    """Priced plans, and their estimates stage by stage where these are asked for."""

    workload: Workload
    priced: Priced
    answer: TreeAnswer
    _estimates: dict[int, PlanEstimate] = field(default_factory=dict)

    def estimate(self, row: int) -> PlanEstimate:
        if row not in self._estimates:
            found = estimate_plan(self.workload, self.priced.plan(row))
            self._estimates[row] = found
            self.priced.seconds[row] = found.step.step_time_s
            self.priced.peak_bytes[row] = found.peak_memory_bytes
        return self._estimates[row]

    def is_named(self, row: int) -> bool:
        return family(self.priced.plan(row)) in self.answer.families

    def first_fitting(self, rows: list[int], count: int) -> list[int]:
        """Return the first `count` of `rows` that fit, and one more.

        The survey computed the stages that should need most. Where blocks differ or are not evenly divided, all
        stages are computed here, and rows get the price of all.
        """
        table = self.priced.table
        has_others = (table.pp > 3) & ((table.split > 0) | (len(self.workload.model.runs) > 1))
        found: list[int] = []
        for row in rows:
            if len(found) > count:
                break
            if not has_others[row] or self.estimate(row).fits:
                found.append(row)
        return found

    def in_order(self, objective: Objective, rows: list[int]) -> list[int]:
        """Return `rows` in the order of an objective, by the prices of all stages where these are known."""
        few = self.priced.select(np.array(rows, dtype=np.int64))
        return [rows[place] for place in rank(objective, seconds=few.seconds, peak_bytes=few.peak_bytes)]

    def fitting_candidates(self, rows: list[int]) -> tuple[Candidate, ...]:
        """Return those of `rows` that fit by all that is known of their stages."""
        found = (self.candidate(row) for row in rows)
        return tuple(one for one in found if one.peak_memory_bytes <= self.workload.usable_memory_bytes)

    def candidate(self, row: int) -> Candidate:
        workload, seconds = self.workload, float(self.priced.seconds[row])
        training, plan = workload.training, self.priced.plan(row)
        tokens_per_s = training.tokens_per_step / seconds / plan.world_size
        flops_per_s = 3 * workload.model.flops_per_token(training.seq_length) * tokens_per_s
        return Candidate(
            plan=plan,
            in_tree=self.is_named(row),
            step_time_s=seconds,
            tokens_per_s_per_gpu=tokens_per_s,
            mfu=flops_per_s / effective_peak(workload.cluster.gpu, training),
            peak_memory_bytes=round(float(self.priced.peak_bytes[row])),
        )


def best_of_each_kind(priced: Priced, order: Ints) -> list[int]:
    """Return the first row in `order` of each choice of axes and ZeRO stage."""
    ordered = priced.table.select(order)
    firsts, _ = kinds_of(lambda name: np.asarray(getattr(ordered, name)))
    return [int(row) for row in order[np.sort(firsts)]]
