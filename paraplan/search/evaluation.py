"""The evaluation of a whole space: memory of every plan, the time of those that fit and may be among the best."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts, block_costs
from paraplan.cost.estimate import fits, peak_memory, step_times
from paraplan.cost.memory.peak import host_bytes
from paraplan.cost.memory.rank import RankMemory
from paraplan.cost.pipeline.stages import even_stage, fullest_ranks, running_parameters
from paraplan.cost.plan_table import COLUMNS, Floats, Ints, Mask, OffloadCode, PlanTable, first_rows
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import AXES, ParallelPlan
from paraplan.progress import is_stopped, say
from paraplan.search.lower_bound import least_step_s
from paraplan.search.results import Rejection
from paraplan.search.space import CHUNK_ROWS, PlanSpace
from paraplan.units import format_bytes, format_seconds

SLACK = 1.02
"""Kinds up to this factor slower than the last one shown are priced too: prices of all stages may change the order."""

_AXES = tuple(axis.name for axis in AXES)
_ROUNDING = 1 + 1e-9
_MOST_ROWS = 16_000
"""Plans whose time is priced at once."""
_FEW_ROWS = 1000
"""Up to so many plans, what a table costs is what the calls on its columns do, however many plans or chunks."""
_SORTED_ROWS = 4 * _MOST_ROWS


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


@dataclass(frozen=True, eq=False)
class Plans:
    """The plans of a space in little memory: what each chooses, its least time, and its product of axes."""

    choices: dict[str, Ints]
    """Columns of a table that a product of axes leaves open, each in as few bits as do."""
    least_s: Floats
    degrees: Ints
    axes: dict[str, Ints]
    """The columns of a table that a product of axes says, one row for each product."""
    splits: Ints
    orders: list[list[int]]
    """Orders of ranks that are worth pricing, by product of axes."""
    variants: Ints
    """Number of orders of ranks, by product of axes."""

    @classmethod
    def of(cls, workload: Workload, space: PlanSpace) -> Plans:
        """Read all of a space."""
        choices: dict[str, list[Ints]] = {name: [np.zeros(0, np.uint8)] for name in COLUMNS if name not in _AXES}
        degrees, least = list[Ints](), list[Floats]()
        splits = np.zeros((1, 1), dtype=np.int64)
        for chunk in space.chunks():
            say(f"counting plans, {sum(len(each) for each in least):,} so far (Ctrl-C: the best of these)")
            for name, found in choices.items():
                values = getattr(chunk.table, name)
                found.append(values.astype(np.min_scalar_type(values.max(initial=0))))
            least.append(least_step_s(workload, chunk.table))
            degrees.append(chunk.degrees.astype(np.int32))
            splits = chunk.table.splits  # later chunks have those of the earlier ones too
            if is_stopped():
                break
        return cls(
            {name: np.concatenate(found) for name, found in choices.items()},
            np.concatenate([np.zeros(0), *least]),
            np.concatenate([np.zeros(0, np.int32), *degrees]),
            {name: np.array([getattr(each, name) for each in space.degrees], dtype=np.int64) for name in _AXES},
            splits,
            space.orders,
            np.array(space.variants, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.least_s)

    def table(self, rows: Ints) -> PlanTable:
        """Return some of them as a table."""
        degrees = self.degrees[rows]
        columns = {name: values[degrees] for name, values in self.axes.items()}
        columns |= {name: values[rows].astype(np.int64) for name, values in self.choices.items()}
        return PlanTable(**columns, splits=self.splits)

    def column(self, name: str) -> Ints:
        """Return one column of all."""
        return self.axes[name][self.degrees] if name in self.axes else self.choices[name]

    @cached_property
    def kinds(self) -> tuple[Ints, Ints]:
        """The first plan of each choice of axes and ZeRO stage, and the choice of each plan."""
        return first_rows(self.degrees.astype(np.int64), self.column("zero_stage").astype(np.int64))


@dataclass
class TooLarge:
    """The plans that do not fit: how many, how much the nearest lacks, and the nearest.

    `num_beyond_host` more fit the GPUs, but offload more than a node holds; `beyond_host` is the first of them.
    """

    count: int = 0
    least_lacking_bytes: float = float("inf")
    nearest: ParallelPlan | None = None
    num_beyond_host: int = 0
    beyond_host: ParallelPlan | None = None
    _first_row: int = sys.maxsize

    def add(self, table: PlanTable, lacking_bytes: Floats, weights: Ints) -> None:
        """Count the plans of a table, each as often as `weights` says."""
        if not len(table):
            return
        self.count += int(weights.sum())
        if float(lacking_bytes.min()) < self.least_lacking_bytes:
            self.least_lacking_bytes = float(lacking_bytes.min())
            self.nearest = table.plan(int(np.argmin(lacking_bytes)))

    def add_beyond_host(self, table: PlanTable, rows: Ints, weights: Ints) -> None:
        """Count plans that fit the GPUs alone, and remember the first of them in the order of the space."""
        self.num_beyond_host += int(weights.sum())
        if len(rows) and rows.min() < self._first_row:
            self._first_row = int(rows.min())
            self.beyond_host = table.plan(int(np.argmin(rows)))


def memory_of(workload: Workload, table: PlanTable) -> tuple[Floats, Mask, Mask]:
    """Return the peak bytes of each plan, which plans fit a GPU, and which of these need more of the host than it has.

    Plans with many virtual stages are priced apart: the others would pay for their chunks.
    """
    peaks, fitting, beyond = np.zeros(len(table)), np.zeros(len(table), dtype=bool), np.zeros(len(table), dtype=bool)
    for rows in _alike(workload, table):
        part = table.select(rows)
        costs = block_costs(workload, part)
        peaks[rows] = peak_memory(workload, part, costs)
        fitting[rows] = fits(workload, part, peaks[rows])
        inside = np.flatnonzero(fitting[rows])
        beyond[rows[inside]] = exceeds_host(workload, part.select(inside), costs.select(inside))
    return peaks, fitting, beyond


def _alike(workload: Workload, table: PlanTable) -> Iterator[Ints]:
    """Yield rows whose plans cost alike to price: equal chunks on all ranks or not, of many plans as many chunks."""
    is_even = (table.split == 0) & (workload.model.num_blocks % (table.pp * table.virtual) == 0)
    is_even &= len(workload.model.runs) == 1
    kinds = (~is_even).astype(np.int64)
    if len(table) > _FEW_ROWS:
        kinds *= 1 + np.ceil(np.log2(table.virtual)).astype(np.int64)
    for kind in np.flatnonzero(np.bincount(kinds)):  # np.unique would import masked arrays
        rows = np.flatnonzero(kinds == kind)
        for first in range(0, len(rows), _MOST_ROWS):
            yield rows[first : first + _MOST_ROWS]


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
    return first_rows(*(table_like(name).astype(np.int64) for name in (*_AXES, "zero_stage")))


@dataclass
class Survey:
    """The prices of the plans that may be among the best, those with the least time first.

    `run` leaves out a plan whose least time is above the best time of its kind (axes and ZeRO stage), or above that of
    the `num_kinds`-th best kind. With `fronts`, plans stay that may be faster than all that need as little memory. With
    `smallest_first` memory takes the place of time. `find` prices the fastest plans of some other choice.
    """

    workload: Workload
    plans: Plans
    num_kinds: int
    smallest_first: bool = False
    fronts: bool = False
    too_large: TooLarge = field(default_factory=TooLarge)
    found: list[Priced] = field(default_factory=list)
    num_priced: int = 0
    """Plans whose memory was computed; those that differ in the order of ranks count each."""
    num_timed: int = 0
    peaks: Floats = field(init=False)
    """Peak memory of each plan, NaN where it was not computed."""
    seconds: Floats = field(init=False)
    """Step time of each plan, infinite where it was not computed."""

    def __post_init__(self) -> None:
        self.peaks = np.full(len(self.plans), np.nan)
        self._fits = np.zeros(len(self.plans), dtype=bool)
        self.seconds = np.full(len(self.plans), np.inf)

    @cached_property
    def usable(self) -> Floats:
        """Bytes that each plan may allocate."""
        return self.workload.usable_bytes(self.plans.axes)[self.plans.degrees]

    def run(self) -> None:
        """Price the plans that may be among the best of their kind, and their kind among the best."""
        plans = self.plans
        firsts, kind = plans.kinds
        best = np.full(len(firsts), np.inf)
        waiting = np.arange(len(plans))
        if self.smallest_first or self.fronts:
            waiting = self._that_fit(waiting)
        order = self.peaks if self.smallest_first else plans.least_s
        # The most promising plans of the most promising kinds come first: they say what the others have to beat.
        batch = self._most_promising(waiting, order)
        is_left = np.ones(len(plans), dtype=bool)
        is_left[batch] = False
        waiting = waiting[is_left[waiting]]
        size, next_rows = len(batch), waiting[:0]
        while len(batch):
            priced, rows = self._price(batch)
            np.minimum.at(best, kind[rows], priced.peak_bytes if self.smallest_first else priced.seconds)
            size = min(max(4 * size, _FEW_ROWS), _MOST_ROWS)
            next_rows = next_rows[self._may_matter(next_rows, kind, best)]
            if len(next_rows) < size:
                waiting = waiting[self._may_matter(waiting, kind, best)]
                more, waiting = _least_first(waiting, order, _SORTED_ROWS)
                next_rows = np.concatenate([next_rows, more])
            if is_stopped() and np.isfinite(best).any():
                break
            left = len(next_rows) + len(waiting)
            say(f"pricing plans, {left:,} left, {_best_so_far(self.fastest_s)} (Ctrl-C: the best so far)")
            batch, next_rows = next_rows[:size], next_rows[size:]

    def _most_promising(self, rows: Ints, order: Floats) -> Ints:
        """Return the first plan in `order` of each of the first kinds."""
        firsts, kind = self.plans.kinds
        least = np.full(len(firsts), np.inf)
        np.minimum.at(least, kind[rows], order[rows])
        rows = rows[order[rows] == least[kind[rows]]]
        rows = rows[first_rows(kind[rows])[0]]
        return rows[np.argsort(order[rows], kind="stable")][: self.num_kinds]

    def find(self, among: Mask, *, at_most_s: float = np.inf, most_share: float = 1.0) -> float:
        """Price plans until the fastest of `among` that needs `most_share` of what it may allocate, or less, is known.

        Return its seconds. It may stay unknown where it takes more than `at_most_s`.
        """
        known = among & (self.peaks <= most_share * self.usable)
        best = float(self.seconds[known].min(initial=np.inf))
        rows = np.flatnonzero(among & (self.plans.least_s < min(best, at_most_s)))
        is_new = np.isnan(self.peaks[rows])
        rows = np.concatenate([rows[is_new], rows[self._fits[rows] & np.isinf(self.seconds[rows])]])
        size = _FEW_ROWS
        while len(rows) and not is_stopped():
            batch, rows = _least_first(rows, self.plans.least_s, size)
            self._price(batch)
            found = self.seconds[batch[self.peaks[batch] <= most_share * self.usable[batch]]]
            best = min(best, float(found.min(initial=np.inf)))
            rows = rows[self.plans.least_s[rows] < min(best, at_most_s)]
            size = min(4 * size, _MOST_ROWS)
        return best

    @property
    def fastest_s(self) -> float:
        """The least time of all that was priced."""
        return float(self.seconds.min())

    def priced(self) -> Priced:
        """Return all plans that were priced and fit."""
        return Priced(
            PlanTable.concatenate([each.table for each in self.found]),
            np.concatenate([each.seconds for each in self.found]),
            np.concatenate([each.peak_bytes for each in self.found]),
        )

    def rejections(self, space: PlanSpace, *, is_partial: bool = False) -> tuple[Rejection, ...]:
        """Return why plans were left out, the most frequent reason first."""
        reasons = Counter(space.rejected)
        unpriced = np.isnan(self.peaks)
        unpriced_because = (
            "not priced before the search was stopped" if is_partial else "cannot be as fast as the plans shown"
        )
        reasons[unpriced_because] += self._count(np.flatnonzero(unpriced))
        reasons[f"need more than is usable, at most {format_bytes(self.workload.usable_memory_bytes)}"] += (
            self.too_large.count
        )
        if self.too_large.num_beyond_host:
            host = format_bytes(self.workload.cluster.host_memory_bytes or 0)
            reasons[f"offload needs more than the {host} of a node"] += self.too_large.num_beyond_host
        return tuple(Rejection(reason=reason, count=count) for reason, count in reasons.most_common() if count)

    def _count(self, rows: Ints) -> int:
        return int(self.plans.variants[self.plans.degrees[rows]].sum())

    def _may_matter(self, rows: Ints, kind: Ints, best: Floats) -> Mask:
        known = np.sort(best)
        limit = known[min(self.num_kinds, len(known)) - 1] * SLACK
        # Of a kind only the best plan is shown, so that nothing has to be close to it.
        limits = np.minimum(best * _ROUNDING, limit)
        least = (self.peaks if self.smallest_first else self.plans.least_s)[rows]
        matters = least <= limits[kind[rows]]
        if self.fronts:
            matters |= self.plans.least_s[rows] < self._front_s(self.peaks[rows])
        return np.asarray(matters)

    def _front_s(self, peak_bytes: Floats) -> Floats:
        """Return the best time so far of plans that need no more memory."""
        peaks = np.concatenate([each.peak_bytes for each in self.found])
        seconds = np.concatenate([each.seconds for each in self.found])
        order = np.argsort(peaks, kind="stable")
        fastest = np.concatenate([[np.inf], np.minimum.accumulate(seconds[order])])
        return np.asarray(fastest[np.searchsorted(peaks[order], peak_bytes, side="right")])

    def _that_fit(self, rows: Ints) -> Ints:
        """Return those of some plans that fit; the memory of those that were not asked about before is computed."""
        new = rows[np.isnan(self.peaks[rows])]
        for first in range(0, len(new), CHUNK_ROWS):
            part = new[first : first + CHUNK_ROWS]
            table, weights = self.plans.table(part), self.plans.variants[self.plans.degrees[part]]
            peaks, fitting, beyond = memory_of(self.workload, table)
            self.peaks[part], self._fits[part] = peaks, fitting & ~beyond
            self.num_priced += int(weights.sum())
            lacking = peaks - self.usable[part]
            self.too_large.add(table.select(~fitting), lacking[~fitting], weights[~fitting])
            self.too_large.add_beyond_host(table.select(beyond), part[beyond], weights[beyond])
        return rows[self._fits[rows]]

    def _price(self, rows: Ints) -> tuple[Priced, Ints]:
        """Price those of some plans that fit under each order of ranks that is worth it; return the row of each."""
        rows = self._that_fit(rows)
        orders = [self.plans.orders[number] for number in self.plans.degrees[rows]]
        rows = np.repeat(rows, np.array([len(each) for each in orders], dtype=np.int64))
        numbers = np.array([number for each in orders for number in each], dtype=np.int64)
        table = self.plans.table(rows).with_orders(numbers)
        seconds = step_times(self.workload, table).step_time_s if len(rows) else np.zeros(0)
        np.minimum.at(self.seconds, rows, seconds)
        priced = Priced(table, seconds, self.peaks[rows])
        self.found.append(priced)
        self.num_timed += len(priced)
        return priced, rows


def _least_first(rows: Ints, values: Floats, size: int) -> tuple[Ints, Ints]:
    """Return `size` rows with the least of `values`, in their order, and the others."""
    if len(rows) <= size:
        return rows[np.argsort(values[rows], kind="stable")], rows[:0]
    own = values[rows]
    is_least = own <= np.partition(own, size - 1)[size - 1]
    least = rows[is_least]
    least = least[np.argsort(values[least], kind="stable")]
    return least[:size], np.concatenate([least[size:], rows[~is_least]])


def _best_so_far(seconds: float) -> str:
    return f"best {format_seconds(seconds)} a step" if np.isfinite(seconds) else "none fits so far"
