"""What a search returns, and what makes one plan better than another."""

from __future__ import annotations

from typing import Literal

import numpy as np

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.table import Floats, Ints, PlanTable
from paraplan.plan.parallel import ParallelPlan
from paraplan.records import Record


class Decision(Record):
    """One rule of the decision tree, what it chose, and the numbers that decided."""

    rule: str
    outcome: str
    because: str

    @property
    def question(self) -> str:
        """The rule as what stands before its outcome."""
        return self.rule if self.rule.endswith("?") else f"{self.rule}:"


class Rejection(Record):
    """How many plans one reason ruled out."""

    reason: str
    count: int


class Candidate(Record):
    """One ranked plan, as far as the table shows it. `in_tree` says that the decision tree names its family."""

    plan: ParallelPlan
    in_tree: bool
    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    peak_memory_bytes: int


class SearchResult(Record):
    """The answer of a search.

    `best` is the plan to use, `second` the best of those with other axes or ZeRO stage, where it was asked for.
    `fastest` stands beside it where a plan outside the tree's families is faster by over 2 %. `candidates` are the
    best plan of each choice of axes and ZeRO stage, fastest first; `front` the plans that no other one beats in both
    time and memory, and `cloud` some of all that were priced, where they were asked for. `remark` says why a plan that
    is not the fastest is recommended.
    `plans_considered` counts the whole space, `plans_priced` those whose memory was computed, `times_priced` those
    whose time was: the others cannot be among the best. `is_runnable` is False for plans that were made for another
    framework, which paraplan does not launch.
    """

    decisions: tuple[Decision, ...]
    families: tuple[str, ...]
    best: PlanEstimate
    fastest: PlanEstimate | None
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    plans_considered: int
    plans_priced: int = 0
    times_priced: int = 0
    second: PlanEstimate | None = None
    front: tuple[Candidate, ...] = ()
    cloud: tuple[Candidate, ...] = ()
    remark: str | None = None
    is_runnable: bool = True


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
