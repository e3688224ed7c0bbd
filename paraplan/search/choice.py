"""The choice among evaluated plans: the one to use, and those to set beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np

from paraplan.cost.estimate import PlanEstimate, estimate_plan, why_unsuitable
from paraplan.cost.loading import can_load
from paraplan.cost.plan_table import Ints, Mask, RecomputeCode
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan
from paraplan.search.evaluated_plans import EvaluatedPlans, complexities, worth
from paraplan.search.evaluation import Priced, Survey, kinds_of
from paraplan.search.known_runs import is_known
from paraplan.search.reasons import Reason
from paraplan.search.results import (
    RANGE,
    ROOMY,
    SPARE,
    TOLERANCE,
    USUAL_VIRTUAL,
    Baseline,
    Candidate,
    Objective,
    rank,
)
from paraplan.search.selection import MUCH_ROOM, TRIED, Selection, is_data_parallel, is_small_rig
from paraplan.search.space import PlanSpace
from paraplan.search.tree import family
from paraplan.units import format_seconds

PLAIN: tuple[tuple[Baseline, Literal[0, 3]], ...] = (("FSDP", 3), ("DDP", 0))
"""The plans that everybody knows, by their ZeRO stage: all GPUs along dp, and nothing offloaded."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The plan to use among the priced ones, and those to set beside it.

    `rows` are the best of each kind, ranked; `guide` is the fastest plan of the families that the guide names, if any
    fits.
    """

    plans: EvaluatedPlans
    objective: Objective
    rows: list[int]
    selection: Selection
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
        return cls(plans, objective, rows, Selection.of(plans, objective), named[0] if named else None)

    @property
    def row(self) -> int:
        """The row of the plan to use."""
        return self.selection.row

    @property
    def best(self) -> PlanEstimate:
        """The plan to use."""
        return self.plans.estimate(self.row)

    @property
    def loads(self) -> bool:
        """Whether that can be loaded by the framework's way."""
        return self.selection.loads(self.row)

    @property
    def second(self) -> tuple[PlanEstimate | None, Reason | None]:
        """The best of another kind, and why the plan to use is chosen over it."""
        row = next((row for row in self.rows if row != self.row), None)
        return (None, None) if row is None else (self.plans.estimate(row), self.selection.reason(row))

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
        loads = can_load(plans.workload, partial(getattr, priced.table))
        rows = np.flatnonzero(loads & (priced.table.offload == 0) & (priced.peak_bytes <= most))
        for row in rows[np.argsort(priced.seconds[rows], kind="stable")][:TRIED]:
            if plans.estimate(int(row)).peak_memory_bytes <= most:
                return plans.estimate(int(row))
        return None

    @cached_property
    def reason(self) -> Reason | None:
        """Why the plan to use is chosen over the first of the list, None where that is it."""
        first, priced = self.rows[0], self.plans.priced
        values = priced.peak_bytes if self.objective == "memory" else priced.seconds
        if values[first] >= values[self.row] or priced.plan(first).describe() == priced.plan(self.row).describe():
            return None
        return self.selection.reason(first)

    @cached_property
    def guide_reason(self) -> Reason | None:
        """Why it is chosen over the guide's plan."""
        return None if self.guide is None or self.guide_row is None else self.selection.reason(self.guide_row)

    @cached_property
    def plain_reason(self) -> Reason | None:
        """Why it is chosen over plain DDP or FSDP where these come first, and neither speed nor `reason` says it."""
        if not is_small_rig(self.plans.workload):
            return None
        seconds = self.plans.priced.seconds
        plain = [row for row, name in self._baselines().items() if name != "guide"]
        reasons = [self.selection.reason(row) for row in sorted(plain, key=lambda each: float(seconds[each]))]
        told = {one.over for one in (self.reason, self.guide_reason) if one is not None} | {self.best.plan.describe()}
        return next((one for one in reasons if one.cause not in ("faster", "memory") and one.over not in told), None)

    @property
    def remark(self) -> str | None:
        """Return why the plan to use is chosen over the first of the list, and what the guide would choose."""
        sentences = [self.reason.in_words if self.reason is not None else None]
        guide = self.guide_reason
        if guide is not None and self.reason is not None and guide.over == self.reason.over:
            sentences.append("Hugging Face's guide would choose that one too")
        elif guide is not None:
            why = "" if guide.cause in ("faster", "memory") else f": this one is chosen because {guide.because}"
            sentences.append(f"Hugging Face's guide would choose {guide.over}, predicted {guide.comparison}{why}")
        if not self.selection.is_known[self.row]:
            ranks = self.plans.workload.cluster.num_gpus
            known = self._fastest_known
            words = f"no public run of a mixture under such a plan on about {ranks} GPUs is known"
            sentences.append(words if known is None else f"{words}, and of kinds that were run {known} is fastest")
        return "; ".join(filter(None, sentences)) or None

    @property
    def _fastest_known(self) -> str | None:
        """The fastest plan that fits of a kind that somebody ran, with its step time; None where none was priced."""
        seconds = self.plans.priced.seconds
        rows = np.flatnonzero(self.selection.is_known & np.isfinite(seconds))
        rows = rows[np.argsort(seconds[rows], kind="stable")][:TRIED]
        found = (self.plans.estimate(int(row)) for row in rows)
        best = next((one for one in found if one.fits), None)
        return None if best is None else f"{best.plan.describe()}, {format_seconds(best.step.step_time_s)} a step,"

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


