"""`RunCorrection`: errors of measured runs beyond constants, as a regression on how alike plans are."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from paraplan.cost.plan_table import RECOMPUTES, Floats, Ints, PlanTable
from paraplan.plan.parallel import AXES
from paraplan.records import Record

_OF_PLAN, _OF_WORKLOAD = len(AXES) + 3, 6
NUM_SIZES = _OF_PLAN + _OF_WORKLOAD + len(RECOMPUTES)
"""Sizes of a plan, as `sizes_of` counts them."""
WORKLOAD_SIZES = slice(_OF_PLAN, _OF_PLAN + _OF_WORKLOAD)
"""The sizes that all plans for one model and training share."""
MOST_WEIGHT = 1e4
"""A run with this weight multiplies the prediction of a plan as it is by e^100 and more."""
MOST_LOG_FACTOR = 5.0
"""Runs that agree do not multiply a prediction by more than e^5, 148, in either direction."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class SharedErrors(Record):
    """How errors of plans on one kind of GPU with one framework go together, by how alike the plans are."""

    log_sd: float = Field(gt=0, le=10)
    """Standard deviation of the part of log(measured / predicted) that plans share which are the same."""
    doublings: float = Field(gt=0, le=1e3)
    """So many doublings of sizes apart they share 1/e of it."""
    own_log_sd: float = Field(gt=0, le=10)
    """Standard deviation of the part that no other run shares."""
    prior_runs: float = Field(gt=0, le=1e3)
    """So many runs weigh as much as these standard deviations when runs say how far predictions stray."""

    def covariance(self, sizes: Floats, others: Floats) -> Floats:
        """Return the covariance `[N, M]` of errors of plans by their sizes, without what each has of its own."""
        distances = np.zeros((len(sizes), len(others)))
        for column, other in zip(sizes.T, others.T, strict=True):  # one by one: there may be many plans
            distances += np.abs(column[:, None] - other[None, :])
        return np.asarray(self.log_sd**2 * np.exp(-distances / self.doublings))

    def of_runs(self, sizes: Floats) -> Floats:
        """Return the covariance of the errors of runs, with what each has of its own."""
        return self.covariance(sizes, sizes) + self.own_log_sd**2 * np.eye(len(sizes))


class CorrectedRun(Record):
    """A run whose error is known: where it stands among plans, and its weight."""

    kind: str
    """The GPU and framework that runs must share."""
    sizes: tuple[Finite, ...] = Field(min_length=NUM_SIZES, max_length=NUM_SIZES)
    """Sizes of the run, as `sizes_of` counts them."""
    weight: float = Field(ge=-MOST_WEIGHT, le=MOST_WEIGHT)
    """The weight of its error in that of a plan as it is, in units of the covariance."""


class RunCorrection(Record):
    """By what a prediction is multiplied for what runs that are alike were off by, and what that leaves of its range.

    The mean and variance of a Gaussian process (Rasmussen and Williams 2006, eq. 2.25 and 2.26) over the logarithms of
    measured / predicted.
    """

    shared: SharedErrors
    """How errors go together."""
    runs: tuple[CorrectedRun, ...] = Field(min_length=1)
    """The runs."""
    spread: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How far these runs stray, beside what `shared` says: a ratio of standard deviations."""

    def factors(self, sizes: Floats, kind: str) -> Floats:
        """Return the factor of each plan, by its sizes `[N, sizes]` and the kind of all."""
        runs = self._of_kind(kind)
        if not runs:
            return np.ones(len(sizes))
        likeness = self.shared.covariance(sizes, _sizes(runs))
        return np.asarray(np.exp(log_factors(likeness, np.array([run.weight for run in runs]))))

    def widths(self, sizes: Floats, kind: str) -> Floats:
        """Return how wide the logarithmic range of each plan's error is beside that of a plan like none of the runs."""
        runs = self._of_kind(kind)
        if not runs:
            return np.ones(len(sizes))
        known = _sizes(runs)
        return self.spread * width_left(self.shared, self.shared.covariance(sizes, known), self.shared.of_runs(known))

    def _of_kind(self, kind: str) -> list[CorrectedRun]:
        return [run for run in self.runs if run.kind == kind]


def log_factors(likeness: Floats, weights: Floats) -> Floats:
    """Return the logarithms of the factors of plans whose covariance with runs is `likeness`, `[N, M]`."""
    return np.asarray(np.clip(likeness @ weights, -MOST_LOG_FACTOR, MOST_LOG_FACTOR))


def width_left(shared: SharedErrors, likeness: Floats, of_runs: Floats) -> Floats:
    """Return how wide ranges of plans stay that are alike to runs by `likeness`, `[N, M]`, whatever these strayed."""
    whole = shared.log_sd**2 + shared.own_log_sd**2
    explained = np.einsum("nm,mn->n", likeness, np.linalg.solve(of_runs, likeness.T))
    return np.asarray(np.sqrt(np.maximum(whole - explained, 0.0) / whole))


def weights_of(of_runs: Floats, logs: Floats) -> tuple[Floats, float]:
    """Return the weights of runs, and their squared distance from predictions in units of their covariance."""
    weights = np.linalg.solve(of_runs, logs)
    return np.clip(weights, -MOST_WEIGHT, MOST_WEIGHT), float(logs @ weights)


def spread_of(prior_runs: float, distance: Floats, count: Ints) -> Floats:
    """Return how far `count` runs stray that are `distance` from predictions, beside what was expected.

    That of a Student-t process with `prior_runs` (Shah, Wilson and Ghahramani 2014, eq. 6): runs that stray further
    than others do widen ranges, runs that stray less narrow them.
    """
    return np.asarray(np.sqrt((prior_runs + distance) / (prior_runs + count)))


def learned(shared: SharedErrors, kind: str, sizes: Floats, logs: Floats) -> RunCorrection:
    """Return what the logarithms of measured / predicted of runs of one kind, of these sizes, say of other plans."""
    weights, distance = weights_of(shared.of_runs(sizes), logs)
    runs = zip(sizes.tolist(), weights.tolist(), strict=True)
    return RunCorrection(
        shared=shared,
        runs=tuple(CorrectedRun(kind=kind, sizes=tuple(row), weight=weight) for row, weight in runs),
        spread=float(spread_of(shared.prior_runs, np.array(distance), np.array(len(logs)))),
    )


def _sizes(runs: list[CorrectedRun]) -> Floats:
    return np.array([run.sizes for run in runs])


def sizes_of(
    table: PlanTable,
    *,
    hidden_size: int,
    seq_length: int,
    is_fp32: bool,
    matmul_speedup: float,
    is_compiled: bool,
    is_frozen: bool,
) -> Floats:
    """Return the sizes by which plans are alike, `[N, sizes]`: doublings of degrees and of what a micro-batch is.

    The number of micro-batches and the ZeRO stage count half: little in a step depends on them alone. Another kind of
    recompute, another precision, torch.compile, and frozen weights count as one doubling each, 8-bit products as many
    as they are faster.
    """
    columns = (*(getattr(table, axis.name) for axis in AXES), table.micro_batch_size)
    doublings = [np.log2(column.astype(float)) for column in columns]
    halves = [0.5 * np.log2(table.num_microbatches.astype(float)), 0.5 * table.zero_stage]
    common = (np.log2(hidden_size), np.log2(seq_length), is_fp32, np.log2(matmul_speedup), is_compiled, is_frozen)
    recompute = [0.5 * (table.recompute == code) for code in range(len(RECOMPUTES))]
    whole = [np.full(len(table), float(size)) for size in common]
    return np.stack([*doublings, *halves, *whole, *recompute], axis=1)
