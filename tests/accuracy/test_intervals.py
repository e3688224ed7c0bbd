"""Intervals of predictions: from residuals by source, tried on sources left out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paraplan.accuracy.intervals import (
    ALL,
    SHARE,
    Residuals,
    accuracy_of,
    fitted_errors,
    load_accuracy,
    out_of_memory_probability,
    step_interval,
)
from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan

MakeWorkload = Callable[..., Workload]


def run(source: str, number: int, ratio: float, framework: str = "fsdp") -> RunPrediction:
    return RunPrediction(
        id=f"{source}-{number}",
        source=source,
        gpu="H100",
        framework=framework,
        framework_profile=framework,
        gpu_profile="h100-sxm-80gb",
        step_time_error=1 / ratio - 1,
        memory_error=1 / ratio - 1,
        memory_reading="max_allocated",
    )


def drawn(sources: int, rows: int) -> list[RunPrediction]:
    random = np.random.default_rng(3)
    return [
        run(f"source {name}", number, float(np.exp(shift + random.normal(0, 0.05))))
        for name, shift in enumerate(random.normal(0, 0.1, size=sources))
        for number in range(rows)
    ]


def test_intervals_hold_what_they_promise_of_sources_that_they_have_not_seen() -> None:
    table = accuracy_of(drawn(sources=40, rows=20), [])
    assert table.coverage == pytest.approx(SHARE, abs=0.08)
    low, high = table.step_time[ALL].interval
    assert 0.7 < low < 0.95 < 1.05 < high < 1.4


def test_a_large_source_does_not_drown_the_others() -> None:
    many = [run("large", number, 1.0) for number in range(900)]
    few = [run(f"small {name}", number, 1.5) for name in range(9) for number in range(4)]
    ratios = [(one.source, 1 / (1 + (one.step_time_error or 0))) for one in (*many, *few)]
    found = Residuals.of(ratios)
    assert (found.rows, found.sources) == (936, 10)
    assert found.interval[1] == pytest.approx(1.5)
    assert found.share_above(1.2) == pytest.approx(9 * 2 / (30 + 9 * 2), abs=0.02)


def test_a_family_of_few_sources_takes_the_residuals_of_all() -> None:
    runs = [*drawn(sources=3, rows=4), *(run("alone", number, 2.0, "deepspeed-zero") for number in range(9))]
    assert set(accuracy_of(runs, []).step_time) == {ALL, "fsdp"}


def test_a_factor_fitted_to_the_other_sources_helps_where_all_err_alike() -> None:
    alike = [run(name, number, 1.25) for name in "abcd" for number in range(4)]
    found = fitted_errors([*alike, *(run("e", number, 0.8) for number in range(4))])
    assert found["a"].as_predicted == pytest.approx(0.2)
    assert found["a"].in_sample == found["a"].left_out == pytest.approx(0.0, abs=1e-6)
    # The one that errs the other way only gets worse.
    assert found["e"].as_predicted == pytest.approx(0.25)
    assert found["e"].in_sample == found["e"].left_out == pytest.approx(1.25 / 0.8 - 1, abs=1e-6)


def test_a_source_fits_itself_only_in_sample() -> None:
    found = fitted_errors(run(name, 0, ratio) for name, ratio in (("a", 1.0), ("b", 1.5), ("c", 2.0)))
    assert found["b"].in_sample == pytest.approx(0.0, abs=1e-6)
    assert found["b"].left_out > 0.3


def test_an_estimate_says_what_its_range_rests_on(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096, global_batch_size=64)
    plan = ParallelPlan(dp=8, zero_stage=3, num_microbatches=8)
    estimate = estimate_plan(made, plan)
    found = step_interval(made, estimate)
    assert found is not None
    assert found.low_s < estimate.step.step_time_s < found.high_s
    assert (found.basis, found.is_validated_gpu) == (ALL, True)
    other = workload("llama-3-8b", profile="l40s-x8", seq_length=4096, global_batch_size=64)
    beside = step_interval(other, estimate_plan(other, plan))
    assert beside is not None
    assert not beside.is_validated_gpu
    cpu = workload("gpt2", profile="cpu", gpus=2, seq_length=128, global_batch_size=4, precision="fp32")
    assert step_interval(cpu, estimate_plan(cpu, ParallelPlan(dp=2, num_microbatches=2))) is None


def test_the_risk_of_running_out_grows_with_the_memory_that_is_taken(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096, global_batch_size=16)
    plans = (ParallelPlan(dp=8, zero_stage=3, micro_batch_size=2), ParallelPlan(dp=8, zero_stage=3, num_microbatches=2))
    tight, roomy = (out_of_memory_probability(made, estimate_plan(made, plan)) for plan in plans)
    assert tight is not None
    assert roomy is not None
    assert roomy < 0.02 < tight < 0.5


def test_the_table_that_comes_with_paraplan_keeps_its_promise() -> None:
    table = load_accuracy()
    assert 0.75 <= table.coverage <= 0.85
    assert table.step_time[ALL].rows > 900