def price_the_choice(survey: Survey, objective: Objective, is_named: Callable[[ParallelPlan], bool]) -> None:
    """Price what the choice looks at beside the best of each kind: simpler plans, baselines, the guide's families."""
    plans = survey.plans
    for _, stage in PLAIN:
        survey.find(is_plain(survey.workload, plans.column, stage))
    firsts, kind = plans.kinds
    examples = plans.table(firsts)
    named = np.array([is_named(plan) for plan in examples.plans()])
    survey.find(named[kind])
    loads = can_load(survey.workload, plans.column)
    if not loads.all():
        survey.find(loads)
    if objective == "memory":
        return
    for share in (ROOMY, 1 - SPARE, MUCH_ROOM):
        survey.find(plans.column("offload") == 0, at_most_s=2 * _surest_s(survey), most_share=share)
    survey.find(is_data_parallel(plans.column), at_most_s=(1 + RANGE) * _surest_s(survey), most_share=ROOMY)
    survey.find(is_data_parallel(plans.column), at_most_s=(1 + RANGE) * _surest_s(survey), most_share=1 - SPARE)
    if is_small_rig(survey.workload):
        offloading = is_data_parallel(plans.column, offloads=True) & (plans.column("offload") != 0)
        survey.find(offloading, at_most_s=(1 + RANGE) * _surest_s(survey), most_share=1 - SPARE)
    for most in (1,) * is_small_rig(survey.workload) + (USUAL_VIRTUAL,):
        for share in (ROOMY, 1 - SPARE):
            among = plans.column("virtual") <= most
            survey.find(among, at_most_s=(1 + RANGE) * _surest_s(survey), most_share=share)
    known = is_known(survey.workload, plans.column)
    if not known.all():
        for share in (ROOMY, 1 - SPARE, MUCH_ROOM):
            survey.find(known, at_most_s=2 * _surest_s(survey), most_share=share)
    levels = complexities(survey.workload, plans.column)
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


def best_of_each_kind(priced: Priced, order: Ints) -> list[int]:
    """Return the first row in `order` of each choice of axes and ZeRO stage."""
    ordered = priced.table.select(order)
    firsts, _ = kinds_of(lambda name: np.asarray(getattr(ordered, name)))
    return [int(row) for row in order[np.sort(firsts)]]
