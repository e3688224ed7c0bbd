"""A handful of constants fitted to measured runs, with priors around their sourced values: `Calibration`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from paraplan.accuracy.factors import KNOBS, CalibrationRun, FactorName, RunPrices, scaled
from paraplan.accuracy.measured_runs import MeasuredRun
from paraplan.accuracy.prediction import estimate_run
from paraplan.accuracy.run_workload import BundledData, plan_of_run, workload_of_run
from paraplan.accuracy.shared_errors import load_shared_errors
from paraplan.cost.correction import CorrectedRun, RunCorrection, SharedErrors
from paraplan.cost.plan_table import Floats, PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError, PlanError
from paraplan.records import Record

FEWEST_RUNS = 3
NOISE = 0.08
"""Standard deviation of log(measured / predicted) that a right set of constants would leave: what the form of the model
and the clock of a shared machine are taken to be off by."""

_STEP, _ROUNDS = 0.02, 8


class FittedConstant(Record):
    """One constant after a fit: `factor` times its sourced value; `log_sd` is the uncertainty of its logarithm."""

    name: FactorName
    title: str
    prior_log_sd: float
    prior_source: str
    factor: float = Field(gt=0)
    log_sd: float


class Calibration(Record):
    """Constants fitted to the step times of runs, and what the fit is worth.

    Errors are means of |predicted / measured - 1| over the runs: before the fit, after it, and of each run by the fit
    to all others (leave-one-out, to first order of the fit). `gpus` and `frameworks` are those of the runs.
    """

    kind: Literal["paraplan calibration"] = "paraplan calibration"
    constants: tuple[FittedConstant, ...]
    num_runs: int
    skipped: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    frameworks: tuple[str, ...] = ()
    error_before: float
    error_after: float
    error_left_out: float
    source: str
    correction: RunCorrection | None = None
    """The rest of the runs' errors, for plans that are alike; None in files of earlier releases."""

    @property
    def is_worth_it(self) -> bool:
        """True where runs left out of the fit are predicted better than without it."""
        return self.error_left_out < self.error_before

    def applied_to(self, workload: Workload) -> Workload:
        """Return `workload` priced with the fitted constants."""
        made = scaled(workload, {constant.name: constant.factor for constant in self.constants})
        return replace(made, correction=self.correction)


def calibrate_to_runs(runs: Sequence[MeasuredRun], data: BundledData | None = None, *, source: str) -> Calibration:
    """Return the calibration to the step times of `runs`; runs without one, or that cannot be priced, are skipped.

    `source` says where the runs are from, `data` what their names mean. Raises `PlanError` for fewer than
    three runs that can be used.
    """
    usable, skipped, used = [], [], []
    data = data or BundledData()
    for run in map(data.completed, runs):
        try:
            if run.measured_step_time_s is None:
                raise PlanError("no step time was measured", hint="fill in measured_step_time_s")
            workload = workload_of_run(run, data)
            plan = estimate_run(run, workload, plan_of_run(run, workload.framework)).plan
            usable.append(CalibrationRun(workload, plan, run.measured_step_time_s))
            used.append(run)
        except (ParaplanError, ValidationError) as error:
            reason = error.message if isinstance(error, ParaplanError) else error.errors()[0]["msg"]
            skipped.append(f"{run.id}: {reason}")
    fitted = calibrate(usable, source=source)
    return fitted.replace(
        skipped=tuple(skipped),
        gpus=tuple(sorted({run.gpu for run in used})),
        frameworks=tuple(sorted({run.framework for run in used})),
    )


