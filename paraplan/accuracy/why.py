"""Which one factor would explain most of a source's errors: `SourceFactors`, as `paraplan validate --why` shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paraplan.accuracy.calibration import Calibration
from paraplan.accuracy.factors import KNOBS, LATENCY, PARTS, CalibrationRun, FactorName, RunPrices
from paraplan.accuracy.measured_runs import MeasuredRun
from paraplan.accuracy.prediction import estimate_run, predict_run
from paraplan.accuracy.run_workload import BundledData, plan_of_run, workload_of_run
from paraplan.cost.plan_table import Floats
from paraplan.cost.workload import Workload
from paraplan.plan.memory_record import MEMORY_PARTS
from paraplan.progress import is_stopped, say
from paraplan.records import Record

MOST_RUNS = 24
"""Runs of a source that are looked at: each is priced a hundred times."""

_STEPS = ((-2.0, -1.0, 1.0, 2.0), (-0.5, 0.5), (-0.25, 0.25))
"""Scales that are tried, as logarithms to base 2, each round around the best of those before."""
_MOST = 2.0
_WORTH_NAMING = 0.1
"""A factor that takes less of the mean error than this share explains nothing."""

MEMORY_TITLES = {
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "optimizer_state_bytes": "optimizer state",
    "activation_bytes": "activations",
    "workspace_bytes": "workspaces",
    "beside_bytes": "allocator, context and buffers",
}
"""Parts of a peak by their titles; the last is what the device holds beside tensors."""


_PEAK_BYTES = ("predicted_bytes", "measured_bytes")


class FactorEffect(Record):
    """One factor, the scale at which a source's mean error is least, and that error."""

    factor: str
    """Name of the factor."""
    title: str
    """Name of the factor in print."""
    scale: float
    """The number that the constant is multiplied by, 1/4 to 4."""
    error: float
    """The mean of |predicted / measured - 1| then."""


class SourceFactors(Record):
    """The errors of one source under each factor alone."""

    source: str
    """The source of the runs."""
    quantity: Literal["step time", "peak memory"]
    """The predicted quantity."""
    runs: int
    """Runs that were looked at."""
    error: float
    """Their mean error as predicted."""
    effects: tuple[FactorEffect, ...]
    """All factors, the one that leaves the least error first."""

    @property
    def best(self) -> FactorEffect | None:
        """The factor that explains most, None where none explains a tenth of the mean error."""
        first = self.effects[0]
        return first if first.error < self.error * (1 - _WORTH_NAMING) else None


def source_factors(
    runs: Sequence[MeasuredRun],
    data: BundledData,
    *,
    calibration: Calibration | None = None,
    most_runs: int = MOST_RUNS,
) -> list[SourceFactors]:
    """Return by source what each factor would make of its step times and of its peaks; one that was not measured not.

    `most_runs` of a source are looked at, spread evenly over its rows. Where the work is stopped, the sources so far
    are returned. Raises `ParaplanError` for runs that cannot be predicted.
    """
    found, sources = list[SourceFactors](), sorted({run.source for run in runs})
    for number, source in enumerate(sources):
        if is_stopped():
            break
        say(f"scaling one factor after the other, {source}, {number} of {len(sources)} sources")
        own = [run for run in runs if run.source == source]
        if timed := _spread([run for run in own if run.measured_step_time_s is not None], most_runs):
            found.append(step_time_factors(source, [_priced(run, data, calibration) for run in timed]))
        if held := _spread([run for run in own if run.measured_peak_mem_gib is not None], most_runs):
            found.append(memory_factors(source, [_peak(run, data, calibration) for run in held]))
    return found


def _spread(runs: list[MeasuredRun], most_runs: int) -> list[MeasuredRun]:
    places = np.linspace(0, max(0, len(runs) - 1), min(len(runs), most_runs))
    return [runs[place] for place in np.round(places).astype(int).tolist()]


def _workload(run: MeasuredRun, data: BundledData, calibration: Calibration | None) -> Workload:
    workload = workload_of_run(run, data)
    return workload if calibration is None else calibration.applied_to(workload)


def _priced(run: MeasuredRun, data: BundledData, calibration: Calibration | None) -> CalibrationRun:
    workload = _workload(run, data, calibration)
    plan = estimate_run(run, workload, plan_of_run(run, workload.framework)).plan
    return CalibrationRun(workload, plan, run.measured_step_time_s or 0.0)


def _peak(run: MeasuredRun, data: BundledData, calibration: Calibration | None) -> PeakParts:
    workload = _workload(run, data, calibration)
    plan = plan_of_run(run, workload.framework)
    predicted = predict_run(run, workload, plan)
    fullest = max(estimate_run(run, workload, plan).memory, key=lambda stage: stage.total_bytes)
    parts = {name: float(getattr(fullest, name)) for name in MEMORY_PARTS}
    shown = float(predicted.predicted_peak_memory_bytes or 0)
    parts["beside_bytes"] = max(0.0, shown - sum(parts.values()))
    return PeakParts(parts, shown, float(predicted.measured_peak_memory_bytes or 0))


def step_time_factors(source: str, runs: Sequence[CalibrationRun]) -> SourceFactors:
    """Return what each constant and part of a step would make of the step times of some runs."""
    prices = RunPrices(runs)
    measured = np.array([run.measured_step_time_s for run in runs])
    titles: dict[FactorName, str] = {knob.name: knob.title for knob in KNOBS} | {"latency": LATENCY} | PARTS

    def with_factor(name: FactorName) -> Callable[[float], Floats]:
        return lambda scale: prices.times({name: scale}) / measured

    return _found(source, "step time", prices.times({}) / measured, {t: (n, with_factor(n)) for n, t in titles.items()})


@dataclass(frozen=True, eq=False)
class PeakParts:
    """A predicted peak by the keys of `MEMORY_TITLES`, whole and as measured, in bytes."""

    parts: dict[str, float]
    predicted_bytes: float
    measured_bytes: float


def memory_factors(source: str, peaks: Sequence[PeakParts]) -> SourceFactors:
    """Return what each part of a peak would make of the peaks of some runs, at the point where they are highest."""
    predicted, measured = (np.array([getattr(one, name) for one in peaks]) for name in _PEAK_BYTES)

    def with_part(name: str) -> Callable[[float], Floats]:
        part = np.array([one.parts[name] for one in peaks])
        return lambda scale: np.asarray((predicted + (scale - 1) * part) / measured)

    factors = {title: (name, with_part(name)) for name, title in MEMORY_TITLES.items()}
    return _found(source, "peak memory", predicted / measured, factors)


def _found(
    source: str,
    quantity: Literal["step time", "peak memory"],
    ratios: Floats,
    factors: Mapping[str, tuple[str, Callable[[float], Floats]]],
) -> SourceFactors:
    effects, as_is = [], _mean_error(ratios)
    for title, (name, ratios_at) in factors.items():
        tried = {0.0: as_is}
        for steps in _STEPS:
            centre = min(tried, key=lambda log: tried[log])
            tried |= {log: _mean_error(ratios_at(2.0**log)) for step in steps if abs(log := centre + step) <= _MOST}
        # Of scales that do equally well the one nearest to 1.
        least = min(tried, key=lambda log: (round(tried[log], 6), abs(log)))
        effects.append(FactorEffect(factor=name, title=title, scale=2.0**least, error=tried[least]))
    effects.sort(key=lambda effect: effect.error)
    return SourceFactors(source=source, quantity=quantity, runs=len(ratios), error=as_is, effects=tuple(effects))


def _mean_error(ratios: Floats) -> float:
    return float(np.mean(np.abs(ratios - 1)))
