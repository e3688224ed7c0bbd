"""The choice among evaluated plans: the one to use, and those to set beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from paraplan.cost.blocks.matmuls import effective_peak
from paraplan.cost.estimate import PlanEstimate, allocator_holds, estimate_plan, why_unsuitable
from paraplan.cost.plan_table import Floats, Ints, Mask, PlanTable, RecomputeCode
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan
from paraplan.search.evaluation import Priced, Survey, kinds_of
from paraplan.search.results import ROOMY, SPARE, TOLERANCE, Baseline, Candidate, Objective, complexity, faults, rank
from paraplan.search.space import PlanSpace
from paraplan.search.tree import TreeAnswer, family

PLAIN: tuple[tuple[Baseline, Literal[0, 3]], ...] = (("FSDP", 3), ("DDP", 0))
"""The plans that everybody knows, by their ZeRO stage: all GPUs along dp, and nothing offloaded."""

_TRIED = 15
"""Of the simplest plans so many more are asked for one that leaves the allocator room."""
_STAGES_PRICED = 3
"""The survey computes the first, the second and the last stage of a pipeline, and the fullest between."""


@dataclass(frozen=True, eq=False)
class EvaluatedPlans:
    """Priced plans, and their estimates stage by stage where these are asked for."""

    workload: Workload
    priced: Priced
    answer: TreeAnswer
    _estimates: dict[int, PlanEstimate] = field(default_factory=dict)

    def estimate(self, row: int) -> PlanEstimate:
        """Return the estimate of a row, whose price is that of all stages from then on."""
        if row not in self._estimates:
            found = estimate_plan(self.workload, self.priced.plan(row))
            self._estimates[row] = found
            self.priced.seconds[row] = found.step.step_time_s
            self.priced.peak_bytes[row] = found.peak_memory_bytes
        return self._estimates[row]

    def allocator_holds(self, row: int) -> bool:
        """Return whether what torch's allocator takes and keeps is within the GPU's memory on every stage."""
        return allocator_holds(self.workload, self.estimate(row))

    def is_named(self, row: int) -> bool:
        """Return whether the guide names the family of a plan."""
        return family(self.priced.plan(row)) in self.answer.families

    def first_fitting(self, rows: list[int], count: int) -> list[int]:
        """Return the first `count` of `rows` that fit, and one more.

        The survey computed the stages that should need most. Where blocks differ or are not evenly divided, all
        stages are computed here, and rows get the price of all.
        """
        has_others = has_other_stages(self.workload, self.priced.table)
        found: list[int] = []
        for row in rows:
            if len(found) > count:
                break
            if not has_others[row] or self.estimate(row).fits:
                found.append(row)
        return found

    def values(self, objective: Objective) -> Floats:
        """Return what the choice goes by: memory, or time with what a plan's faults are worth.

        Where nothing but time counts, faults do not.
        """
        priced = self.priced
        if objective == "memory" or not TOLERANCE[objective]:
            return priced.peak_bytes if objective == "memory" else priced.seconds
        return priced.seconds * worth(priced.table.offload, priced.peak_bytes / self.usable)

    def settled(self, objective: Objective) -> Floats:
        """Return the values once the best of them is of a plan that fits and is priced in all of its stages.

        The stages that the survey looks at may not be the slowest; what does not fit counts as infinite.
        """
        has_others, rest = has_other_stages(self.workload, self.priced.table), np.zeros(len(self.priced))
        while True:
            values = self.values(objective) + rest
            best = int(np.argmin(values))
            if not has_others[best] or not np.isfinite(values[best]):
                return values
            is_priced = best in self._estimates
            if not self.estimate(best).fits:
                rest[best] = np.inf
            elif is_priced:
                return values

    def in_order(self, objective: Objective, rows: list[int]) -> list[int]:
        """Return `rows` in the order of an objective, by the prices of all stages where these are known."""
        few = self.priced.select(np.array(rows, dtype=np.int64))
        return [rows[place] for place in rank(objective, seconds=few.seconds, peak_bytes=few.peak_bytes)]

    def fitting_candidates(self, rows: list[int]) -> tuple[Candidate, ...]:
        """Return those of `rows` that fit by all that is known of their stages."""
        found = (self.candidate(row) for row in rows)
        return tuple(one for row, one in zip(rows, found, strict=True) if one.peak_memory_bytes <= self.usable[row])

    @cached_property
    def usable(self) -> Floats:
        """What each of the priced plans may allocate."""
        return self.workload.usable_bytes(self.priced.table.axes)

    def candidate(self, row: int, baseline: Baseline | None = None) -> Candidate:
        """Return a row as it stands in the table of plans."""
        workload, seconds = self.workload, float(self.priced.seconds[row])
        training, plan = workload.training, self.priced.plan(row)
        tokens_per_s = training.tokens_per_step / seconds / plan.world_size
        flops_per_s = workload.model.training_flops_per_token(training.attended_length) * tokens_per_s
        return Candidate(
            plan=plan,
            in_tree=self.is_named(row),
            step_time_s=seconds,
            tokens_per_s_per_gpu=tokens_per_s,
            mfu=flops_per_s / effective_peak(workload.cluster.gpu, training),
            peak_memory_bytes=round(float(self.priced.peak_bytes[row])),
            baseline=baseline,
        )


@dataclass(frozen=True, eq=False)
class Choice:
    """The plan to use among the priced ones, and those to set beside it.

    `rows` are the best of each kind, ranked; `guide` is the fastest plan of the families that the guide names, if any
    fits.
    """

    plans: EvaluatedPlans
    objective: Objective
    rows: list[int]
    row: int
    guide_row: int | None

    @classmethod
    def of(cls, plans: EvaluatedPlans, objective: Objective, count: int) -> Choice | None:
        """Return the choice, None where no priced plan fits in all of its stages."""
        priced = plans.priced
        every = rank(objective, seconds=priced.seconds, peak_bytes=priced.peak_bytes)
        ranked = best_of_each_kind(priced, every)
        rows = plans.first_fitting(ranked, count)
        if not rows:  # the best of no kind does: some other plan of a kind may
            rows = plans.first_fitting(every.tolist(), 0)
        if not rows:
            return None
        rows = plans.in_order(objective, rows)
        named = plans.first_fitting([row for row in ranked if plans.is_named(row)], 0)
        return cls(plans, objective, rows, _simplest(plans, objective), named[0] if named else None)

    @property
    def best(self) -> PlanEstimate:
        """The plan to use."""
        return self.plans.estimate(self.row)

    @property
    def second(self) -> PlanEstimate | None:
        """The best of another kind."""
        others = [row for row in self.rows if row != self.row]
        return self.plans.estimate(others[0]) if others else None

    @cached_property
    def fastest(self) -> PlanEstimate | None:
        """The fastest plan, where another one is to be used."""
        seconds = self.plans.priced.seconds
        row = min(self.rows, key=lambda each: float(seconds[each]))
        return self.plans.estimate(row) if seconds[row] < seconds[self.row] else None

    @cached_property
    def guide(self) -> PlanEstimate | None:
        """The guide's own plan, where another one is to be used that is of none of its families."""
        if self.guide_row is None or self.plans.is_named(self.row):
            return None
        return self.plans.estimate(self.guide_row)

    @cached_property
    def roomier(self) -> PlanEstimate | None:
        """The fastest plan without offload that leaves `SPARE` of the memory, where the one to use is nearly full."""
        plans, usable = self.plans, self.best.usable_memory_bytes
        if self.best.peak_memory_bytes <= (1 - SPARE / 2) * usable:
            return None
        priced, most = plans.priced, (1 - SPARE) * usable
        rows = np.flatnonzero((priced.table.offload == 0) & (priced.peak_bytes <= most))
        for row in rows[np.argsort(priced.seconds[rows], kind="stable")][:_TRIED]:
            if plans.estimate(int(row)).peak_memory_bytes <= most:
                return plans.estimate(int(row))
        return None

    @property
    def remark(self) -> str | None:
        """Return why a plan that is not the best of its list is recommended, and what the guide would choose."""
        sentences = [self._why_simpler(), self._of_guide()]
        return "; ".join(filter(None, sentences)) or None

    def _why_simpler(self) -> str | None:
        first, priced = self.rows[0], self.plans.priced
        is_memory = self.objective == "memory"
        values, what = (priced.peak_bytes, "less memory") if is_memory else (priced.seconds, "faster")
        more = values[self.row] / values[first] - 1
        other, gain = priced.plan(first).describe(), f"{f'{more:.1%}' if more >= 0.001 else 'under 0.1%'} {what}"
        if more <= 0 or other == priced.plan(self.row).describe():
            return None
        if priced.table.offload[first] and not priced.table.offload[self.row]:
            return f"chosen over {other}, predicted {gain}, because it needs no offload"
        shares = priced.peak_bytes / self.plans.usable
        if not is_memory and shares[first] > ROOMY >= shares[self.row]:
            return f"chosen over {other}, predicted {gain}, because it leaves room in memory"
        error = (
            "nearly equal" if is_memory else f"a difference under {TOLERANCE[self.objective]:.0%} is within the error"
        )
        return f"chosen over {other}, predicted {gain}, because it is simpler ({error})"

    def _of_guide(self) -> str | None:
        if self.guide is None:
            return None
        ratio = self.guide.step.step_time_s / self.best.step.step_time_s
        slower = f"{ratio - 1:.0%} slower" if ratio < 2 else f"{ratio:.1f} times as slow"
        return f"Hugging Face's guide would choose {self.guide.plan.describe()}, predicted {slower}"

    def candidates(self, count: int) -> tuple[Candidate, ...]:
        """Return the best of each kind."""
        return tuple(self.plans.candidate(row) for row in self.rows[:count])

    def baselines(self, space: PlanSpace) -> tuple[Candidate, ...]:
        """Return the plans that everybody knows, also where they do not fit: plain FSDP and DDP, and the guide's."""
        fitting = self._baselines()
        found = [self.plans.candidate(row, name) for row, name in fitting.items()]
        for name, stage in PLAIN:
            too_large = None if name in fitting.values() else _too_large(self.plans, name, stage, space)
            found += [] if too_large is None else [too_large]
        return tuple(found)

    def _baselines(self) -> dict[int, Baseline]:
        """Return the rows of plain DDP and FSDP, where they fit, and of the guide's plan."""
        table, found = self.plans.priced.table, dict[int, Baseline]()
        if self.guide is not None and self.guide_row is not None:
            found[self.guide_row] = "guide"
        for name, stage in PLAIN:
            rows = np.flatnonzero(is_plain(self.plans.workload, lambda column: getattr(table, column), stage))
            if len(rows):
                found[int(rows[np.argmin(self.plans.priced.seconds[rows])])] = name
        return found


