"""How far predictions may be off: ranges of step times and risks of memory, from errors on runs that were not known.

A source that was written down before anything was predicted of it keeps its first predictions
(`profiles/runs/first_predictions.csv`): what its errors taught the cost model since makes it no longer unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Literal, Self, get_args

import numpy as np

from paraplan.accuracy.history import effect_of_history, history_in_words
from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.lower_bounds import lower_bound_reason
from paraplan.cost.plan_table import Floats
from paraplan.cost.workload import Workload
from paraplan.errors import ProfileError
from paraplan.plan.parallel import ParallelPlan
from paraplan.records import Record
from paraplan.resources import profiles_folder

SHARE = 0.8
"""The share of runs that a range is to hold."""

Evidence = Literal["measured", "partly measured", "not measured"]
"""Whether published runs measured a framework on a GPU, one of the two (or both, apart), or neither."""

Peak = Literal["allocated", "reserved", "device"]
"""Where a peak is read: of tensors, of torch's allocator, of the whole GPU."""

_TAILS = tuple(round(0.0025 * step, 4) for step in range(20, 61))
"""Shares of runs beyond each end of a range that are tried: ends made of few sources hold less than they promise."""
_FEWEST_SOURCES = 8
"""With fewer sources the ends of a range would be those of one or two: the class with more evidence is joined."""

_SCORING_STEPS, _LARGEST_STEP, _LAST_STEP = 100, 1.0, 1e-5
"""Fisher scoring converges in ten to thirty steps; they are cut because the first may overshoot."""
_HIGHEST_RISKS = tuple(round(0.01 * step, 2) for step in range(70, 101))
"""The highest risks that are tried for plans of any size."""
_SMALLEST_VARIANCE = 1e-12

Ratio = tuple[str, float]
"""A source and measured / predicted of one of its runs."""


class Errors(Record):
    """Factors that predictions are multiplied by to hold `SHARE` of runs, counted by rows and as the mean over sources.

    The ends are quantiles of measured / predicted, equal shares beyond each: as many as make ranges without a source
    hold `SHARE` of its runs, by the count that is further off. A source weighs the root of its rows, the geometric mean
    of what it weighs in the two counts. With the same weight for all no range of sixteen sources may hold both: runs of
    a large source that is left out are then told by the smallest ones.
    """

    rows: int
    """Runs."""
    sources: int
    """Their sources."""
    low: float
    """The lower end."""
    high: float
    """The upper end."""
    held_rows: float
    """The share of runs in ranges that were made without their source."""
    held_sources: float
    """The mean over sources of this share."""

    @classmethod
    def of(cls, ratios: Sequence[Ratio]) -> Self:
        """Return the range of some runs, of at least two sources."""
        names, source_of, counts = np.unique([source for source, _ in ratios], return_inverse=True, return_counts=True)
        values = np.array([value for _, value in ratios])
        order = np.argsort(values, kind="stable")
        values, source_of = values[order], source_of[order]
        logs, weights = np.log(values), np.sqrt(1 / counts)[source_of]
        held = np.empty((len(names), len(_TAILS)))  # of each source, in the range that the others make
        for source in range(len(names)):
            is_own = source_of == source
            low, high = _ends(logs[~is_own], weights[~is_own])
            own = values[is_own][:, None]
            held[source] = ((low <= own) & (own <= high)).mean(axis=0)
        by_rows, by_sources = np.average(held, axis=0, weights=counts), held.mean(axis=0)
        tail = int(np.argmin(np.maximum(np.abs(by_rows - SHARE), np.abs(by_sources - SHARE))))
        lowest, highest = (round(float(ends[tail]), 3) for ends in _ends(logs, weights))
        return cls(
            rows=len(ratios),
            sources=len(names),
            low=lowest,
            high=highest,
            held_rows=round(float(by_rows[tail]), 3),
            held_sources=round(float(by_sources[tail]), 3),
        )

    @property
    def range(self) -> tuple[float, float]:
        """Both ends."""
        return self.low, self.high


