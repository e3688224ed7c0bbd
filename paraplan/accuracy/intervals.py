"""How far predictions may be off: intervals from the residuals of measured runs, tried on sources left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Self

import numpy as np

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.framework_files import load_framework
from paraplan.cost.lower_bounds import lower_bound_reason
from paraplan.cost.workload import Workload
from paraplan.errors import ProfileError
from paraplan.records import Record
from paraplan.resources import profiles_folder

if TYPE_CHECKING:  # measured runs, which the interval of a prediction does without
    from paraplan.accuracy.run_prediction import RunPrediction

SHARE = 0.8
"""The share of runs that an interval is to hold."""

_TAIL = 0.08
"""What is cut off at each end of the residuals. A tenth would hold 80 % of the rows that it comes from, and fewer of a
source that it has not seen; 0.08 holds 80 % of these (`AccuracyTable.coverage`)."""

_QUANTILES = 101
_FEWEST_SOURCES = 3
ALL = "all"


class Residuals(Record):
    """Measured divided by predicted, over runs: `quantiles` from the least to the largest in equal steps of share."""

    rows: int
    sources: int
    quantiles: tuple[float, ...]

    @classmethod
    def of(cls, ratios: Sequence[tuple[str, float]]) -> Self:
        """Return the residuals of (source, measured / predicted). A source of n rows weighs as the square root of n.

        Rows of one source are alike, so that its hundredth says less than the first of another.
        """
        counts = Counter(source for source, _ in ratios)
        values = np.array([value for _, value in ratios])
        weights = np.array([counts[source] ** -0.5 for source, _ in ratios])
        order = np.argsort(values)
        reached = np.cumsum(weights[order]) / weights.sum()
        places = np.searchsorted(reached, np.linspace(0, 1, _QUANTILES) * (1 - 1e-9))
        quantiles = tuple(round(float(value), 4) for value in values[order][places])
        return cls(rows=len(ratios), sources=len(counts), quantiles=quantiles)

    @property
    def interval(self) -> tuple[float, float]:
        """What a prediction is multiplied by to hold `SHARE` of runs, of sources that it has not seen."""
        ends = np.interp([_TAIL, 1 - _TAIL], np.linspace(0, 1, len(self.quantiles)), self.quantiles)
        return float(ends[0]), float(ends[1])

    def share_above(self, ratio: float) -> float:
        """Return the share of runs that measured more than `ratio` times what was predicted."""
        return 1 - float(np.interp(ratio, self.quantiles, np.linspace(0, 1, len(self.quantiles))))


class FittedErrors(Record):
    """Mean errors of a source's step times if every prediction were multiplied by one factor.

    The factor is the median of measured / predicted over runs of the same family of frameworks, or over all, a source
    of n runs weighing as in `Residuals`. Nothing is multiplied so anywhere else: what this gains on sources left out is
    what a fit could, and what it gains more in sample is what a fit would only seem to.
    """

    as_predicted: float
    in_sample: float
    """With a factor of all sources, this one among them."""
    left_out: float
    """With a factor of all other sources."""


class AccuracyTable(Record):
    """What the residuals of measured runs say, as `scripts/trust_table.py` writes it to `profiles/accuracy.json`."""

    step_time: dict[str, Residuals]
    """By family of frameworks, and of all."""
    memory: Residuals
    """Of peaks that the allocator reported."""
    gpus: dict[str, int]
    """Runs of each kind of GPU."""
    coverage: float
    """The share of rows that lie in intervals made without their source, weighed as in `Residuals`."""
    coverage_of_rows: float
    """The same with all rows alike: it is that of the two or three largest sources."""
    coverage_of_sources: float
    """The mean over sources."""


class Interval(Record):
    """Where a measured step time lies in `SHARE` of cases, and what that rests on."""

    low_s: float
    high_s: float
    rows: int
    sources: int
    basis: str
    """Whose runs: a family of frameworks, or all."""
    is_validated_gpu: bool
    """True where runs on this kind of GPU are among them."""


def accuracy_of(scored: Iterable[RunPrediction], others: Iterable[RunPrediction]) -> AccuracyTable:
    """Return the table of predictions, with the coverage of sources left out.

    Step times are those of rows that are scored, of frameworks that can be planned for. Peaks come from the others too:
    what a plan does not express in them is in the time, and few rows tell what the allocator reported.
    """
    rows = [run for run in scored if run.step_time_error is not None and run.is_known_framework]
    memory = [
        (run.source, 1 / (1 + run.memory_error))
        for run in (*rows, *others)
        if run.memory_error is not None and run.memory_reading in ("max_allocated", "max_reserved")
    ]
    found = [_coverage(rows, source) for source in sorted({run.source for run in rows})]
    weighed = sum(held * count**-0.5 for held, count in found) / sum(count**0.5 for _, count in found)
    return AccuracyTable(
        step_time=_by_family(rows),
        memory=Residuals.of(memory),
        gpus=dict(sorted(Counter(run.gpu_profile for run in rows).items())),
        coverage=round(weighed, 3),
        coverage_of_rows=round(sum(held for held, _ in found) / len(rows), 3),
        coverage_of_sources=round(sum(held / count for held, count in found) / len(found), 3),
    )


def fitted_errors(scored: Iterable[RunPrediction]) -> dict[str, FittedErrors]:
    """Return by source what one factor, fitted with the source and without it, would make of its step times."""
    rows = [run for run in scored if run.step_time_error is not None]
    whole, found = _by_family(rows), {}
    for source in sorted({run.source for run in rows}):
        own = [run for run in rows if run.source == source]
        others = [run for run in rows if run.source != source]
        found[source] = FittedErrors(
            as_predicted=_mean_error(own, {}),
            in_sample=_mean_error(own, whole),
            left_out=_mean_error(own, _by_family(others) if others else {}),
        )
    return found


def _mean_error(rows: Sequence[RunPrediction], table: Mapping[str, Residuals]) -> float:
    """Return the mean error of step times multiplied by the median residual of each run's family, 1 without any."""
    errors = []
    for run in rows:
        residuals = table.get(_family(run), table.get(ALL))
        factor = residuals.quantiles[_QUANTILES // 2] if residuals else 1.0
        errors.append(abs(factor / _ratio(run)[1] - 1))
    return sum(errors) / len(errors)


def _by_family(rows: Sequence[RunPrediction]) -> dict[str, Residuals]:
    families = Counter(_family(run) for run in rows)
    found = {ALL: Residuals.of([_ratio(run) for run in rows])}
    for family in sorted(families):
        residuals = Residuals.of([_ratio(run) for run in rows if _family(run) == family])
        if residuals.sources >= _FEWEST_SOURCES:
            found[family] = residuals
    return found


def _coverage(rows: Sequence[RunPrediction], source: str) -> tuple[int, int]:
    """Return how many rows of a source lie in intervals made without it, and how many there are."""
    table = _by_family([run for run in rows if run.source != source])
    held = count = 0
    for run in rows:
        if run.source == source:
            low, high = table.get(_family(run), table[ALL]).interval
            held += low <= _ratio(run)[1] <= high
            count += 1
    return held, count


def _ratio(run: RunPrediction) -> tuple[str, float]:
    assert run.step_time_error is not None
    return run.source, 1 / (1 + run.step_time_error)


def _family(run: RunPrediction) -> str:
    return _family_of(run.framework_profile)


@cache
def _family_of(name: str) -> str:
    return load_framework(name).family or name


@cache
def load_accuracy() -> AccuracyTable:
    """Return the table that comes with paraplan. Raises `ProfileError` for a damaged installation."""
    path = profiles_folder() / "accuracy.json"
    try:
        return AccuracyTable.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ProfileError(f"cannot read {path}: {error}", hint="install paraplan again") from None


def step_interval(workload: Workload, estimate: PlanEstimate) -> Interval | None:
    """Return where the measured step would lie; None for CPUs, which are calibrated instead, and for lower bounds."""
    if workload.cluster.gpu.vendor == "cpu" or lower_bound_reason(workload, estimate.plan) is not None:
        return None
    table = load_accuracy()
    family = workload.framework.family or workload.framework.name
    basis = family if family in table.step_time else ALL
    residuals = table.step_time[basis]
    low, high = residuals.interval
    return Interval(
        low_s=low * estimate.step.step_time_s,
        high_s=high * estimate.step.step_time_s,
        rows=residuals.rows,
        sources=residuals.sources,
        basis=basis,
        is_validated_gpu=workload.cluster.gpu.name in table.gpus,
    )


def out_of_memory_probability(workload: Workload, estimate: PlanEstimate) -> float | None:
    """Return the share of measured runs in which a peak as predicted would have passed the usable memory.

    None for CPUs.
    """
    if workload.cluster.gpu.vendor == "cpu":
        return None
    return load_accuracy().memory.share_above(estimate.usable_memory_bytes / estimate.peak_memory_bytes)
