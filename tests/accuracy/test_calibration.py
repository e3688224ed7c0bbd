from __future__ import annotations

from collections.abc import Callable

import pytest
from small_run import run

from paraplan.accuracy.calibration import (
    KNOBS,
    Calibration,
    CalibrationRun,
    KnobName,
    calibrate,
    calibrate_to_runs,
    read_calibration,
    scaled,
)
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.plan.parallel import ParallelPlan

MakeWorkload = Callable[..., Workload]
PLANS = (
    ParallelPlan(dp=8, num_microbatches=8),
    ParallelPlan(dp=8, micro_batch_size=2, num_microbatches=4),
    ParallelPlan(dp=4, tp=2, num_microbatches=16),
    ParallelPlan(dp=2, tp=4, num_microbatches=32),
    ParallelPlan(tp=8, num_microbatches=64),
    ParallelPlan(dp=4, pp=2, pipeline_schedule="1f1b", num_microbatches=16),
    ParallelPlan(dp=8, zero_stage=3, num_microbatches=8),
    ParallelPlan(dp=8, num_microbatches=8, recompute="full"),
)


def step_s(workload: Workload, plan: ParallelPlan) -> float:
    return evaluate_plan(workload, plan).step.step_time_s


def runs_of(workload: Workload, truth: dict[KnobName, float]) -> list[CalibrationRun]:
    real = scaled(workload, truth)
    return [CalibrationRun(workload, plan, step_s(real, plan)) for plan in PLANS]


def factor(fitted: Calibration, name: KnobName) -> float:
    return next(constant.factor for constant in fitted.constants if constant.name == name)


def test_a_machine_with_slower_matmuls_and_links_is_recognised(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-a100", seq_length=8192)
    runs = runs_of(made, {"matmul": 0.85, "node_links": 0.8})
    fitted = calibrate(runs, source="made up")
    assert factor(fitted, "matmul") == pytest.approx(0.85, abs=0.05)
    assert factor(fitted, "node_links") < 0.99
    assert fitted.error_after < 0.02 < fitted.error_before
    assert fitted.is_worth_it
    slow = fitted.applied_to(made)
    assert [step_s(slow, run.plan) for run in runs] == pytest.approx(
        [run.measured_step_time_s for run in runs], rel=0.06
    )


def test_runs_that_agree_with_the_sourced_constants_leave_them(workload: MakeWorkload) -> None:
    fitted = calibrate(runs_of(workload("gpt2-xl", profile="dgx-a100"), {}), source="made up")
    assert [constant.factor for constant in fitted.constants] == pytest.approx([1.0] * len(KNOBS), abs=0.01)
    assert fitted.error_before < 0.01


def test_what_no_run_shows_keeps_its_prior(workload: MakeWorkload) -> None:
    fitted = calibrate(runs_of(workload("gpt2-xl", profile="dgx-a100"), {"matmul": 0.9}), source="one node")
    network = next(constant for constant in fitted.constants if constant.name == "network")
    assert network.factor == pytest.approx(1)
    assert network.log_sd == pytest.approx(network.prior_log_sd)


def test_one_wild_run_does_not_carry_the_fit_away(workload: MakeWorkload) -> None:
    made = workload("gpt2-xl", profile="dgx-a100")
    runs = runs_of(made, {})
    wild = CalibrationRun(made, runs[0].plan, 3 * runs[0].measured_step_time_s)
    fitted = calibrate([wild, *runs[1:]], source="made up")
    assert factor(fitted, "matmul") > 0.9
    assert fitted.error_left_out < 0.25


def test_two_runs_are_too_few(workload: MakeWorkload) -> None:
    runs = runs_of(workload("gpt2-xl", profile="dgx-a100"), {})
    with pytest.raises(PlanError, match="2 runs are too few to calibrate to: 3 is the least"):
        calibrate(runs[:2], source="made up")


def test_a_calibration_file_says_what_it_was_fitted_to_and_is_read_back() -> None:
    timed = {"framework": "FSDP", "measured_step_time_s": 0.5}
    rows = [run(id=f"run {size}", micro_batch=size, **timed) for size in (1, 2, 4)]
    rows += [run(id="untimed", **timed | {"measured_step_time_s": None}), run(id="odd", gpu="Abacus-1", **timed)]
    fitted = calibrate_to_runs(rows, source="runs.csv")
    assert (fitted.num_runs, fitted.gpus, fitted.frameworks) == (3, ("H100-80GB",), ("FSDP",))
    assert [line.split(":")[0] for line in fitted.skipped] == ["untimed", "odd"]
    assert read_calibration(fitted.to_json(), source="file") == fitted


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "plan"}', "[1]"])
def test_a_file_without_a_calibration_is_one_clear_error(text: str) -> None:
    with pytest.raises(PlanError, match=r"^cal\.json (is not JSON|holds no calibration)"):
        read_calibration(text, source="cal.json")
