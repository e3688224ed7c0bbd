"""The stages of many pipelines as runs of equal stages, one column a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.cost.pipeline.recurrence import StageColumns
from paraplan.cost.plan_table import Floats, Ints


@dataclass(frozen=True, eq=False)
class StageRuns:
    """Virtual stages in model order as `R` runs of equal stages: `counts`, and seconds of one micro-batch on each.

    `counts`, `forward_s`, `backward_s` and `weight_s` are `[R, N]`, `send_s` (of one boundary) is `[N]`. The counts of
    a column sum to pp times virtual stages; a run may be empty. `backward_s` counts recomputation and the gradients of
    the weights, `weight_s` the part of it that zero bubble may put off.
    """

    counts: Ints
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    send_s: Floats

    @property
    def total_s(self) -> Floats:
        """Seconds of one micro-batch on all stages, forward and backward."""
        return np.asarray((self.counts * (self.forward_s + self.backward_s)).sum(axis=0))

    def select(self, rows: Ints) -> StageRuns:
        """Return some of the columns."""
        return StageRuns(
            self.counts[:, rows],
            self.forward_s[:, rows],
            self.backward_s[:, rows],
            self.weight_s[:, rows],
            self.send_s[rows],
        )

    def by_stage(self, num_stages: int) -> StageColumns:
        """Return the stages one by one, for columns that all have `num_stages`."""
        ends = np.cumsum(self.counts, axis=0)
        run = (np.arange(num_stages)[:, None, None] >= ends[None]).sum(axis=1)
        forward, backward, weight = (
            np.take_along_axis(each, run, axis=0) for each in (self.forward_s, self.backward_s, self.weight_s)
        )
        return StageColumns(forward, backward, weight, self.send_s)
