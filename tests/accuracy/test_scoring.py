from __future__ import annotations

import numpy as np
import pytest
from small_run import run

from paraplan.accuracy.measured_runs import MeasuredRun
from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.accuracy.scoring import rank_correlation, score, score_sweeps, summarize


def prediction(error: float, *, source: str = "paper", **values: object) -> RunPrediction:
    base = {"id": f"{source} {error}", "source": source, "gpu": "A100-80GB", "framework": "Megatron-LM"}
    return RunPrediction.model_validate(base | {"step_time_error": error} | values)


def sweep_of(predicted: list[float], measured: list[float]) -> list[tuple[MeasuredRun, RunPrediction]]:
    rows = enumerate(zip(predicted, measured, strict=True))
    return [
        (run(), prediction(0.0, plan=f"tp{row}", predicted_step_time_s=first, measured_step_time_s=second))
        for row, (first, second) in rows
    ]


def test_summaries_are_those_of_the_absolute_errors() -> None:
    summary = summarize([0.1, -0.3])
    assert summary.mape == pytest.approx(0.2)
    assert summary.max_ape == pytest.approx(0.3)
    assert summary.bias == pytest.approx(-0.1)
    assert summarize([]).mape is None


def test_a_large_source_does_not_drown_a_small_one() -> None:
    figures = score([prediction(0.1, source="large")] * 9 + [prediction(0.5, source="small")], "step_time_error")
    assert figures.all_rows.mape == pytest.approx(0.14)
    assert figures.mean_of_sources == pytest.approx(0.3)


def test_errors_are_grouped_by_gpu_framework_and_parallelism_and_the_worst_are_named() -> None:
    rows = [prediction(0.1, parallelism="tp"), prediction(-0.4, gpu="H100-80GB", parallelism="pp")]
    figures = score(rows, "step_time_error", num_worst=1)
    assert set(figures.by_gpu) == {"A100-80GB", "H100-80GB"}
    assert figures.by_parallelism["pp"].max_ape == pytest.approx(0.4)
    assert figures.by_framework["Megatron-LM"].rows == 2
    assert figures.worst == ("paper -0.4",)


def test_a_sweep_whose_best_plan_is_found_has_no_regret() -> None:
    figures = score_sweeps(sweep_of([1.0, 2.0, 3.0, 4.0], [1.1, 2.2, 3.3, 4.4]))
    assert figures.top1_regret == 0
    assert figures.rank_correlation == pytest.approx(1)


def test_regret_is_what_the_chosen_plan_takes_longer_than_the_best() -> None:
    figures = score_sweeps(sweep_of([1.0, 2.0, 3.0, 4.0], [1.5, 1.0, 3.0, 4.0]))
    assert figures.worst_regret == pytest.approx(0.5)
    assert figures.rank_correlation == pytest.approx(0.8)


def test_plans_of_several_batches_are_ranked_by_the_time_of_a_sequence() -> None:
    rows = sweep_of([2.0, 2.2, 2.4, 2.6, 1.1, 1.2, 1.3, 1.4], [2.5, 2.2, 2.4, 2.6, 1.0, 1.2, 1.3, 1.4])
    halves = [(run.replace(global_batch=32 if row >= 4 else 64), made) for row, (run, made) in enumerate(rows)]
    together, apart = score_sweeps(halves), score_sweeps(halves, at_one_batch=True)
    # The best prediction are 2.0 s for 64 sequences, which took 2.5 s; the best measurement are 1.0 s for 32.
    assert [sweep.rows for sweep in together.sweeps] == [8]
    assert together.top1_regret == pytest.approx(2.5 / 2.0 - 1)
    assert [sweep.rows for sweep in apart.sweeps] == [4, 4]
    assert [sweep.top1_regret for sweep in apart.sweeps] == pytest.approx([2.5 / 2.2 - 1, 0])
    assert "batch 32" in apart.sweeps[1].name
    assert "batch" not in together.sweeps[0].name


def test_three_plans_are_no_sweep_and_a_plan_measured_twice_is_one() -> None:
    assert score_sweeps(sweep_of([1, 2, 3], [1, 2, 3])).sweeps == ()
    rows = sweep_of([1, 2, 3, 4], [1, 2, 3, 4])
    assert score_sweeps([*rows, rows[0]]).sweeps[0].rows == 4
    assert score_sweeps([]).top1_regret is None


def test_equal_values_share_their_rank() -> None:
    assert rank_correlation(np.array([1.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0])) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 1.0]), np.array([1.0, 2.0])) == 0


def test_plans_with_one_prediction_share_their_regret_whatever_the_order_of_rows() -> None:
    predicted, measured = [1.0, 1.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]
    forward = score_sweeps(sweep_of(predicted, measured)).sweeps[0]
    backward = score_sweeps(list(reversed(sweep_of(predicted, measured)))).sweeps[0]
    assert forward.top1_regret == backward.top1_regret == pytest.approx(0.5)
