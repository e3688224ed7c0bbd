"""Accuracy of predictions: errors by group, and whether the best plan of a sweep is found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import numpy as np

from paraplan.accuracy.measured_runs import MeasuredRun, UnusableRow
from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.cost.plan_table import Floats
from paraplan.records import Record

FEWEST_ROWS = 4
"""A sweep of fewer plans says little about a ranking."""

SAME_PREDICTION = 1e-6
"""Predictions that differ by less, relatively, are equal but for rounding: the order of rows must not decide."""


UNKNOWN_FRAMEWORK = "unknown: modelled as plain PyTorch, with tp or pp as Megatron-Core"
"""The group of runs whose framework no profile describes."""


class ErrorSummary(Record):
    """Errors over rows: mean and median of the absolute errors, the largest, and the mean with its sign."""

    rows: int
    mape: float | None = None
    median_ape: float | None = None
    max_ape: float | None = None
    bias: float | None = None


class Score(Record):
    """Errors over rows and by group. `mean_of_sources` weighs every source the same, whatever its rows.

    `by_reading` groups memory by what was read, and is empty for step times.

    `worst` are the ids of the rows with the largest errors.
    """

    all_rows: ErrorSummary
    mean_of_sources: float | None
    by_source: dict[str, ErrorSummary]
    by_gpu: dict[str, ErrorSummary]
    by_framework: dict[str, ErrorSummary]
    by_parallelism: dict[str, ErrorSummary]
    by_reading: dict[str, ErrorSummary]
    worst: tuple[str, ...]


class Sweep(Record):
    """Plans that were measured for one model and set of GPUs.

    `rank_correlation` is Spearman's between predicted and measured times of a sequence; `top1_regret` is how much
    longer the plan with the best prediction took than the best of all, as a share, on average over plans that share it.
    """

    name: str
    rows: int
    rank_correlation: float
    top1_regret: float


class SweepScore(Record):
    """Means over sweeps, None without any, and the worst regret."""

    sweeps: tuple[Sweep, ...]
    rank_correlation: float | None
    top1_regret: float | None
    worst_regret: float | None


RISKS = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 1.01)
"""The ends of the groups by predicted risk."""


class RiskBin(Record):
    """Runs with a predicted risk of running out of memory from `low` to below `high`, and how many of them did."""

    low: float
    high: float
    rows: int
    failed: int
    failed_share_of_sources: float | None
    """The share that failed as the mean of sources, None without any."""


@dataclass(frozen=True)
class Outcomes:
    """Runs by how they ended. Left out are runs that keep something in the host's memory in a way no plan says."""

    ran: Sequence[RunPrediction]
    """Runs that ran."""
    out_of_memory: Sequence[RunPrediction]
    """Failed runs, but those that something else ended."""
    ended_otherwise: int
    """Failed runs beside which one ran with no less on each GPU: tables that do not tell crashes apart have them."""


class FitScore(Record):
    """For how many runs that ran, and that ran out of memory, as `Outcomes` has them, this was predicted."""

    ran: int
    ran_predicted: int
    out_of_memory: int
    """Failed runs, but those that something else ended."""
    out_of_memory_predicted: int
    ended_otherwise: int = 0
    """Failed runs that memory did not end."""
    by_risk: tuple[RiskBin, ...] = ()
    """How many failed of those with a predicted risk."""


def summarize(errors: Sequence[float]) -> ErrorSummary:
    """Return the summary of relative errors; all None without any."""
    if not errors:
        return ErrorSummary(rows=0)
    values = np.array(errors)
    absolute = np.abs(values)
    return ErrorSummary(
        rows=len(errors),
        mape=float(absolute.mean()),
        median_ape=float(np.median(absolute)),
        max_ape=float(absolute.max()),
        bias=float(values.mean()),
    )


