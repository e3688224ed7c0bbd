"""Uneven divisions of a model's blocks over pipeline stages, by what the blocks cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paraplan.cost.blocks.costs import block_costs
from paraplan.cost.plan_table import RECOMPUTES, Ints, PlanTable, split_rows
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan, Recompute
from paraplan.plan.stages import assign_blocks, even_split


@dataclass
class BalancedSplits:
    """The divisions that make the slowest stage as fast as it can be, one for each number of stages and recompute.

    Embedding, head and loss count, in seconds of one sequence on one unsplit GPU: their share of a stage is nearly the
    same under every cut. `rows` are those of a table's `splits`.
    """

    workload: Workload
    _cuts: list[tuple[int, ...]] = field(default_factory=list)
    _numbers: dict[tuple[int, Recompute], int] = field(default_factory=dict)
    _seconds: dict[Recompute, tuple[list[float], float, float]] = field(default_factory=dict)

    @property
    def rows(self) -> Ints:
        """Return the divisions found so far as rows of first blocks."""
        return split_rows(self._cuts)

    def number(self, num_stages: int, recompute: Recompute) -> int:
        """Return the row of the division over `num_stages`, 0 where the even one is the best."""
        key = (num_stages, recompute)
        if key not in self._numbers:
            cut = self.cut(num_stages, recompute)
            self._numbers[key] = 0 if cut is None else self._row(cut)
        return self._numbers[key]

    def cut(self, num_stages: int, recompute: Recompute) -> tuple[int, ...] | None:
        """Return the blocks of each stage, None where no division is better than the even one."""
        num_blocks = self.workload.model.num_blocks
        if num_stages in (1, num_blocks):
            return None
        blocks, embedding_s, head_s = self._block_seconds(recompute)
        cut = assign_blocks(blocks, num_stages, first_extra=embedding_s, last_extra=head_s)
        return None if cut == even_split(num_blocks, num_stages) else cut

    def _row(self, cut: tuple[int, ...]) -> int:
        if cut not in self._cuts:
            self._cuts.append(cut)
        return 1 + self._cuts.index(cut)

    def _block_seconds(self, recompute: Recompute) -> tuple[list[float], float, float]:
        if not self._seconds:
            share = self.workload.training.global_batch_size
            alone = [ParallelPlan(num_microbatches=share, recompute=kind) for kind in RECOMPUTES]
            costs = block_costs(self.workload, PlanTable.of_plans(alone))
            for kind, row in zip(RECOMPUTES, costs.key, strict=True):
                again = costs.forward_s if kind == RECOMPUTES[-1] else costs.recompute_s
                seconds = (costs.forward_s + costs.backward_s + again)[row] @ np.diff(costs.counts)
                self._seconds[kind] = (seconds.tolist(), float(costs.embedding_s[row]), float(costs.head_s[row]))
        return self._seconds[recompute]
