"""A handful of constants fitted to measured runs, with priors around their sourced values: `Calibration`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError

from paraplan.accuracy.measured_runs import MeasuredRun
from paraplan.accuracy.prediction import estimate_run
from paraplan.accuracy.run_workload import BundledData, plan_of_run, workload_of_run
from paraplan.cost.cost_model import CostModel
from paraplan.cost.estimate import step_times
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.plan_table import Floats, PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError, PlanError
from paraplan.hardware.link_speed import LinkSpeedTable
from paraplan.plan.parallel import ParallelPlan
from paraplan.records import Record

FEWEST_RUNS = 3
NOISE = 0.08
"""Standard deviation of log(measured / predicted) that a right set of constants would leave: what the form of the model
and the clock of a shared machine are taken to be off by."""

NETWORK_KINDS = ("rdma", "tcp")
_STEP, _ROUNDS = 0.02, 8

KnobName = Literal["matmul", "attention", "memory", "host", "node_links", "network", "optimizer"]


@dataclass(frozen=True)
class Knob:
    """One constant that a fit may multiply; `log_sd` is the standard deviation of its logarithm before the fit."""

    name: KnobName
    title: str
    log_sd: float
    source: str


KNOBS = (
    Knob("matmul", "matmul efficiency", 0.10, "best matmuls of one kind of GPU differ by 5 to 10 % (ml-engineering)"),
    Knob("attention", "attention kernels", 0.15, "spread of FlashAttention's published rates over shapes"),
    Knob("memory", "memory bandwidth", 0.15, "0.6 to 0.9 of the data sheet for kernels of usual sizes"),
    Knob("host", "host time per block", 0.40, "CPUs and frameworks differ by a factor of two"),
    Knob("node_links", "links inside a node", 0.15, "spread of nccl-tests results on one kind of link"),
    Knob("network", "network between nodes", 0.30, "0.5 to 1 of the NICs' rate, by topology and congestion"),
    Knob("optimizer", "optimizer step", 0.50, "fused, by lists or in a loop: 36 to 100 bytes a parameter"),
)


class FittedConstant(Record):
    """One constant after a fit: `factor` times its sourced value; `log_sd` is the uncertainty of its logarithm."""

    name: KnobName
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

    @property
    def is_worth_it(self) -> bool:
        """True where runs left out of the fit are predicted better than without it."""
        return self.error_left_out < self.error_before

    def applied_to(self, workload: Workload) -> Workload:
        """Return `workload` priced with the fitted constants."""
        return scaled(workload, {constant.name: constant.factor for constant in self.constants})


@dataclass(frozen=True, eq=False)
class CalibrationRun:
    """One run to fit to."""

    workload: Workload
    plan: ParallelPlan
    measured_step_time_s: float


def scaled(workload: Workload, factors: Mapping[KnobName, float]) -> Workload:
    """Return `workload` with each named constant multiplied; those that are not named stay. Raises nothing."""

    def factor(name: KnobName) -> float:
        return factors.get(name, 1.0)

    constants, framework = workload.constants, workload.framework
    return replace(
        workload,
        constants=constants.replace(
            matmul_efficiency=constants.matmul_efficiency * factor("matmul"),
            plain_matmul_efficiency=constants.plain_matmul_efficiency * factor("matmul"),
            eager_attention_efficiency=constants.eager_attention_efficiency * factor("attention"),
            flash_attention_factor=constants.flash_attention_factor * factor("attention"),
            memory_bandwidth_efficiency=constants.memory_bandwidth_efficiency * factor("memory"),
            fused_optimizer_bytes=constants.fused_optimizer_bytes * factor("optimizer"),
            unfused_optimizer_bytes=constants.unfused_optimizer_bytes * factor("optimizer"),
        ),
        framework=_with_host_time(framework, factor("host")),
        links=_scaled_links(workload.links, factors),
    )


def _with_host_time(framework: FrameworkProfile, factor: float) -> FrameworkProfile:
    data_parallel = framework.data_parallel
    return framework.changed(
        kernels={
            "host_s_per_block": framework.kernels.host_s_per_block * factor,
            "collective_host_s": framework.kernels.collective_host_s * factor,
        },
        data_parallel={
            "gather_host_s": data_parallel.gather_host_s * factor,
            "reduce_host_s": data_parallel.reduce_host_s * factor,
        },
    )


def calibrate_to_runs(runs: Sequence[MeasuredRun], data: BundledData | None = None, *, source: str) -> Calibration:
    """Return the calibration to the step times of `runs`; runs without one, or that cannot be priced, are skipped.

    `source` says where the runs are from, `data` what their names mean. Raises `PlanError` for fewer than
    three runs that can be used.
    """
    usable, skipped, used = [], [], []
    data = data or BundledData()
    for run in runs:
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

    Raises `PlanError` for fewer than three runs.
    """
    if len(runs) < FEWEST_RUNS:
        raise PlanError(
            f"{len(runs)} runs are too few to calibrate to: {FEWEST_RUNS} is the least",
            hint="give runs of several plans on the same machines, with measured_step_time_s",
        )
    measured = np.log([run.measured_step_time_s for run in runs])
    priced = _Prices(runs)
    point = np.zeros(len(KNOBS))
    start = measured - priced.log_times(point)
    precision = np.diag([1 / knob.log_sd**2 for knob in KNOBS])
    for _ in range(_ROUNDS):
        residual, slope = _linear(priced.log_times, point, measured)
        weight = _weights(residual)
        hessian = slope.T @ (weight[:, None] * slope) + precision
        step = np.linalg.solve(hessian, slope.T @ (weight * residual) - precision @ point)
        point = point + np.clip(step, -0.5, 0.5)
        if np.abs(step).max() < _STEP / 10:
            break
    residual, slope = _linear(priced.log_times, point, measured)
    weight = _weights(residual)
    hessian = slope.T @ (weight[:, None] * slope) + precision
    spread = np.sqrt(np.diag(np.linalg.inv(hessian)))
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
        error_after=_mean_error(residual),
        error_left_out=_mean_error(_left_out(residual, slope, weight, hessian)),
        source=source,
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