def score(predictions: Iterable[RunPrediction], error: str, *, num_worst: int = 5) -> Score:
    """Return the score of an error (`step_time_error`, `memory_error`) over the predictions that have it."""
    rows = [(row, float(value)) for row in predictions if (value := getattr(row, error)) is not None]
    by_source = _grouped([(row.source, value) for row, value in rows])
    means = [summary.mape for summary in by_source.values() if summary.mape is not None]
    worst = sorted(rows, key=lambda pair: -abs(pair[1]))[:num_worst]
    return Score(
        all_rows=summarize([value for _, value in rows]),
        mean_of_sources=fmean(means) if means else None,
        by_source=by_source,
        by_gpu=_grouped([(row.gpu, value) for row, value in rows]),
        by_framework=_grouped([(_framework_group(row), value) for row, value in rows]),
        by_parallelism=_grouped([(row.parallelism, value) for row, value in rows]),
        by_reading=_grouped([(row.memory_reading, value) for row, value in rows if row.memory_reading])
        if error == "memory_error"
        else {},
        worst=tuple(row.id for row, _ in worst),
    )


def score_sweeps(pairs: Iterable[tuple[MeasuredRun, RunPrediction]], *, at_one_batch: bool = False) -> SweepScore:
    """Return how well predictions rank the plans of each sweep: a source's runs of one model on one set of GPUs.

    Plans are ranked by the time of a sequence, since batches differ; `at_one_batch` takes each global batch apart, and
    looks at smaller differences then. A plan that was measured several times counts once, with its mean. Sweeps of
    fewer than four plans are left out.
    """
    groups: dict[tuple[object, ...], list[tuple[MeasuredRun, RunPrediction]]] = {}
    for run, prediction in pairs:
        if prediction.predicted_step_time_s is not None and prediction.measured_step_time_s is not None:
            key = _sweep_key(run) + ((run.global_batch,) if at_one_batch else ())
            groups.setdefault(key, []).append((run, prediction))
    sweeps = [sweep for rows in groups.values() if (sweep := _sweep(rows, at_one_batch=at_one_batch)) is not None]
    return SweepScore(
        sweeps=tuple(sweeps),
        rank_correlation=fmean(sweep.rank_correlation for sweep in sweeps) if sweeps else None,
        top1_regret=fmean(sweep.top1_regret for sweep in sweeps) if sweeps else None,
        worst_regret=max((sweep.top1_regret for sweep in sweeps), default=None),
    )


def outcomes(pairs: Iterable[tuple[MeasuredRun | UnusableRow, RunPrediction]]) -> Outcomes:
    """Return the runs of which it is known whether they ran or ran out of memory, by that."""
    known = [
        (run, row)
        for run, row in pairs
        if isinstance(run, MeasuredRun) and row.skipped is None and row.fits is not None and not _is_offloaded(run)
    ]
    ran: dict[tuple[object, ...], list[MeasuredRun]] = {}
    for run, row in known:
        if row.fits:
            ran.setdefault(_memory_key(run), []).append(run)
    failed = [
        row
        for run, row in known
        if not row.fits and not any(_holds_no_less(other, run) for other in ran.get(_memory_key(run), ()))
    ]
    fitting = [row for _, row in known if row.fits]
    return Outcomes(ran=fitting, out_of_memory=failed, ended_otherwise=len(known) - len(fitting) - len(failed))


def score_fits(pairs: Iterable[tuple[MeasuredRun | UnusableRow, RunPrediction]]) -> FitScore:
    """Return for how many runs it was predicted whether they run or run out of memory."""
    ended = outcomes(pairs)
    return FitScore(
        ran=len(ended.ran),
        ran_predicted=sum(row.predicted_fits is True for row in ended.ran),
        out_of_memory=len(ended.out_of_memory),
        out_of_memory_predicted=sum(row.predicted_fits is False for row in ended.out_of_memory),
        ended_otherwise=ended.ended_otherwise,
        by_risk=tuple(_risk_bin(ended, low, high) for low, high in pairwise(RISKS)),
    )


def _risk_bin(ended: Outcomes, low: float, high: float) -> RiskBin:
    by_source: dict[str, list[bool]] = {}
    for has_failed, rows in ((True, ended.out_of_memory), (False, ended.ran)):
        for row in rows:
            if row.out_of_memory_risk is not None and low <= row.out_of_memory_risk < high:
                by_source.setdefault(row.source, []).append(has_failed)
    return RiskBin(
        low=low,
        high=high,
        rows=sum(map(len, by_source.values())),
        failed=sum(map(sum, by_source.values())),
        failed_share_of_sources=fmean(fmean(each) for each in by_source.values()) if by_source else None,
    )


