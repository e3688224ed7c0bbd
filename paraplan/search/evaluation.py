"""The evaluation of a whole space: memory of every plan, the time of those that fit and may be among the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts, block_costs
from paraplan.cost.estimate import fits, peak_memory, step_times
from paraplan.cost.memory.peak import host_bytes
from paraplan.cost.memory.rank import RankMemory
from paraplan.cost.pipeline.stages import even_stage, fullest_ranks, running_parameters
from paraplan.cost.plan_table import COLUMNS, Floats, Ints, Mask, OffloadCode, PlanTable, first_rows
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import AXES, ParallelPlan
from paraplan.search.lower_bound import least_step_s
from paraplan.search.results import Rejection
from paraplan.search.space import PlanSpace
from paraplan.units import format_bytes, format_bytes_apart

SLACK = 1.02
"""Kinds up to this factor slower than the last one shown are priced too: prices of all stages may change the order."""

_ROUNDING = 1 + 1e-9
_FIRST_ROWS = 64
_MOST_ROWS = 16_000
"""Plans whose time is priced at once."""


@dataclass(frozen=True, eq=False)
class Priced:
    """Plans with their prices."""

    table: PlanTable
    seconds: Floats
    peak_bytes: Floats

    def __len__(self) -> int:
        return len(self.table)

    def select(self, rows: Ints) -> Priced:
        """Return some of the plans."""
        return Priced(self.table.select(rows), self.seconds[rows], self.peak_bytes[rows])

    def plan(self, row: int) -> ParallelPlan:
        """Return one plan as a record."""
        return self.table.plan(row)


@dataclass
class Fitting:
    """The plans that fit, in little memory: columns of 32 bits, the peak, the least time, and the product of axes."""

    columns: list[Ints] = field(default_factory=list)
    peaks: list[Floats] = field(default_factory=list)
    least: list[Floats] = field(default_factory=list)
    degrees: list[Ints] = field(default_factory=list)
    splits: Ints | None = None

    def add(self, table: PlanTable, peak: Floats, least_s: Floats, degrees: Ints) -> None:
        """Keep the plans of a table."""
        self.columns.append(np.stack([getattr(table, name) for name in COLUMNS]).astype(np.int32))
        self.peaks.append(peak)
        self.least.append(least_s)
        self.degrees.append(degrees.astype(np.int32))
        if self.splits is None or len(table.splits) > len(self.splits):
            self.splits = table.splits

    def together(self) -> FittingPlans:
        """Return all plans as arrays."""
        assert self.splits is not None
        return FittingPlans(
            np.concatenate(self.columns, axis=1),
            np.concatenate(self.peaks),
            np.concatenate(self.least),
            np.concatenate(self.degrees),
            self.splits,
        )


@dataclass(frozen=True, eq=False)
class FittingPlans:
    """The plans that fit, as columns."""

    columns: Ints
    peak_bytes: Floats
    least_s: Floats
    degrees: Ints
    splits: Ints

    def table(self, rows: Ints) -> PlanTable:
        """Return some of them as a table."""
        return PlanTable.of_columns(self.columns[:, rows].astype(np.int64)).with_splits(self.splits)

    def column(self, name: str) -> Ints:
        """Return one column of all."""
        return np.asarray(self.columns[COLUMNS.index(name)])


@dataclass
class TooLarge:
    """The plans that do not fit: how many, how much they need, and the one that comes nearest.

    `num_beyond_host` more fit the GPUs, but offload more than a node holds; `beyond_host` is the first of them.
    """

    count: int = 0
    least_bytes: float = float("inf")
    most_bytes: float = 0.0
    nearest: ParallelPlan | None = None
    num_beyond_host: int = 0
    beyond_host: ParallelPlan | None = None

    def add(self, table: PlanTable, peaks: Floats, weights: Ints) -> None:
        """Count the plans of a table, each as often as `weights` says."""
        if not len(table):
            return
        self.count += int(weights.sum())
        self.most_bytes = max(self.most_bytes, float(peaks.max()))
        if float(peaks.min()) < self.least_bytes:
            self.least_bytes = float(peaks.min())
            self.nearest = table.plan(int(np.argmin(peaks)))

    def describe(self, usable_bytes: int) -> str:
        """Return the reason in words."""
        least, usable = format_bytes_apart(self.least_bytes, usable_bytes)
        most = format_bytes(self.most_bytes)
        needed = least if format_bytes(self.least_bytes) == most else f"{least} to {most}"
        return f"need {needed} of {usable} usable"


@dataclass
class MemorySurvey:
    """The first half of a survey: which plans of a space fit."""

    space: PlanSpace
    fitting: Fitting = field(default_factory=Fitting)
    too_large: TooLarge = field(default_factory=TooLarge)
    rejected: Counter[str] = field(default_factory=Counter)
    num_priced: int = 0

    @classmethod
    def of(cls, workload: Workload, space: PlanSpace) -> MemorySurvey:
        """Price the memory of every plan of `space`."""
        survey = cls(space)
        for chunk in space.chunks():
            table, weights = chunk.table, np.array(space.variants)[chunk.degrees]
            survey.num_priced += int(weights.sum())
            costs = block_costs(workload, table)
            peak = peak_memory(workload, table, costs)
            fitting = fits(workload, peak)
            survey.too_large.add(table.select(~fitting), peak[~fitting], weights[~fitting])
            on_host = np.zeros_like(fitting)
            on_host[fitting] = exceeds_host(workload, table.select(fitting), costs.select(fitting))
            if on_host.any():
                total = format_bytes(workload.cluster.host_memory_bytes)
                survey.rejected[f"offload needs more than the {total} of a node"] += int(weights[on_host].sum())
                survey.too_large.num_beyond_host += int(weights[on_host].sum())
                survey.too_large.beyond_host = survey.too_large.beyond_host or table.plan(int(np.argmax(on_host)))
                fitting &= ~on_host
            if fitting.any():
                left = table.select(fitting)
                least_s = least_step_s(workload, left, costs.select(fitting))
                survey.fitting.add(left, peak[fitting], least_s, chunk.degrees[fitting])
        survey.rejected.update(space.rejected)
        if survey.too_large.count:
            survey.rejected[survey.too_large.describe(workload.usable_memory_bytes)] += survey.too_large.count
        return survey

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Return why plans were left out, the most frequent reason first."""
        return tuple(Rejection(reason=reason, count=count) for reason, count in self.rejected.most_common())


