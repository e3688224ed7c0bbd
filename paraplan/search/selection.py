"""The plan that is chosen among evaluated ones, and the cause that decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.loading import can_load
from paraplan.cost.plan_table import Floats, Ints, Mask
from paraplan.cost.workload import Workload
from paraplan.search.evaluated_plans import EvaluatedPlans, complexities
from paraplan.search.known_runs import is_known
from paraplan.search.reasons import Cause, Reason, allocator_words, memory_words, offload_words
from paraplan.search.results import (
    RANGE,
    ROOMY,
    SMALL_RIG,
    TOLERANCE,
    USUAL_VIRTUAL,
    Objective,
)

_LOADING: tuple[Cause, str] = ("loading", "that one cannot be loaded by the framework's way")
TRIED = 15
"""Number of simplest plans that are tried for one that leaves the allocator room."""
MUCH_ROOM = 0.8
"""Share of the usable memory with which torch's allocator has room as a rule."""
NO_ROOM = 2.0
"""Times as long a plan may take that leaves it room, as one that leaves memory to spare (`results.faults`)."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The plan that is chosen, and what decided it: whatever says why asks here."""

    plans: EvaluatedPlans
    objective: Objective
    row: int
    levels: Ints
    """How complex each plan is."""
    values: Floats
    """Values that the choice compares: time with what a plan's faults are worth, or memory."""
    most: float
    """The most of that within the tolerance."""
    is_known: Mask
    """Which plans are of a kind that somebody ran at such a scale."""
    kept: Mask
    """The plans that were left to choose from: of known kinds, and data parallelism alone, where these are near."""
    passed_over: frozenset[int]
    """Simpler plans for which torch's allocator has no room."""
    widest: float = np.inf
    """The value of what was selected of all plans, where this one is of a kind that comes first within `RANGE`."""

    @classmethod
    def of(cls, plans: EvaluatedPlans, objective: Objective) -> Selection:
        """Return the simplest plan within the tolerance of the best, of equally simple ones the best.

        Plans that cannot be loaded are left out where others can, and none is simple that nobody ran at that scale.

        Where what is selected of the framework's known runs is within `RANGE` of that, or small rigs' plain
        data parallelism, or else their pipelines without virtual stages, or with a usual number of them, it is taken.
        One for which torch's allocator has to give back what it keeps is taken where no other is within twice its time.
        """
        columns = partial(getattr, plans.priced.table)
        narrow = [is_known(plans.workload, columns)]
        if is_small_rig(plans.workload):
            narrow.append(is_data_parallel(columns))
        loads = can_load(plans.workload, columns)
        selection = cls._among(plans, objective, narrow[0], loads if loads.any() else ~loads)
        if objective == "memory" or not TOLERANCE[objective]:
            return selection
        if is_small_rig(plans.workload) and columns("offload")[selection.row]:  # nothing without it is near
            narrow.append(is_data_parallel(columns, offloads=True))
        for wanted in narrow:
            kept = selection.kept & wanted
            narrower = cls._among(plans, objective, narrow[0], kept) if kept.any() else selection
            has_room = plans.allocator_holds(narrower.row) or not plans.allocator_holds(selection.row)
            if kept[narrower.row] and has_room and narrower.value <= (1 + RANGE) * selection.value:
                selection = replace(narrower, widest=min(selection.widest, selection.value))
        few = [columns("virtual") == 1] * is_small_rig(plans.workload) + [columns("virtual") <= USUAL_VIRTUAL]
        fastest = min(selection.value, selection.most / (1 + TOLERANCE[objective]))
        for wanted in few:
            kept = selection.kept & wanted
            fewer = cls._among(plans, objective, narrow[0], kept) if kept.any() else selection
            if kept[fewer.row] and fewer.value <= (1 + RANGE) * fastest:
                return replace(fewer, widest=fastest)
        return selection

    @classmethod
    def _among(cls, plans: EvaluatedPlans, objective: Objective, known: Mask, kept: Mask) -> Selection:
        """Return the selection from the plans that are kept, or the best of all where none of these fits."""
        levels = complexities(plans.workload, partial(getattr, plans.priced.table))
        levels = np.where(known, levels, levels.max() + 1)  # nobody knows what is simple about them
        left = np.where(kept, plans.settled(objective), np.inf)
        most = (1 + TOLERANCE[objective]) * left.min()
        order = np.lexsort((left, levels))
        found = plans.first_fitting(order[left[order] <= most].tolist(), TRIED)
        values = plans.values(objective)  # of all stages now
        left = np.where(kept, values, np.inf)
        found = [row for row in found if values[row] <= most]
        passed = set[int]()
        if not found:
            row = plans.first_fitting(np.argsort(left, kind="stable").tolist(), 0)[0]
        elif objective == "memory" or not TOLERANCE[objective]:
            row = found[0]
        else:
            row = _with_room(plans, found, left, passed)
        return cls(plans, objective, row, levels, values, float(most), known, kept, frozenset(passed))

    def reason(self, other: int) -> Reason:
        """Return the cause that decided for the plan that is chosen, against another row."""
        plans, row, by_memory = self.plans, self.row, self.objective == "memory"
        own, others = plans.estimate(row), plans.estimate(other)
        if by_memory:
            gain = own.peak_memory_bytes / others.peak_memory_bytes - 1
        else:
            gain = own.step.step_time_s / others.step.step_time_s - 1
        if self.loads(row) and not self.loads(other):
            cause, because = _LOADING
        else:
            cause, because = self._cause(other, own, others, gain)
        return Reason(cause=cause, over=others.plan.describe(), gain=gain, because=because, by_memory=by_memory)

    def loads(self, row: int) -> bool:
        """Return whether a plan can be loaded by the framework's way."""
        return bool(can_load(self.plans.workload, partial(getattr, self.plans.priced.table.select(np.array([row]))))[0])

    def _cause(self, other: int, own: PlanEstimate, others: PlanEstimate, gain: float) -> tuple[Cause, str]:
        row, share = self.row, others.peak_memory_bytes / others.usable_memory_bytes
        own_share = own.peak_memory_bytes / own.usable_memory_bytes
        if gain <= 0:
            plain = None if self.objective == "memory" else self._cause_against_plain(other, others, gain)
            faster: tuple[Cause, str] = ("faster", "it is faster")
            return ("memory", "it needs less memory") if self.objective == "memory" else plain or faster
        left_out = None if self.kept[other] else self._cause_left_out(other, gain)
        if left_out is not None:
            return left_out
        is_first = (self.levels[other], self.values[other]) < (self.levels[row], self.values[row])
        beyond = self.values[other] > self.most
        if self.objective != "memory" and (other in self.passed_over or (is_first and not beyond)):
            gpu = self.plans.workload.cluster.gpu_memory_bytes
            if not self.plans.allocator_holds(other):
                return "allocator", allocator_words(others, gpu)
        has_faults = beyond or gain > TOLERANCE[self.objective]
        if self.objective != "memory" and (has_faults or self.levels[row] >= self.levels[other]):
            if share > ROOMY and own_share < share:
                return "risk", memory_words(others)
            if others.plan.offload != "none" and own.plan.offload != others.plan.offload:
                return "offload", offload_words(others)
            if not self.plans.allocator_holds(other):
                return "allocator", allocator_words(others, self.plans.workload.cluster.gpu_memory_bytes)
        if self.levels[row] < self.levels[other]:
            error = "nearly equal" if self.objective == "memory" else f"{self._tolerance} is within the error"
            return "simplicity", f"it is simpler ({error})"
        return "error", f"{self._tolerance} is within the error"

    def _cause_against_plain(self, other: int, others: PlanEstimate, gain: float) -> tuple[Cause, str] | None:
        """Return why data parallelism that would come first, as it is near enough, does not; None where it is not."""
        spreads_data = is_data_parallel(partial(getattr, self.plans.priced.table))
        comes_first = is_small_rig(self.plans.workload) and spreads_data[other] and not spreads_data[self.row]
        if not comes_first or (1 + RANGE) * (1 + gain) < 1:
            return None
        if not self.plans.allocator_holds(other):
            return "allocator", allocator_words(others, self.plans.workload.cluster.gpu_memory_bytes)
        nearly_full = others.peak_memory_bytes > ROOMY * others.usable_memory_bytes
        return ("risk", memory_words(others)) if nearly_full else None

    def _cause_left_out(self, other: int, gain: float) -> tuple[Cause, str] | None:
        """Return why a plan was left out of the choice, None where its own faults say it."""
        row = self.row
        if self.is_known[row] and not self.is_known[other]:
            return "unknown", "no public run of a mixture under such a plan at that scale is known"
        if gain <= TOLERANCE[self.objective] and self.levels[row] < self.levels[other]:
            return "simplicity", f"it is simpler ({self._tolerance} is within the error)"
        virtual = self.plans.priced.table.virtual
        spreads_data = is_data_parallel(partial(getattr, self.plans.priced.table))[row]
        is_near = self.values[other] < self.widest and self.value <= (1 + RANGE) * self.widest
        if gain > RANGE and not (spreads_data and is_near):
            return None
        if virtual[other] > virtual[row] and not spreads_data:
            fewer = "fewer" if self.plans.priced.table.pp[row] > 1 else "plans without a pipeline"
            return "range", f"{virtual[other]} stages on each GPU do not gain more than {RANGE:.0%} over {fewer}"
        words = "up to 8 GPUs of one node" if self.plans.workload.training.trainable.adapter is None else "adapters"
        if gain > RANGE:  # what that is compared with takes longer itself, by less than the error
            near = f"the simplest plan within {TOLERANCE[self.objective]:.0%} of it"
            return "range", f"data parallelism alone, which comes first for {words}, is within {RANGE:.0%} of {near}"
        return "range", f"data parallelism alone is within {RANGE:.0%} of it, which comes first for {words}"

    @property
    def value(self) -> float:
        """Value of the chosen plan that the choice compared."""
        return float(self.values[self.row])

    @property
    def _tolerance(self) -> str:
        return f"a difference under {TOLERANCE[self.objective]:.0%}"