def _is_offloaded(run: MeasuredRun) -> bool:
    return "offload" in run.nonstandard_features.lower()


def _memory_key(run: MeasuredRun) -> tuple[object, ...]:
    """Return what has to be equal for the memory of two runs to be compared without predicting it."""
    shapes = (run.model_name, run.params_b, run.layers, run.hidden, run.seq_len, run.vocab)
    software = (run.framework, run.precision, run.recompute, run.nonstandard_features)
    return (run.gpu, *shapes, *software)


def _holds_no_less(one: MeasuredRun, other: MeasuredRun) -> bool:
    """Return whether each GPU of a run holds at least as much as in another: no more split, in batches no smaller."""
    degrees = all((getattr(one, name) or 1) <= (getattr(other, name) or 1) for name in ("num_gpus", "tp", "pp", "cp"))
    is_whole = all(
        (getattr(one, name) or 0) <= (getattr(other, name) or 0) for name in ("zero_stage", "sequence_parallel")
    )
    batches = (one.micro_batch or 1) >= (other.micro_batch or 1)
    return degrees and is_whole and batches and _share_in_flight(one) >= _share_in_flight(other)


def _share_in_flight(run: MeasuredRun) -> float:
    """Return of how many of the model's layers a first pipeline stage keeps a micro-batch's activations, as a share."""
    pp = run.pp or 1
    ranks = run.num_gpus / (pp * (run.tp or 1) * (run.cp or 1))
    return min(pp, run.num_microbatches or run.global_batch / ranks / (run.micro_batch or 1)) / pp


def rank_correlation(first: Floats, second: Floats) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank, and 0 where one side has no order."""
    ranks = [_mean_ranks(values) for values in (first, second)]
    centred = [values - values.mean() for values in ranks]
    norm = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum() / norm) if norm else 0.0


def _framework_group(row: RunPrediction) -> str:
    return row.framework if row.is_known_framework else UNKNOWN_FRAMEWORK


def _grouped(pairs: Sequence[tuple[str, float]]) -> dict[str, ErrorSummary]:
    groups: dict[str, list[float]] = {}
    for name, value in pairs:
        groups.setdefault(name, []).append(value)
    return {name: summarize(values) for name, values in sorted(groups.items())}


def _sweep_key(run: MeasuredRun) -> tuple[object, ...]:
    named = run.model_name if run.hidden is None else ""
    model = (named, run.layers, run.hidden, run.heads, run.kv_heads, run.ffn_hidden, run.seq_len)
    return (run.source, *model, run.gpu, run.num_gpus, run.precision, run.framework)


def _sweep(rows: Sequence[tuple[MeasuredRun, RunPrediction]], *, at_one_batch: bool) -> Sweep | None:
    times: dict[str, list[tuple[float, float]]] = {}
    for run, row in rows:
        steps = (row.predicted_step_time_s or 0.0, row.measured_step_time_s or 0.0)
        times.setdefault(row.plan, []).append((steps[0] / run.global_batch, steps[1] / run.global_batch))
    predicted, measured = np.array([np.mean(pairs, axis=0) for pairs in times.values()]).T
    if len(predicted) < FEWEST_ROWS:
        return None
    run = rows[0][0]
    chosen = float(measured[predicted <= predicted.min() * (1 + SAME_PREDICTION)].mean())
    model = run.model_name if run.hidden is None else f"{run.layers} x {run.hidden}"
    return Sweep(
        name=f"{run.source}: {model}{f', batch {run.global_batch}' * at_one_batch} on {run.num_gpus} {run.gpu}",
        rows=len(predicted),
        rank_correlation=rank_correlation(predicted, measured),
        top1_regret=chosen / float(measured.min()) - 1,
    )


def _mean_ranks(values: Floats) -> Floats:
    order = np.sort(values)
    return (np.searchsorted(order, values, side="left") + np.searchsorted(order, values, side="right") - 1) / 2