def exceeds_host(workload: Workload, table: PlanTable, costs: BlockCosts | None = None) -> Mask:
    """Return which plans offload more than a node's memory holds."""
    offloads = np.flatnonzero(table.offload != OffloadCode.NONE)
    exceeds = np.zeros(len(table), dtype=bool)
    limit = workload.cluster.host_memory_bytes
    if limit is None or not len(offloads):
        return exceeds
    part, model = table.select(offloads), workload.model
    costs = costs.select(offloads) if costs else block_costs(workload, part)
    ranks = np.minimum(workload.cluster.num_gpus, workload.cluster.gpus_per_node)
    for rank in (np.zeros_like(part.pp), fullest_ranks(part, running_parameters(model)), part.pp - 1):
        stage = even_stage(part, model.num_blocks, rank, are_alike=len(model.runs) == 1)
        exceeds[offloads] |= ranks * host_bytes(RankMemory.of(workload, part, costs, stage)) > limit
    return exceeds


def kinds_of(table_like: Callable[[str], Ints]) -> tuple[Ints, Ints]:
    """Return the first row of each choice of axes and ZeRO stage, and the choice of each row."""
    return first_rows(*(table_like(name).astype(np.int64) for name in (*(axis.name for axis in AXES), "zero_stage")))


@dataclass
class TimeSurvey:
    """The second half: the time of plans that may be among the best, those with the least time first.

    `run` leaves out a plan whose least time is above the best time of its kind (axes and ZeRO stage), or above that of
    the `num_kinds`-th best kind. With `fronts`, plans stay that may be faster than all that need as little memory. With
    `smallest_first` memory takes the place of time. `find` prices the fastest plans of some other choice.
    """

    workload: Workload
    orders: list[list[int]]
    plans: FittingPlans
    num_kinds: int
    smallest_first: bool = False
    fronts: bool = False
    found: list[Priced] = field(default_factory=list)
    num_priced: int = 0

    def __post_init__(self) -> None:
        self._seconds = np.full(len(self.plans.least_s), np.inf)

    def run(self) -> None:
        """Price the plans that may be among the best of their kind, and their kind among the best."""
        plans = self.plans
        firsts, kind = kinds_of(plans.column)
        best = np.full(len(firsts), np.inf)
        waiting = np.argsort(plans.peak_bytes if self.smallest_first else plans.least_s, kind="stable")
        # The most promising plans of the most promising kinds come first: they say what the others have to beat.
        promising = np.sort(first_rows(kind[waiting])[0])
        is_first = np.zeros(len(waiting), dtype=bool)
        is_first[promising[: self.num_kinds]] = True
        waiting = np.concatenate([waiting[is_first], waiting[~is_first]])
        size = int(is_first.sum())
        while len(waiting):
            batch, waiting = waiting[:size], waiting[size:]
            priced, rows = self._price(batch)
            np.minimum.at(best, kind[rows], priced.peak_bytes if self.smallest_first else priced.seconds)
            waiting = waiting[self._may_matter(waiting, kind, best)]
            size = min(4 * size, _MOST_ROWS)

    def find(self, among: Mask, *, at_most_s: float = np.inf) -> float:
        """Price plans until the fastest of `among` is known, if it takes at most `at_most_s`; return its seconds."""
        best = float(self._seconds[among].min(initial=np.inf))
        rows = np.flatnonzero(among & np.isinf(self._seconds) & (self.plans.least_s < min(best, at_most_s)))
        rows = rows[np.argsort(self.plans.least_s[rows], kind="stable")]
        size = _FIRST_ROWS
        while len(rows):
            batch, rows = rows[:size], rows[size:]
            self._price(batch)
            best = min(best, float(self._seconds[batch].min()))
            rows = rows[self.plans.least_s[rows] < min(best, at_most_s)]
            size = min(4 * size, _MOST_ROWS)
        return best

    @property
    def fastest_s(self) -> float:
        """The least time of all that was priced."""
        return float(self._seconds.min())

    def priced(self) -> Priced:
        """Return all plans that were priced."""
        return Priced(
            PlanTable.concatenate([each.table for each in self.found]),
            np.concatenate([each.seconds for each in self.found]),
            np.concatenate([each.peak_bytes for each in self.found]),
        )

    def _may_matter(self, rows: Ints, kind: Ints, best: Floats) -> Mask:
        known = np.sort(best)
        limit = known[min(self.num_kinds, len(known)) - 1] * SLACK
        # Of a kind only the best plan is shown, so that nothing has to be close to it.
        limits = np.minimum(best * _ROUNDING, limit)
        least = (self.plans.peak_bytes if self.smallest_first else self.plans.least_s)[rows]
        matters = least <= limits[kind[rows]]
        if self.fronts:
            matters |= self.plans.least_s[rows] < self._front_s(self.plans.peak_bytes[rows])
        return np.asarray(matters)

    def _front_s(self, peak_bytes: Floats) -> Floats:
        """Return the best time so far of plans that need no more memory."""
        peaks = np.concatenate([each.peak_bytes for each in self.found])
        seconds = np.concatenate([each.seconds for each in self.found])
        order = np.argsort(peaks, kind="stable")
        fastest = np.concatenate([[np.inf], np.minimum.accumulate(seconds[order])])
        return np.asarray(fastest[np.searchsorted(peaks[order], peak_bytes, side="right")])

    def _price(self, rows: Ints) -> tuple[Priced, Ints]:
        """Price some plans under each order of ranks that is worth it; return the prices and the row of each."""
        orders = [self.orders[number] for number in self.plans.degrees[rows]]
        rows = np.repeat(rows, [len(each) for each in orders])
        table = self.plans.table(rows).with_orders(np.array([number for each in orders for number in each]))
        seconds = step_times(self.workload, table).step_time_s
        np.minimum.at(self._seconds, rows, seconds)
        priced = Priced(table, seconds, self.plans.peak_bytes[rows])
        self.found.append(priced)
        self.num_priced += len(priced)
        return priced, rows


NOTICEABLE = 0.99
"""A plan joins the front where it takes less than this share of the memory of the one before it."""


_CELLS = 16
"""A picture is divided into so many cells each way."""


def pareto_front(priced: Priced) -> list[int]:
    """Return the rows of the front, the fastest first: each next one is slower and needs less memory, noticeably so."""
    rows: list[int] = []
    for row in np.lexsort((priced.peak_bytes, priced.seconds)):
        if not rows or priced.peak_bytes[row] < NOTICEABLE * priced.peak_bytes[rows[-1]]:
            rows.append(int(row))
    return rows


def spread(priced: Priced) -> list[int]:
    """Return the rows of plans that show how all of them lie: of each cell of time and memory the fastest plan."""
    time, memory = np.log(priced.seconds), np.log(np.maximum(priced.peak_bytes, 1.0))
    cell = _cell(time) * _CELLS + _cell(memory)
    order = np.argsort(priced.seconds, kind="stable")
    _, firsts = np.unique(cell[order], return_index=True)
    return [int(row) for row in order[np.sort(firsts)]]


def _cell(values: Floats) -> Ints:
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / max(high - low, 1e-12) * _CELLS
    return np.minimum(scaled.astype(np.int64), _CELLS - 1)
