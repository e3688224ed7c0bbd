from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
from small_run import run

from paraplan.accuracy.calibration import Calibration, calibrate, calibrate_to_runs, read_calibration
from paraplan.accuracy.factors import KNOBS, CalibrationRun, FactorName, scaled
from paraplan.accuracy.shared_errors import load_shared_errors
from paraplan.cost.correction import NUM_SIZES, CorrectedRun, RunCorrection
from paraplan.cost.estimate import evaluate_plan, step_times
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.timeline import step_timeline
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.search.lower_bound import least_step_s

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


def runs_of(workload: Workload, truth: dict[FactorName, float]) -> list[CalibrationRun]:
    real = scaled(workload, truth)
    return [CalibrationRun(workload, plan, step_s(real, plan)) for plan in PLANS]


def factor(fitted: Calibration, name: FactorName) -> float:
    return next(constant.factor for constant in fitted.constants if constant.name == name)


def test_a_machine_with_slower_matmuls_and_links_is_recognised(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-a100", seq_length=8192, compiled=True)
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


def off_where_tensor_parallel(made: Workload) -> list[CalibrationRun]:
    """Return runs of which those with tp take a fifth longer: more than links inside a node would explain."""
    return [CalibrationRun(made, plan, step_s(made, plan) * (1.2 if plan.tp > 1 else 1.0)) for plan in PLANS]


@lru_cache(maxsize=1)
def fitted_to_tensor_parallel(made: Workload) -> Calibration:
    return calibrate(off_where_tensor_parallel(made), source="made up")


def test_plans_that_are_alike_share_what_no_constant_explains(workload: MakeWorkload) -> None:
    made = workload("gpt2-xl", profile="dgx-a100")
    fitted = fitted_to_tensor_parallel(made)
    corrected, plain = fitted.applied_to(made), replace(fitted.applied_to(made), correction=None)
    alike, unlike = ParallelPlan(dp=2, tp=4, num_microbatches=16), ParallelPlan(dp=8, pp=1, num_microbatches=4)
    more = [step_s(corrected, plan) / step_s(plain, plan) for plan in (alike, unlike)]
    assert more[0] > 1.02
    assert more[1] < more[0] - 0.02
    assert fitted.error_after < fitted.error_before


def test_another_kind_of_gpu_is_not_corrected(workload: MakeWorkload) -> None:
    fitted = fitted_to_tensor_parallel(workload("gpt2-xl", profile="dgx-a100"))
    other = workload("gpt2-xl", profile="dgx-h100")
    plain = replace(fitted.applied_to(other), correction=None)
    for plan in PLANS:
        assert step_s(fitted.applied_to(other), plan) == pytest.approx(step_s(plain, plan))


def test_parts_of_a_corrected_step_sum_and_the_search_bounds_hold(workload: MakeWorkload) -> None:
    made = workload("gpt2-xl", profile="dgx-a100")
    corrected = fitted_to_tensor_parallel(made).applied_to(made)
    table = PlanTable.of_plans(list(PLANS))
    times = step_times(corrected, table).step_time_s
    assert (least_step_s(corrected, table) <= times * (1 + 1e-9)).all()
    assert times.tolist() == pytest.approx([step_s(corrected, plan) for plan in PLANS])


def test_a_timeline_is_as_long_as_the_corrected_step(workload: MakeWorkload) -> None:
    made = workload("gpt2-xl", profile="dgx-a100")
    corrected = fitted_to_tensor_parallel(made).applied_to(made)
    plan = ParallelPlan(dp=2, tp=2, pp=2, pipeline_schedule="1f1b", num_microbatches=16)
    ends = []
    for one in (made, corrected):
        estimate = evaluate_plan(one, plan)
        ends.append(step_timeline(one, estimate).operations_end_s / estimate.step.step_time_s)
    assert ends[0] == pytest.approx(ends[1], rel=0.02)
    assert corrected.time_factors(PlanTable.of_plans([plan]))[0] != pytest.approx(1.0, abs=0.005)


def test_a_file_of_an_earlier_release_corrects_nothing(workload: MakeWorkload) -> None:
    made = workload("gpt2-xl", profile="dgx-a100")
    fitted = fitted_to_tensor_parallel(made)
    assert fitted.correction is not None
    earlier = read_calibration(fitted.model_copy(update={"correction": None}).to_json(), source="file")
    assert earlier.correction is None
    assert earlier.applied_to(made).correction is None


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [{"kind": "k", "sizes": [1.0], "weight": 1.0}],
        [{"kind": "k", "sizes": [float("inf")] * NUM_SIZES, "weight": 1.0}],
        [{"kind": "k", "sizes": [1.0] * NUM_SIZES, "weight": float("nan")}],
        [{"kind": "k", "sizes": [1.0] * NUM_SIZES, "weight": -1e300}],
    ],
)
def test_a_correction_that_is_none_is_one_clear_error(workload: MakeWorkload, runs: list[dict[str, object]]) -> None:
    fitted = fitted_to_tensor_parallel(workload("gpt2-xl", profile="dgx-a100"))
    text = json.dumps(
        json.loads(fitted.to_json())
        | {"correction": {"shared": load_shared_errors().step_time.model_dump(), "runs": runs}}
    )
    with pytest.raises(PlanError, match=r"^cal\.json holds no calibration: correction"):
        read_calibration(text, source="cal.json")


def test_a_correction_keeps_times_finite_however_many_runs_agree(workload: MakeWorkload) -> None:
    made = workload("gpt2-xl", profile="dgx-a100")
    table = PlanTable.of_plans([PLANS[0]])
    kind, sizes = made.run_kind, made.run_sizes(table)
    runs = (CorrectedRun(kind=kind, sizes=tuple(sizes[0].tolist()), weight=1e4),) * 50
    correction = RunCorrection(shared=load_shared_errors().step_time, runs=runs)
    assert correction.factors(sizes, kind)[0] == pytest.approx(math.exp(5))