def _ends(logs: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return the lower and the upper ends of ranges of rising `logs`, one for each share in `_TAILS` beyond either."""
    reached = (np.cumsum(weights) - weights / 2) / weights.sum()
    tails = np.array(_TAILS)
    return np.exp(np.interp(tails, reached, logs)), np.exp(np.interp(1 - tails, reached, logs))


class MemoryRisk(Record):
    """The share of runs that ran out of memory, by what torch's allocator was predicted to take of the GPU.

    A logistic line in the logarithm of what is taken, as a share of the GPU's memory, times the risk of a plan of any
    size: some runs that are told as far too large ran, because their source left out what made them smaller, and
    without that share they would make the line flat where plans are near the limit. Made of runs of sources that
    publish failures: those that publish successes alone say nothing of how often plans fail.
    """

    log_odds_when_full: float
    """Logarithm of the odds of failing where the allocator takes all memory of the GPU."""
    slope: float
    """More for e times as much."""
    highest: float
    """The risk of a plan that is told as far too large."""
    rows: int
    """Runs from which it was made, of any quality."""
    failed: int
    """Runs among `rows` that ran out of memory."""

    @classmethod
    def of(cls, runs: Sequence[tuple[float, bool]]) -> Self:
        """Return the risk from pairs of the share that was predicted and whether the run failed.

        Raises `ValueError` where all ended alike, or failures and the others are told apart by a share: no line fits.
        """
        shares, failed = (np.array(values, dtype=float) for values in zip(*runs, strict=True))
        if failed.all() or not failed.any() or shares[failed > 0].min() > shares[failed == 0].max():
            raise ValueError("runs that failed and runs that did not are told apart by their share: no line fits")
        fits = [(*_fitted_line(np.log(shares), failed, highest=each), each) for each in _HIGHEST_RISKS]
        _, line, highest = max(fits, key=lambda fit: fit[0])
        when_full, slope = (round(float(value), 3) for value in line)
        return cls(log_odds_when_full=when_full, slope=slope, highest=highest, rows=len(runs), failed=int(failed.sum()))

    def at(self, share: float, *, width: float = 1.0) -> float:
        """Return the risk where the allocator is predicted to take `share` of the GPU's memory.

        `width` is how far the logarithm of a peak strays beside what it does in the runs behind the line.
        """
        log_odds = self.log_odds_when_full + self.slope * math.log(share)
        return float(self.highest / (1 + np.exp(-np.clip(log_odds / width, -50, 50))))


def _fitted_line(inputs: Floats, failed: Floats, *, highest: float) -> tuple[float, Floats]:
    """Return the log likelihood and the line of a logistic regression whose probabilities end at `highest`."""
    columns, line = np.stack([np.ones_like(inputs), inputs], axis=1), np.zeros(2)
    for _ in range(_SCORING_STEPS):
        share = 1 / (1 + np.exp(-np.clip(columns @ line, -50, 50)))
        expected, change = highest * share, highest * share * (1 - share)
        variance = np.maximum(expected * (1 - expected), _SMALLEST_VARIANCE)
        information = (columns * (change**2 / variance)[:, None]).T @ columns
        step = np.linalg.solve(information, columns.T @ ((failed - expected) * change / variance))
        line = line + np.clip(step, -_LARGEST_STEP, _LARGEST_STEP)
        if np.abs(step).max() < _LAST_STEP:
            break
    expected = np.clip(
        highest / (1 + np.exp(-np.clip(columns @ line, -50, 50))), _SMALLEST_VARIANCE, 1 - _SMALLEST_VARIANCE
    )
    return float(np.sum(failed * np.log(expected) + (1 - failed) * np.log(1 - expected))), line


class AccuracyTable(Record):
    """The errors that are known, as `scripts/trust_table.py` writes them to `profiles/accuracy.json`."""

    measured: dict[str, dict[str, int]]
    """By framework the GPUs on which its step times were measured, with the number of sources."""
    step_time: dict[Evidence, Errors]
    """Errors of step times, by what was measured before."""
    memory: dict[Peak, Errors]
    """Errors of memory peaks, by what is read."""
    memory_risk: MemoryRisk
    """The risk of running out of memory."""


class StepRange(Record):
    """Where a measured step time lies in `SHARE` of cases, and what that rests on."""

    low_s: float
    """The lower end."""
    high_s: float
    """The upper end."""
    evidence: Evidence
    """The measurements that there are of this framework on this GPU."""
    rows: int
    """Runs from whose errors the range was made."""
    sources: int
    """Their sources."""
    in_words: str
    """The class and what it rests on, as answers print it."""


def evidence_of(framework: str, gpu: str, measured: Mapping[str, Mapping[str, int]]) -> Evidence:
    """Return what was measured of a framework on a GPU, both by the names of their profiles."""
    if gpu in measured.get(framework, {}):
        return "measured"
    is_known = framework in measured or any(gpu in gpus for gpus in measured.values())
    return "partly measured" if is_known else "not measured"


def errors_by_evidence(ratios: Iterable[tuple[Evidence, Ratio]]) -> dict[Evidence, Errors]:
    """Return the errors of each class; one of few sources takes those of the class before it too."""
    by_class: dict[Evidence, list[Ratio]] = {kind: [] for kind in get_args(Evidence)}
    for kind, ratio in ratios:
        by_class[kind].append(ratio)
    found, before = dict[Evidence, Errors](), list[Ratio]()
    for kind, own in by_class.items():
        joined = own if len({source for source, _ in own}) >= _FEWEST_SOURCES else [*before, *own]
        if joined:
            found[kind] = Errors.of(joined)
        before = joined
    return found


@cache
def load_accuracy() -> AccuracyTable:
    """Return the table that comes with paraplan. Raises `ProfileError` for a damaged installation."""
    path = profiles_folder() / "accuracy.json"
    try:
        return AccuracyTable.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ProfileError(f"cannot read {path}: {error}", hint="install paraplan again") from None


def step_range(workload: Workload, estimate: PlanEstimate, *, is_known_framework: bool = True) -> StepRange | None:
    """Return where the measured step would lie; None for CPUs, which are calibrated instead, and for lower bounds.

    The user's own runs of plans that are alike make it narrower: its ends are powers of what they are without these.
    Every range that is printed, written or compared comes from here. `is_known_framework` is False where the workload's
    framework stands for one that no profile describes.
    """
    if workload.cluster.gpu.vendor == "cpu" or lower_bound_reason(workload, estimate.plan) is not None:
        return None
    table, framework, gpu = load_accuracy(), workload.framework, workload.cluster.gpu
    evidence = evidence_of(framework.name if is_known_framework else "", gpu.name, table.measured)
    errors = table.step_time[evidence]
    effect = effect_of_history(workload, estimate.plan)
    low, high = (end ** (effect.step_time_width if effect else 1.0) for end in errors.range)
    own = history_in_words(effect)
    return StepRange(
        low_s=low * estimate.step.step_time_s,
        high_s=high * estimate.step.step_time_s,
        evidence=evidence,
        rows=errors.rows,
        sources=errors.sources,
        in_words=f"{own}; range from those" if own else f"{SHARE:.0%} range: {_in_words(workload, table)}",
    )


def memory_range(workload: Workload, plan: ParallelPlan, peak_bytes: float, reading: Peak) -> tuple[int, int] | None:
    """Return between what a measured peak of a plan would lie in `SHARE` of cases; None for CPUs."""
    if workload.cluster.gpu.vendor == "cpu":
        return None
    effect = effect_of_history(workload, plan)
    low, high = (end ** (effect.memory_width if effect else 1.0) for end in load_accuracy().memory[reading].range)
    return round(low * peak_bytes), round(high * peak_bytes)


def _in_words(workload: Workload, table: AccuracyTable) -> str:
    """Return what was measured of the framework and the GPU."""
    title, gpu = workload.framework.title, workload.cluster.gpu.name
    gpus = table.measured.get(workload.framework.name, {})
    is_known_gpu = any(gpu in each for each in table.measured.values())
    if gpu in gpus:
        count = gpus[gpu]
        return f"{title} on this GPU was measured by {count} source{'s' * (count != 1)}"
    if gpus:
        return (
            f"{title} was measured, and this GPU, not together"
            if is_known_gpu
            else f"{title} was measured, not this GPU"
        )
    return (
        f"this GPU was measured, not {title}"
        if is_known_gpu
        else f"neither {title} nor this GPU was measured, it may be wider"
    )


def out_of_memory_risk(workload: Workload, estimate: PlanEstimate) -> float | None:
    """Return the share of measured runs predicted as full that ran out of memory; None for CPUs."""
    if workload.cluster.gpu.vendor == "cpu":
        return None
    share = estimate.cached_device_bytes / workload.cluster.gpu_memory_bytes
    effect = effect_of_history(workload, estimate.plan)
    return load_accuracy().memory_risk.at(share, width=effect.memory_width if effect else 1.0)