def _too_large(plans: EvaluatedPlans, name: Baseline, stage: Literal[0, 3], space: PlanSpace) -> Candidate | None:
    """Return a plain plan that does not fit, as it needs least memory; None for one that was no plan to begin with."""
    workload = plans.workload
    ranks, batch = workload.cluster.num_gpus, workload.training.global_batch_size
    if ranks == 1 or batch % ranks:
        return None
    plan = ParallelPlan(dp=ranks, zero_stage=stage, num_microbatches=batch // ranks, recompute="full")
    if why_unsuitable(workload, plan) is not None or space.why_left_out(plan) is not None:
        return None
    estimate = estimate_plan(workload, plan)
    if estimate.fits:
        return None
    return Candidate(
        plan=plan,
        in_tree=family(plan) in plans.answer.families,
        step_time_s=estimate.step.step_time_s,
        tokens_per_s_per_gpu=estimate.step.tokens_per_s_per_gpu,
        mfu=estimate.step.mfu,
        peak_memory_bytes=estimate.peak_memory_bytes,
        fits=False,
        baseline=name,
    )


def is_plain(workload: Workload, column: Callable[[str], Ints], stage: int) -> Mask:
    """Return which plans, given by their columns, are plain DDP (stage 0) or FSDP (stage 3) over all GPUs."""
    others = (column(name) == 0 for name in ("offload", "shards"))
    of_data = (column("dp") == workload.cluster.num_gpus) & (column("zero_stage") == stage) & (column("ep") == 1)
    by_default = workload.framework.kernels.recomputes_ops_by_default
    plain = (column("recompute") != RecomputeCode.SELECTIVE_OPS) | by_default
    return np.asarray(np.logical_and.reduce([of_data, plain, *others]))


def worth(offload: Ints, memory_share: Floats) -> Floats:
    """Return by what a plan's time counts for its faults."""
    return 1 + faults(offload, memory_share)


def has_other_stages(workload: Workload, table: PlanTable) -> Mask:
    """Return which plans have stages that the survey did not price, and that may be unlike those that it did."""
    is_unlike = (table.split > 0) | (len(workload.model.runs) > 1)
    return np.asarray((table.pp > _STAGES_PRICED) & is_unlike)


def _levels(workload: Workload, column: Callable[[str], Ints]) -> Ints:
    """Return how much there is to each plan."""
    by_default = workload.framework.kernels.recomputes_ops_by_default
    return complexity(column, seq_length=workload.training.seq_length, ops_by_default=by_default)


def price_the_choice(survey: Survey, objective: Objective, is_named: Callable[[ParallelPlan], bool]) -> None:
    """Price what the choice looks at beside the best of each kind: simpler plans, baselines, the guide's families."""
    plans = survey.plans
    for _, stage in PLAIN:
        survey.find(is_plain(survey.workload, plans.column, stage))
    firsts, kind = plans.kinds
    examples = plans.table(firsts)
    named = np.array([is_named(plan) for plan in examples.plans()])
    survey.find(named[kind])
    if objective == "memory":
        return
    survey.find(plans.column("offload") == 0, at_most_s=_surest_s(survey), most_share=ROOMY)
    levels = _levels(survey.workload, plans.column)
    for level in np.flatnonzero(np.bincount(levels)):  # np.unique would import masked arrays
        at_most_s = (1 + TOLERANCE[objective]) * _surest_s(survey)
        survey.find(levels == level, at_most_s=at_most_s, most_share=ROOMY)
        survey.find(levels == level, at_most_s=at_most_s)
        if _surest_s(survey, levels == level) <= at_most_s:
            return


def _surest_s(survey: Survey, among: Mask | None = None) -> float:
    """Return the least time of the plans that were priced, with what their faults are worth."""
    timed = np.isfinite(survey.seconds)
    rows = np.flatnonzero(timed if among is None else timed & among)
    shares = survey.peaks[rows] / survey.usable[rows]
    values = survey.seconds[rows] * worth(survey.plans.column("offload")[rows], shares)
    return float(values.min(initial=np.inf))


def _simplest(plans: EvaluatedPlans, objective: Objective) -> int:
    """Return the simplest plan within the tolerance of the best, of equally simple ones the best.

    One for which torch's allocator has to give back what it keeps is left to the last: most published runs that had to
    ran out of memory.
    """
    priced, values = plans.priced, plans.settled(objective)
    levels = _levels(plans.workload, lambda column: getattr(priced.table, column))
    order = np.lexsort((values, levels))
    most = (1 + TOLERANCE[objective]) * values.min()
    found = plans.first_fitting(order[values[order] <= most].tolist(), _TRIED)
    values = plans.values(objective)  # of all stages now
    found = [row for row in found if values[row] <= most]
    if not found:
        return plans.first_fitting(np.argsort(values, kind="stable").tolist(), 0)[0]
    if objective == "memory" or not TOLERANCE[objective]:
        return found[0]
    return next((row for row in found if plans.allocator_holds(row)), found[0])


def best_of_each_kind(priced: Priced, order: Ints) -> list[int]:
    """Return the first row in `order` of each choice of axes and ZeRO stage."""
    ordered = priced.table.select(order)
    firsts, _ = kinds_of(lambda name: np.asarray(getattr(ordered, name)))
    return [int(row) for row in order[np.sort(firsts)]]
