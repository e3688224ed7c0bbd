"""Priced plans as a table, with estimates stage by stage where these are asked for, and what ranks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from paraplan.cost.blocks.matmuls import counted_peak
from paraplan.cost.estimate import PlanEstimate, allocator_holds, estimate_plan
from paraplan.cost.plan_table import Floats, Ints, Mask, PlanTable
from paraplan.cost.workload import Workload
from paraplan.search.evaluation import Priced
from paraplan.search.results import (
    TOLERANCE,
    Baseline,
    Candidate,
    Objective,
    complexity,
    faults,
    rank,
)
from paraplan.search.tree import TreeAnswer, family

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
        """Bytes that each of the priced plans may allocate."""
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
            mfu=flops_per_s
            / counted_peak(workload.cluster.gpu, training, uses_tf32=workload.framework.kernels.uses_tf32),
            peak_memory_bytes=round(float(self.priced.peak_bytes[row])),
            baseline=baseline,
        )


def worth(offload: Ints, memory_share: Floats) -> Floats:
    """Return by what a plan's time counts for its faults."""
    return 1 + faults(offload, memory_share)


def has_other_stages(workload: Workload, table: PlanTable) -> Mask:
    """Return which plans have stages that the survey did not price, and that may be unlike those that it did."""
    is_unlike = (table.split > 0) | (len(workload.model.runs) > 1)
    return np.asarray((table.pp > _STAGES_PRICED) & is_unlike)


def complexities(workload: Workload, column: Callable[[str], Ints]) -> Ints:
    """Return how complex each plan is, by its columns."""
    by_default = workload.framework.kernels.recomputes_ops_by_default
    return complexity(column, seq_length=workload.training.seq_length, ops_by_default=by_default)
