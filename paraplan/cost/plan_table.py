"""`PlanTable`: many plans as columns, so that one call prices them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import permutations
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from paraplan.plan.parallel import AXES, MEGATRON_RANK_ORDER, Axis, Offload, ParallelPlan, Recompute, ScheduleName

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "selective_ops", "full")
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "parameters")
SCHEDULES: tuple[ScheduleName | None, ...] = (None, "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


class RecomputeCode:
    """Values of the column `recompute`: positions in RECOMPUTES."""

    NONE = 0
    SELECTIVE = 1
    SELECTIVE_OPS = 2
    FULL = 3


class OffloadCode:
    """Values of the column `offload`: positions in OFFLOADS."""

    NONE = 0
    OPTIMIZER = 1
    PARAMETERS = 2


class ScheduleCode:
    """Values of the column `schedule`: positions in SCHEDULES."""

    NO_PIPELINE = 0
    GPIPE = 1
    ONE_FORWARD_ONE_BACKWARD = 2
    INTERLEAVED = 3
    ZERO_BUBBLE = 4


RANK_ORDERS: tuple[tuple[Axis, ...], ...] = tuple(
    sorted(permutations(MEGATRON_RANK_ORDER), key=lambda order: order != MEGATRON_RANK_ORDER)
)
_EXCHANGED: dict[Axis, Axis] = {"dp": "cp", "cp": "dp"}
_DATA_AT_CONTEXT = np.array(
    [RANK_ORDERS.index(tuple(_EXCHANGED.get(axis, axis) for axis in order)) for order in RANK_ORDERS]
)
"""The index of each order of ranks with dp and cp exchanged."""
_IS_CONTEXT_OUTSIDE = np.array([order.index("cp") < order.index("dp") for order in RANK_ORDERS])


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Plans in rows, one integer column a field of `ParallelPlan`.

    `recompute`, `offload`, `schedule` and `order` are indices into RECOMPUTES, OFFLOADS, SCHEDULES and RANK_ORDERS.
    `split` 0 is an even split of the blocks (the first stages take the rest); any other is a row of `splits`, which
    holds the first block of each stage and then the number of blocks. `shards` 0 is ZeRO over all ranks of dp and cp.
    `devices` are the GPUs over which DataParallel divides the micro-batches of one process.
    """

    dp: Ints
    tp: Ints
    pp: Ints
    cp: Ints
    zero_stage: Ints
    sequence_parallel: Ints
    micro_batch_size: Ints
    num_microbatches: Ints
    schedule: Ints
    virtual: Ints
    recompute: Ints
    offload: Ints
    split: Ints
    order: Ints
    shards: Ints
    devices: Ints
    ep: Ints
    splits: Ints = field(default_factory=lambda: np.zeros((1, 1), dtype=np.int64))

    @property
    def axes(self) -> dict[str, Ints]:
        """The degree of each axis, by its name."""
        return {axis.name: getattr(self, axis.name) for axis in AXES}

    @classmethod
    def of_plans(cls, plans: Iterable[ParallelPlan]) -> Self:
        """Return the table of `plans`."""
        rows = list(plans)
        splits, split_of = _splits([plan.stage_blocks for plan in rows])

        def column(values: Iterable[int]) -> Ints:
            return np.fromiter(values, dtype=np.int64, count=len(rows))

        return cls(
            **{axis.name: column(getattr(plan, axis.name) for plan in rows) for axis in AXES},
            zero_stage=column(plan.zero_stage for plan in rows),
            sequence_parallel=column(int(plan.sequence_parallel) for plan in rows),
            micro_batch_size=column(plan.micro_batch_size for plan in rows),
            num_microbatches=column(plan.num_microbatches for plan in rows),
            schedule=column(SCHEDULES.index(plan.pipeline_schedule) for plan in rows),
            virtual=column(plan.virtual_pipeline_size for plan in rows),
            recompute=column(RECOMPUTES.index(plan.recompute) for plan in rows),
            offload=column(OFFLOADS.index(plan.offload) for plan in rows),
            split=column(split_of),
            order=column(RANK_ORDERS.index(plan.rank_order) for plan in rows),
            shards=column(plan.zero_shards or 0 for plan in rows),
            devices=column(plan.devices_per_process for plan in rows),
            splits=splits,
        )

    @classmethod
    def of_columns(cls, columns: Iterable[Ints]) -> Self:
        """Return the table of `columns`, in the order of COLUMNS."""
        named: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))
        return cls(**named)

    @classmethod
    def concatenate(cls, tables: Sequence[Self]) -> Self:
        """Return the rows of `tables`, which share splits; without any, a table without rows."""
        nothing = np.zeros(0, dtype=np.int64)
        joined = cls.of_columns(
            np.concatenate([nothing, *(getattr(table, name) for table in tables)]) for name in COLUMNS
        )
        return joined.with_splits(tables[0].splits) if tables else joined

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def shard_size(self) -> Ints:
        """Ranks over which ZeRO shards: data-parallel and context-parallel ranks together, or groups of the first."""
        return np.where(self.shards > 0, self.shards, self.dp * self.cp)

    @property
    def device_batch_size(self) -> Ints:
        """Sequences of a micro-batch on one GPU: all, unless DataParallel divides them over the GPUs of a process."""
        return -(-self.micro_batch_size // self.devices)

    def tokens(self, seq_length: int) -> Floats:
        """Return the tokens of a micro-batch on one rank."""
        return np.asarray(self.micro_batch_size * seq_length / self.cp)

    def select(self, rows: Mask | Ints) -> Self:
        """Return the table of some rows."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in COLUMNS}
        return type(self)(**columns, splits=self.splits)

    def ordered(self, rank_order: tuple[Axis, ...]) -> Self:
        """Return the same plans with another order of ranks."""
        return self.with_orders(np.full_like(self.order, RANK_ORDERS.index(rank_order)))

    def with_orders(self, order: Ints) -> Self:
        """Return the same plans with an order of ranks for each, an index into RANK_ORDERS."""
        return replace(self, order=order)

    def joined_data_axes(self) -> Self:
        """Return the same plans with context-parallel ranks counted as data-parallel ones: both average gradients.

        They stand where those of the two stood that are further apart.
        """
        is_outside = (self.dp == 1) | ((self.cp > 1) & _IS_CONTEXT_OUTSIDE[self.order])
        order = np.where(is_outside, _DATA_AT_CONTEXT[self.order], self.order)
        return replace(self, dp=self.dp * self.cp, cp=np.ones_like(self.cp), order=order)

    def with_splits(self, splits: Ints) -> Self:
        """Return the same plans with more rows of `splits`."""
        return replace(self, splits=splits)

    def plan(self, row: int) -> ParallelPlan:
        """Return one row as a record."""
        return self._record(tuple(int(getattr(self, name)[row]) for name in COLUMNS))

    def plans(self) -> list[ParallelPlan]:
        """Return all rows as records."""
        return [self._record(row) for row in zip(*(getattr(self, name).tolist() for name in COLUMNS), strict=True)]

    def _record(self, values: tuple[int, ...]) -> ParallelPlan:
        row = dict(zip(COLUMNS, values, strict=True))
        return _plan_of(values, self._stage_blocks(row["split"], num_stages=row["pp"] * row["virtual"]))

    def _stage_blocks(self, split: int, *, num_stages: int) -> tuple[int, ...] | None:
        if not split:
            return None
        return tuple(int(count) for count in np.diff(self.splits[split, : num_stages + 1]))


@lru_cache(maxsize=8192)  # a search asks about the same plans for each of many machines, and checks each field
def _plan_of(values: tuple[int, ...], stage_blocks: tuple[int, ...] | None) -> ParallelPlan:
    """Return a row of a table as a record; its `split` says nothing beside `stage_blocks`."""
    row = dict(zip(COLUMNS, values, strict=True))
    return ParallelPlan(
        **{axis.name: row[axis.name] for axis in AXES},
        zero_stage=row["zero_stage"],
        zero_shards=row["shards"] or None,
        devices_per_process=row["devices"],
        sequence_parallel=bool(row["sequence_parallel"]),
        micro_batch_size=row["micro_batch_size"],
        num_microbatches=row["num_microbatches"],
        pipeline_schedule=SCHEDULES[row["schedule"]],
        virtual_pipeline_size=row["virtual"],
        recompute=RECOMPUTES[row["recompute"]],
        offload=OFFLOADS[row["offload"]],
        stage_blocks=stage_blocks,
        rank_order=RANK_ORDERS[row["order"]],
    )


def _splits(cuts: Sequence[tuple[int, ...] | None]) -> tuple[Ints, list[int]]:
    """Return the distinct explicit splits as rows of first blocks, row 0 for an even one, and the row of each."""
    distinct: list[tuple[int, ...]] = list(dict.fromkeys(cut for cut in cuts if cut is not None))
    return split_rows(distinct), [0 if cut is None else 1 + distinct.index(cut) for cut in cuts]


def split_rows(cuts: Sequence[tuple[int, ...]]) -> Ints:
    """Return `splits` of a table for numbers of blocks per stage: row 0 for an even split, then one row each."""
    rows = np.zeros((len(cuts) + 1, 1 + max(map(len, cuts), default=0)), dtype=np.int64)
    for row, cut in enumerate(cuts, start=1):
        rows[row, 1 : len(cut) + 1] = np.cumsum(cut)
        rows[row, len(cut) + 1 :] = sum(cut)
    return rows


COLUMNS = tuple(each.name for each in fields(PlanTable) if each.name != "splits")
"""The names of a table's columns in their order."""


def distinct_rows(*columns: Ints) -> tuple[list[Ints], Ints]:
    """Return the distinct rows of columns of whole numbers from 0, column by column, and the distinct row of each row.

    The columns are packed into one number a row, which sorts many times faster than rows do.
    """
    firsts, inverse = first_rows(*columns)
    return [column[firsts] for column in columns], inverse


def first_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Return where each distinct row of columns of whole numbers from 0 comes first, and which one each row is."""
    packed, size = np.zeros(len(columns[0]), dtype=np.int64), 1
    if len(packed) == 1:  # one plan is often asked about
        return packed, packed
    for column in columns:
        most = int(column.max(initial=0)) + 1
        packed, size = packed * most + column, size * most
    if size > _MOST_PLACES_PER_ROW * len(packed):
        _, firsts, inverse = np.unique(packed, return_index=True, return_inverse=True)
        return firsts, inverse.reshape(-1)
    first = np.full(size, -1)
    first[packed[::-1]] = np.arange(len(packed))[::-1]  # of several rows in one place the last one written stays
    is_there = first >= 0
    return first[is_there], (np.cumsum(is_there) - 1)[packed]


_MOST_PLACES_PER_ROW = 8
"""Up to so many numbers that a row may have, looking them up is faster than sorting."""
