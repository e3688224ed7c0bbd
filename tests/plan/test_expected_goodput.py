"""Goodput and checkpoint intervals, against hand counts, limits, and published forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.errors import UsageError
from paraplan.plan.goodput import (
    FailureCosts,
    FailureRate,
    MeasuredCosts,
    assumed_costs,
    best_interval,
    daly_interval,
    estimate_goodput,
    young_interval,
)

SECONDS = st.floats(min_value=0.0, max_value=3600.0)


def costs(save_s: float = 10.0, *, restart_s: float = 60.0, write_s: float | None = None) -> FailureCosts:
    return FailureCosts(save_s=save_s, write_s=write_s or save_s, load_s=0.0, restart_s=restart_s)


def test_the_interval_is_that_of_young_and_daly() -> None:
    # delta = 10 min, M = 24 h: sqrt(2 * 600 * 86400) = 10182 s; Daly adds a third and a ninth of sqrt(delta / 2M).
    assert young_interval(86_400, 600) == pytest.approx(10_182.3, abs=0.1)
    ratio = math.sqrt(600 / (2 * 86_400))
    assert daly_interval(86_400, 600) == pytest.approx(10_182.3 * (1 + ratio / 3 + ratio**2 / 9) - 600, abs=0.1)
    assert daly_interval(100, 250) == 100  # a checkpoint that takes longer than 2 M


def test_goodput_is_daly_s_complete_model() -> None:
    mtbf, interval, cost = 1000.0, 200.0, costs(20.0, restart_s=30.0)
    found = estimate_goodput(mtbf, cost, interval_s=interval)
    assert found.goodput == pytest.approx(interval / (mtbf * math.exp(0.03) * math.expm1(0.22)))


def test_a_job_that_hardly_fails_pays_for_checkpoints_alone() -> None:
    found = estimate_goodput(1e12, costs(10.0), interval_s=90.0)
    assert found.goodput == pytest.approx(0.9)
    assert found.checkpoints == pytest.approx(0.1)


def test_a_job_that_fails_all_the_time_does_nothing() -> None:
    found = estimate_goodput(1.0, costs(1000.0), interval_s=1000.0)
    assert (found.goodput, found.restarts) == (0, 1)


def test_a_checkpoint_that_is_written_beside_training_costs_what_a_failure_undoes() -> None:
    beside = estimate_goodput(3600, costs(2.0, write_s=120), interval_s=300)
    at_once = estimate_goodput(3600, costs(2.0), interval_s=300)
    assert at_once.goodput - beside.goodput == pytest.approx(118 / 3600, rel=0.1)
    assert best_interval(3600, costs(2.0, write_s=500)) == 498  # the next one waits for it


@given(mtbf=st.floats(min_value=60, max_value=1e8), save=SECONDS, restart=SECONDS, interval=st.floats(1, 1e5))
def test_shares_add_up_to_the_whole(mtbf: float, save: float, restart: float, interval: float) -> None:
    found = estimate_goodput(mtbf, costs(save, restart_s=restart), interval_s=interval)
    assert found.goodput + found.checkpoints + found.lost + found.restarts == pytest.approx(1)
    assert min(found.goodput, found.checkpoints, found.lost, found.restarts) >= -1e-9


@given(mtbf=st.floats(min_value=600, max_value=1e6), save=st.floats(0.1, 60), restart=SECONDS)
def test_no_interval_is_much_better_than_the_best_one(mtbf: float, save: float, restart: float) -> None:
    cost = costs(save, restart_s=restart)
    best = best_interval(mtbf, cost)
    at_best = estimate_goodput(mtbf, cost, interval_s=best).goodput
    for factor in (0.5, 0.8, 1.25, 2):
        assert estimate_goodput(mtbf, cost, interval_s=best * factor).goodput < at_best + 1e-3


def test_the_rate_of_parts_is_that_of_a_job_of_many() -> None:
    assert FailureRate.parse("3h").of_job_s(num_gpus=16, num_nodes=2) == 3 * 3600
    assert FailureRate.parse("50000h/gpu").of_job_s(num_gpus=16, num_nodes=2) == 50_000 * 3600 / 16
    assert FailureRate.parse("400 d / node").of_job_s(num_gpus=16, num_nodes=2) == 400 * 86_400 / 2
    # Kokolis et al. 2024: 6.50 failures per thousand node-days are one in 1.8 h for 16,384 GPUs in 2,048 nodes
    rate = FailureRate.parse(f"{1000 / 6.5:.4f}d/node")
    assert rate.of_job_s(num_gpus=16_384, num_nodes=2048) / 3600 == pytest.approx(1.8, rel=0.01)


@pytest.mark.parametrize("text", ["", "3", "h", "-3h", "3 weeks", "0h", "3h/rack", "1e99y", "nan h", "3h/gpu/node"])
def test_what_is_no_time_between_failures_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match="not a mean time between failures"):
        FailureRate.parse(text)


def test_measured_costs_go_before_assumed_ones() -> None:
    assumed = assumed_costs(num_parameters=8 * 10**9, num_nodes=4)
    assert assumed.save_s == pytest.approx(24)  # 12 bytes of 8 B parameters at 4 x 1 GB/s
    some = MeasuredCosts(save_s=3.0).completed(assumed)
    assert (some.save_s, some.restart_s, some.is_measured) == (3.0, assumed.restart_s, False)
    assert MeasuredCosts(save_s=3.0, write_s=4.0, load_s=5.0, restart_s=6.0).completed(assumed).is_measured
