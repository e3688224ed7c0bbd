"""`PlanTable`: many plans as columns, so that one call prices them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from paraplan.plan.parallel import Axis, Offload, ParallelPlan, Recompute, ScheduleName

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "parameters")
SCHEDULES: tuple[ScheduleName | None, ...] = (None, "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Plans in rows, one integer column a field of `ParallelPlan`.

    `recompute`, `offload` and `schedule` are indices into RECOMPUTES, OFFLOADS and SCHEDULES. All rows share
    `rank_order`. Stages are even splits of the blocks (the first stages take the rest).
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
    rank_order: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")

    @classmethod
    def of_plans(cls, plans: Iterable[ParallelPlan]) -> Self:
        """Return the table of `plans`, which must share one rank order. Explicit `stage_blocks` are not kept."""
        rows = list(plans)
        orders = {plan.rank_order for plan in rows}
        assert len(orders) == 1, f"one table holds one rank order, not {orders}"

        def column(values: Iterable[int]) -> Ints:
            return np.fromiter(values, dtype=np.int64, count=len(rows))

        return cls(
            dp=column(plan.dp for plan in rows),
            tp=column(plan.tp for plan in rows),
            pp=column(plan.pp for plan in rows),
            cp=column(plan.cp for plan in rows),
            zero_stage=column(plan.zero_stage for plan in rows),
            sequence_parallel=column(int(plan.sequence_parallel) for plan in rows),
            micro_batch_size=column(plan.micro_batch_size for plan in rows),
            num_microbatches=column(plan.num_microbatches for plan in rows),
            schedule=column(SCHEDULES.index(plan.pipeline_schedule) for plan in rows),
            virtual=column(plan.virtual_pipeline_size for plan in rows),
            recompute=column(RECOMPUTES.index(plan.recompute) for plan in rows),
            offload=column(OFFLOADS.index(plan.offload) for plan in rows),
            rank_order=orders.pop(),
        )

    @classmethod
    def of_columns(cls, columns: Iterable[Ints]) -> Self:
        """Return the table of `columns`, in the order of COLUMNS."""
        named: dict[str, Any] = dict(zip(COLUMNS, columns, strict=True))
        return cls(**named)

    @classmethod
    def concatenate(cls, tables: Sequence[Self]) -> Self:
        """Return the rows of `tables` one after the other; without any, a table without rows."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls.of_columns(
            np.concatenate([nothing, *(getattr(table, name) for table in tables)]) for name in COLUMNS
        )

    def __len__(self) -> int:
        return len(self.dp)

    @property
    def shard_size(self) -> Ints:
        """Ranks over which ZeRO shards: data-parallel and context-parallel ranks together."""
        return self.dp * self.cp

    def select(self, rows: Mask | Ints) -> Self:
        """Return the table of some rows."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in COLUMNS}
        return type(self)(**columns, rank_order=self.rank_order)

    def plan(self, row: int) -> ParallelPlan:
        """Return one row as a record."""
        return ParallelPlan(
            dp=int(self.dp[row]),
            tp=int(self.tp[row]),
            pp=int(self.pp[row]),
            cp=int(self.cp[row]),
            zero_stage=int(self.zero_stage[row]),
            sequence_parallel=bool(self.sequence_parallel[row]),
            micro_batch_size=int(self.micro_batch_size[row]),
            num_microbatches=int(self.num_microbatches[row]),
            pipeline_schedule=SCHEDULES[self.schedule[row]],
            virtual_pipeline_size=int(self.virtual[row]),
            recompute=RECOMPUTES[self.recompute[row]],
            offload=OFFLOADS[self.offload[row]],
            rank_order=self.rank_order,
        )


COLUMNS = tuple(field.name for field in fields(PlanTable) if field.name != "rank_order")
"""The names of a table's columns in their order."""


def distinct_rows(*columns: Ints) -> tuple[list[Ints], Ints]:
    """Return the distinct rows of columns of whole numbers from 0, column by column, and the distinct row of each row.

    The columns are packed into one number a row, which sorts many times faster than rows do.
    """
    packed = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        packed = packed * (int(column.max(initial=0)) + 1) + column
    _, firsts, inverse = np.unique(packed, return_index=True, return_inverse=True)
    return [column[firsts] for column in columns], inverse.reshape(-1)