def calibrate(runs: Sequence[CalibrationRun], *, source: str) -> Calibration:
    """Return the most likely constants under the priors of `KNOBS`: robust Gauss-Newton on the logarithm of step times.

    Of the errors that they leave, runs that are alike are taken to share a part (`RunCorrection`). Raises `PlanError`
    for fewer than three runs.
    """
    if len(runs) < FEWEST_RUNS:
        raise PlanError(
            f"{len(runs)} runs are too few to calibrate to: {FEWEST_RUNS} is the least",
            hint="give runs of several plans on the same machines, with measured_step_time_s",
        )
    measured = np.log([run.measured_step_time_s for run in runs])
    priced = RunPrices(runs)
    point = np.zeros(len(KNOBS))
    start = measured - priced.log_times(point)
    precision = np.diag([1 / knob.log_sd**2 for knob in KNOBS])
    for _ in range(_ROUNDS):
        residual, slope = _linear(priced.log_times, point, measured)
        weight = _weights(residual, NOISE)
        hessian = slope.T @ (weight[:, None] * slope) + precision
        step = np.linalg.solve(hessian, slope.T @ (weight * residual) - precision @ point)
        point = point + np.clip(step, -0.5, 0.5)
        if np.abs(step).max() < _STEP / 10:
            break
    residual, slope = _linear(priced.log_times, point, measured)
    weight = _weights(residual, NOISE)
    hessian = slope.T @ (weight[:, None] * slope) + precision
    spread = np.sqrt(np.diag(np.linalg.inv(hessian)))
    shared = _Shared.of(runs, residual)
    return Calibration(
        constants=tuple(
            FittedConstant(
                name=knob.name,
                title=knob.title,
                prior_log_sd=knob.log_sd,
                prior_source=knob.source,
                factor=float(np.exp(value)),
                log_sd=float(sd),
            )
            for knob, value, sd in zip(KNOBS, point, spread, strict=True)
        ),
        num_runs=len(runs),
        error_before=_mean_error(start),
        error_after=_mean_error(residual - shared.likeness @ shared.weights),
        error_left_out=_mean_error(_left_out(residual + slope @ point, slope, shared)),
        source=source,
        correction=shared.correction,
    )


@dataclass(frozen=True, eq=False)
class _Shared:
    """The share of errors left by constants that runs which are alike have in common."""

    errors: SharedErrors
    kinds: list[str]
    sizes: Floats
    likeness: Floats
    """Covariance of what they share."""
    own: Floats
    """Variance of what each does not."""
    weights: Floats
    """Weights of the correction, one a run."""

    @classmethod
    def of(cls, runs: Sequence[CalibrationRun], residual: Floats) -> _Shared:
        errors = load_shared_errors().step_time
        kinds = [run.workload.run_kind for run in runs]
        sizes = np.concatenate([run.workload.run_sizes(PlanTable.of_plans([run.plan])) for run in runs])
        is_same = np.array(kinds)[:, None] == np.array(kinds)[None, :]
        likeness = np.asarray(is_same * errors.covariance(sizes, sizes), dtype=np.float64)
        own = np.full(len(runs), errors.own_log_sd**2)
        for _ in range(_ROUNDS):
            common = likeness @ np.linalg.solve(likeness + np.diag(own), residual)
            own = np.asarray(1 / _weights(residual - common, errors.own_log_sd), dtype=np.float64)
        weights = np.asarray(np.linalg.solve(likeness + np.diag(own), residual), dtype=np.float64)
        return cls(errors, kinds, sizes, likeness, own, weights)

    @property
    def correction(self) -> RunCorrection:
        """The correction of other plans."""
        runs = zip(self.kinds, self.sizes.tolist(), self.weights.tolist(), strict=True)
        return RunCorrection(
            shared=self.errors,
            runs=tuple(CorrectedRun(kind=kind, sizes=tuple(sizes), weight=weight) for kind, sizes, weight in runs),
        )


def read_calibration(text: str, *, source: str) -> Calibration:
    """Return the calibration of a file's text; raise `PlanError` for text that holds none."""
    hint = "a calibration is what `paraplan calibrate --runs runs.csv -o FILE` writes"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{source} is not JSON: {error}", hint=hint) from None
    try:
        return Calibration.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        what = first["msg"] if where else "a calibration is a JSON object"
        raise PlanError(f"{source} holds no calibration: {where}{what}", hint=hint) from None


def _linear(log_times: Callable[[Floats], Floats], point: Floats, measured: Floats) -> tuple[Floats, Floats]:
    """Return the residuals of `measured` at a point and the slope of the predictions there, `[runs, knobs]`."""
    here = log_times(point)
    columns = [(log_times(point + _STEP * one) - here) / _STEP for one in np.eye(len(point))]
    return measured - here, np.stack(columns, axis=1)


def _weights(residual: Floats, noise: float) -> Floats:
    """Return the weight of each run: a run far off counts less than its square would (soft L1)."""
    return np.asarray(1 / noise**2 / np.sqrt(1 + (residual / (2 * noise)) ** 2))


def _left_out(start: Floats, slope: Floats, shared: _Shared) -> Floats:
    """Return the residual of each run under the fit to all others, to first order.

    `start` is what runs are off by before the fit (Rasmussen and Williams 2006, eq. 5.12).
    """
    priors = np.diag([knob.log_sd**2 for knob in KNOBS])
    inverse = np.linalg.inv(slope @ priors @ slope.T + shared.likeness + np.diag(shared.own))
    return np.asarray(inverse @ start / np.diag(inverse))


def _mean_error(residual: Floats) -> float:
    return float(np.mean(np.abs(np.exp(-residual) - 1)))