class _Prices:
    """Predicts all runs at once: those that share a workload as one table of plans."""

    def __init__(self, runs: Sequence[CalibrationRun]) -> None:
        groups: dict[tuple[str, ...], list[int]] = {}
        for index, run in enumerate(runs):
            workload = run.workload
            parts = (workload.model, workload.training, workload.cluster, workload.framework)
            groups.setdefault(tuple(part.model_dump_json() for part in parts), []).append(index)
        self._groups = [
            (
                np.array(rows),
                CostModel.of_workload(runs[rows[0]].workload),
                PlanTable.of_plans([runs[row].plan for row in rows]),
            )
            for rows in groups.values()
        ]
        self._count = len(runs)

    def log_times(self, point: Floats) -> Floats:
        """Return the logarithm of each run's predicted step time where the logarithms of the factors are `point`."""
        factors = {knob.name: float(np.exp(value)) for knob, value in zip(KNOBS, point, strict=True)}
        times = np.zeros(self._count)
        for rows, workload, table in self._groups:
            times[rows] = step_times(scaled(workload, factors), table).step_time_s
        return np.log(times)


def _scaled_links(links: LinkSpeedTable, factors: Mapping[KnobName, float]) -> LinkSpeedTable:
    kinds = []
    for kind in links.kinds:
        factor = factors.get("network" if kind.kind in NETWORK_KINDS else "node_links", 1.0)
        kinds.append(kind.replace(bus_efficiency={name: rate * factor for name, rate in kind.bus_efficiency.items()}))
    return links.replace(kinds=tuple(kinds))


def _linear(log_times: Callable[[Floats], Floats], point: Floats, measured: Floats) -> tuple[Floats, Floats]:
    """Return the residuals of `measured` at a point and the slope of the predictions there, `[runs, knobs]`."""
    here = log_times(point)
    columns = [(log_times(point + _STEP * one) - here) / _STEP for one in np.eye(len(point))]
    return measured - here, np.stack(columns, axis=1)


def _weights(residual: Floats) -> Floats:
    """Return the weight of each run: a run far off counts less than its square would (soft L1)."""
    return np.asarray(1 / NOISE**2 / np.sqrt(1 + (residual / (2 * NOISE)) ** 2))


def _left_out(residual: Floats, slope: Floats, weight: Floats, hessian: Floats) -> Floats:
    """Return the residual of each run under the fit to all others, to first order."""
    left = np.zeros_like(residual)
    for row, (value, direction, w) in enumerate(zip(residual, slope, weight, strict=True)):
        without = hessian - w * np.outer(direction, direction)
        left[row] = value + direction @ np.linalg.solve(without, w * direction * value)
    return left


def _mean_error(residual: Floats) -> float:
    return float(np.mean(np.abs(np.exp(-residual) - 1)))
