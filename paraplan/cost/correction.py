"""What measured runs say of step times beyond constants: `TimeCorrection`, a regression on how alike plans are."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from paraplan.cost.plan_table import RECOMPUTES, Floats, PlanTable
from paraplan.plan.parallel import AXES
from paraplan.records import Record

LENGTH = 2.0
"""Plans count as alike within this many doublings of a size: the error of a plan says 0.6 of that of another whose
tensor parallelism, micro-batch or so is four times as large."""
ALIKE_LOG_SD = 0.1
"""Standard deviation of the part of a log error that plans share which are alike: about the mean error of published
sources."""

NUM_SIZES = 10
"""Sizes of a plan, as `sizes_of` counts them."""
MOST_WEIGHT = 1e4
"""A run with this weight multiplies the time of a plan as it is by e^100."""
MOST_LOG_FACTOR = 5.0
"""Runs that agree do not multiply a time by more than e^5, 148, in either direction."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class CorrectedRun(Record):
    """A run that was fitted to: where it stands among plans, and its weight."""

    kind: str
    """What has to be the same: GPU, framework, precision and recompute."""
    sizes: tuple[Finite, ...] = Field(min_length=NUM_SIZES, max_length=NUM_SIZES)
    """Its sizes, as `sizes_of` counts them."""
    weight: float = Field(ge=-MOST_WEIGHT, le=MOST_WEIGHT)
    """What its error adds to that of a plan as it is."""


class TimeCorrection(Record):
    """By what a plan's step time is multiplied for what runs that are alike were off by after a fit of constants.

    The mean of a Gaussian process (Rasmussen and Williams 2006, eq. 2.25) over the logarithms of measured / predicted.
    """

    runs: tuple[CorrectedRun, ...] = Field(min_length=1)
    """The runs that were fitted to."""

    def factors(self, sizes: Floats, kinds: list[str]) -> Floats:
        """Return the factor of each plan, by its sizes `[N, sizes]` and its kind."""
        likeness = likeness_of(
            sizes, kinds, np.array([run.sizes for run in self.runs]), [run.kind for run in self.runs]
        )
        logs = likeness @ np.array([run.weight for run in self.runs])
        return np.asarray(np.exp(np.clip(logs, -MOST_LOG_FACTOR, MOST_LOG_FACTOR)))


def likeness_of(sizes: Floats, kinds: list[str], other_sizes: Floats, other_kinds: list[str]) -> Floats:
    """Return the covariance `[N, M]` of what plans are off by: those of a kind share more, the more they are alike."""
    squares = ((sizes[:, None, :] - other_sizes[None, :, :]) ** 2).sum(axis=-1)
    same = np.array(kinds)[:, None] == np.array(other_kinds)[None, :]
    return np.asarray(same * ALIKE_LOG_SD**2 * np.exp(-squares / (2 * LENGTH**2)))


def sizes_of(table: PlanTable, *, hidden_size: int, seq_length: int) -> Floats:
    """Return the sizes by which plans are alike, `[N, sizes]`: doublings of degrees and of what a micro-batch is.

    The number of micro-batches and the ZeRO stage count half: little in a step depends on them alone.
    """
    columns = (*(getattr(table, axis.name) for axis in AXES), table.micro_batch_size)
    doublings = [np.log2(column.astype(float)) for column in columns]
    halves = [0.5 * np.log2(table.num_microbatches.astype(float)), 0.5 * table.zero_stage]
    model = [np.full(len(table), np.log2(float(size))) for size in (hidden_size, seq_length)]
    return np.stack([*doublings, *halves, *model], axis=1)


def kinds_of(table: PlanTable, common: str) -> list[str]:
    """Return the kind of each plan of what `common` names."""
    return [f"{common}, {RECOMPUTES[code]}" for code in table.recompute.tolist()]
