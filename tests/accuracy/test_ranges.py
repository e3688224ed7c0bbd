"""Ranges of step times and risks of memory: from errors by source, tried on sources left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.accuracy.ranges import (
    SHARE,
    Errors,
    Evidence,
    MemoryRisk,
    Peak,
    Ratio,
    errors_by_evidence,
    evidence_of,
    load_accuracy,
    memory_range,
    out_of_memory_risk,
    step_range,
)
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan

MakeWorkload = Callable[..., Workload]


def drawn(*, sources: int, rows: int, width: float = 0.1, name: str = "source", seed: int = 3) -> list[Ratio]:
    random = np.random.default_rng(seed)
    return [
        (f"{name} {number}", float(np.exp(shift + random.normal(0, width / 2))))
        for number, shift in enumerate(random.normal(0, width, size=sources))
        for _ in range(rows)
    ]


@pytest.mark.parametrize("width", [0.1, 0.4])
def test_ranges_hold_what_they_promise_of_sources_that_they_have_not_seen(width: float) -> None:
    found = Errors.of(drawn(sources=60, rows=10, width=width))
    assert found.held_sources == pytest.approx(SHARE, abs=0.04)
    assert found.held_rows == pytest.approx(SHARE, abs=0.04)
    assert found.low < 1 < found.high
    unseen = [ratio for _, ratio in drawn(sources=400, rows=1, width=width, seed=7)]
    assert np.mean([found.low <= ratio <= found.high for ratio in unseen]) == pytest.approx(SHARE, abs=0.08)


def test_a_wider_class_has_a_wider_range() -> None:
    narrow, wide = (Errors.of(drawn(sources=30, rows=10, width=width)).range for width in (0.1, 0.4))
    assert wide[0] < narrow[0] < 1 < narrow[1] < wide[1]


def test_runs_that_are_told_twice_move_no_range() -> None:
    once = drawn(sources=20, rows=3) + drawn(sources=5, rows=30, name="large")
    assert Errors.of(once * 2).range == pytest.approx(Errors.of(once).range, abs=0.005)


def test_a_class_of_few_sources_takes_the_errors_of_the_class_before_it_too() -> None:
    ratios: list[tuple[Evidence, Ratio]] = [("measured", ratio) for ratio in drawn(sources=9, rows=4)]
    ratios += [("partly measured", ratio) for ratio in drawn(sources=9, rows=2, width=0.3, name="other")]
    ratios.append(("not measured", ("alone", 2.0)))
    found = errors_by_evidence(ratios)
    assert [found[kind].sources for kind in get_args(Evidence)] == [9, 9, 10]


def test_evidence_is_by_framework_and_gpu_together_apart_and_neither() -> None:
    measured = {"fsdp": {"h100": 3}, "megatron": {"a100": 1}}
    assert evidence_of("fsdp", "h100", measured) == "measured"
    for framework, gpu in (("fsdp", "a100"), ("fsdp", "l40s"), ("jax", "a100")):
        assert evidence_of(framework, gpu, measured) == "partly measured"
    assert evidence_of("jax", "l40s", measured) == "not measured"


def test_an_estimate_says_what_its_range_rests_on(workload: MakeWorkload) -> None:
    plan = ParallelPlan(dp=8, zero_stage=3, num_microbatches=8)

    def range_of(profile: str, framework: str) -> tuple[Evidence, str, float]:
        made = workload("llama-3-8b", profile=profile, seq_length=4096, global_batch_size=64)
        made = Workload.of(made.model, made.training, made.cluster, made.links, framework=framework)
        estimate = estimate_plan(made, plan)
        found = step_range(made, estimate)
        assert found is not None
        assert found.low_s < estimate.step.step_time_s < found.high_s
        low, high = load_accuracy().step_time[found.evidence].range
        assert found.high_s / found.low_s == pytest.approx(high / low)
        return found.evidence, found.in_words, high / low

    known = range_of("dgx-h100", "fsdp")
    assert known[0] == "measured"
    assert "on this GPU was measured by" in known[1]
    assert range_of("aws-g5-48xlarge", "fsdp")[1].endswith("FSDP was measured, not this GPU")
    apart = range_of("l40s-x8", "megatron-core")
    assert apart[0] == "partly measured"
    assert "and this GPU, not together" in apart[1]
    unknown = range_of("aws-g5-48xlarge", "transformers")
    assert unknown[0] == "not measured"
    assert "neither" in unknown[1]
    assert known[2] < apart[2] <= unknown[2]


def test_there_is_no_range_for_cpus(workload: MakeWorkload) -> None:
    made = workload("gpt2", profile="cpu", gpus=2, seq_length=128, global_batch_size=4, precision="fp32")
    estimate = estimate_plan(made, ParallelPlan(dp=2, num_microbatches=2))
    assert step_range(made, estimate) is None
    assert out_of_memory_risk(made, estimate) is None


def test_the_risk_of_running_out_grows_with_the_memory_that_is_taken(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096, global_batch_size=16)
    plans = (ParallelPlan(dp=8, zero_stage=3, micro_batch_size=2), ParallelPlan(dp=8, zero_stage=3, num_microbatches=2))
    tight, roomy = (out_of_memory_risk(made, estimate_plan(made, plan)) for plan in plans)
    assert tight is not None
    assert roomy is not None
    assert roomy < 0.05 < tight < 0.5


@settings(max_examples=settings().max_examples // 6)
@given(when_full=st.floats(-2.0, 1.0), slope=st.floats(3.0, 12.0), highest=st.floats(0.8, 1.0))
def test_a_risk_is_that_of_the_runs_it_was_made_from(when_full: float, slope: float, highest: float) -> None:
    random = np.random.default_rng(5)
    shares = np.exp(random.uniform(-1.0, 1.0, 4000))
    failed = random.uniform(size=4000) < highest / (1 + np.exp(-when_full - slope * np.log(shares)))
    risk = MemoryRisk.of(list(zip(shares.tolist(), failed.tolist(), strict=True)))
    assert (risk.rows, risk.failed) == (4000, int(failed.sum()))
    told = np.array([risk.at(share) for share in shares])
    among = (told > 0.1) & (told < 0.3)
    assert failed[among].mean() == pytest.approx(told[among].mean(), abs=0.15)
    assert failed.mean() == pytest.approx(told.mean(), abs=0.002)


def test_runs_that_a_share_tells_apart_give_no_risk() -> None:
    for runs in ([(0.5, False), (0.9, False)], [(0.5, False), (0.9, True)]):
        with pytest.raises(ValueError, match="no line fits"):
            MemoryRisk.of(runs)


def test_the_table_that_comes_with_paraplan_keeps_its_promise() -> None:
    table = load_accuracy()
    for kind in ("measured", "partly measured"):
        errors = table.step_time[kind]
        assert errors.sources > 20
    assert set(table.step_time) == set(get_args(Evidence))
    assert set(table.memory) == set(get_args(Peak))
    for errors in (*table.step_time.values(), *table.memory.values()):
        assert errors.held_rows == pytest.approx(SHARE, abs=0.05)
        assert errors.held_sources == pytest.approx(SHARE, abs=0.05)
    assert 0.1 < table.memory_risk.at(1.0) < 0.5


@pytest.mark.parametrize("reading", get_args(Peak))
def test_a_peak_has_a_range_by_what_is_read(workload: MakeWorkload, reading: Peak) -> None:
    found = memory_range(workload("gpt2"), ParallelPlan(), 1e9, reading)
    assert found is not None
    assert found[0] < 1e9 < found[1]
    assert memory_range(workload("gpt2", profile="cpu", precision="fp32"), ParallelPlan(), 1e9, reading) is None
