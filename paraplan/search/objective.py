"""What makes one plan better than another, where both fit."""

from __future__ import annotations

from typing import Literal

import numpy as np

from paraplan.cost.table import Floats, Ints, PlanTable

Objective = Literal["throughput", "memory", "simplicity"]

EQUAL: dict[Objective, float] = {"throughput": 1.01, "memory": 1.01, "simplicity": 1.02}
"""Plans within this factor of the best count as equal, and the simplest of them is recommended."""


def rank(objective: Objective, *, seconds: Floats, peak_bytes: Floats) -> Ints:
    """Return the rows in the order of an objective: by step time, or by peak memory; the other breaks ties."""
    keys = (seconds, peak_bytes) if objective == "memory" else (peak_bytes, seconds)
    return np.lexsort(keys).astype(np.int64)


def simplest_of_the_best(
    objective: Objective, table: PlanTable, rows: list[int], *, seconds: Floats, peak_bytes: Floats
) -> int:
    """Return the row with the fewest axes, and then the least else to it, among those equal to the first of `rows`."""
    values = peak_bytes if objective == "memory" else seconds
    close = [row for row in rows if values[row] <= EQUAL[objective] * values[rows[0]]]
    return min(close, key=lambda row: _complexity(table, row))


def _complexity(table: PlanTable, row: int) -> tuple[int, ...]:
    axes = sum(int(degrees[row] > 1) for degrees in (table.pp, table.tp, table.cp, table.ep))
    choices = (table.zero_stage[row], table.virtual[row] > 1, table.recompute[row], table.offload[row])
    return axes, *map(int, choices)