def is_small_rig(workload: Workload) -> bool:
    """Return whether data parallelism comes first: for adapters, and up to 8 GPUs of one node."""
    cluster = workload.cluster
    return workload.training.trainable.adapter is not None or (cluster.num_nodes == 1 and cluster.num_gpus <= SMALL_RIG)


def _with_room(plans: EvaluatedPlans, found: list[int], values: Floats, passed: set[int]) -> int:
    """Return the first plan that torch's allocator has room for: of `found`, else of all up to `NO_ROOM` times as slow.

    Those without room on the way go into `passed`.
    """
    by_value = np.argsort(values, kind="stable")
    rest = [int(row) for row in by_value[values[by_value] <= NO_ROOM * values[found[0]]]]
    roomy = [row for row in rest if plans.priced.peak_bytes[row] <= MUCH_ROOM * plans.usable[row]]
    for row in (*found, *rest[:TRIED], *roomy[:TRIED]):
        if plans.estimate(row).fits and plans.allocator_holds(row):
            return row
        passed.add(row)
    return found[0]


def is_data_parallel(column: Callable[[str], Ints], *, offloads: bool = False) -> Mask:
    """Return which plans spread data alone, with or without shards, and offload nothing, unless it `offloads`."""
    axes = [column(name) == 1 for name in ("tp", "pp", "cp", "ep")]
    nothing = ("shards",) if offloads else ("offload", "shards")
    return np.asarray(np.logical_and.reduce([*axes, *(column(name) == 0 for name in nothing)]))
