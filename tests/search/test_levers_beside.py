"""Levers under which the plan beside them is simpler and no slower, and the order in which the answer names things."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from case_selection import with_all
from typer.testing import CliRunner

from paraplan.cli.main import app
from paraplan.cost.estimate import allocator_holds, evaluate_plan
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan
from paraplan.report.short_text import estimate_lines, recommendation_lines
from paraplan.search.evaluated_plans import complexities
from paraplan.search.recommendation import SearchRequest, recommendation
from paraplan.search.search import search

MakeWorkload = Callable[..., Workload]
SEGMENTS, LIGER = "--stack expandable_segments", "--loss liger"
LARGE = {"model": "qwen3-32b", "profile": "rtx-pro-6000-x8", "seq_length": 4096, "global_batch_size": 64}
ADAPTED = {
    "model": "qwen2.5-7b",
    "profile": "4xrtx-4090",
    "seq_length": 4096,
    "global_batch_size": 64,
    "train": "lora:r=16",
}


def _level(made: Workload, plan: ParallelPlan) -> int:
    return int(complexities(made, partial(getattr, PlanTable.of_plans([plan])))[0])


@pytest.mark.parametrize(
    ("case", "lever", "change"),
    [
        (ADAPTED, LIGER, {"loss": "liger"}),
        *with_all([(ADAPTED | {"num_nodes": 2}, LIGER, {"loss": "liger"}), (LARGE, LIGER, {"loss": "liger"})]),
    ],
)
def test_what_makes_the_plan_simpler_and_no_slower_stands_first(
    workload: MakeWorkload, case: dict[str, Any], lever: str, change: dict[str, Any]
) -> None:
    made = workload(**case)
    answer = recommendation(made, SearchRequest())
    best = answer.result.best
    offer = next(one for one in answer.levers if one.options == lever)
    under = made.trained_as(made.training.replace(**change))
    found = search(under, num_candidates=1).best
    assert (offer.plan, offer.step_time_s) == (found.plan.describe(), pytest.approx(found.step.step_time_s))
    assert _level(under, found.plan) < _level(made, best.plan)
    assert found.step.step_time_s <= 1.03 * best.step.step_time_s
    lines = recommendation_lines(answer)
    first = next(line for line in lines if line.label == "First" and line.text.startswith(lever))
    assert first.text.endswith(f"simpler: {found.plan.describe()}")
    assert [line.label for line in lines].index("First") < [line.label for line in lines].index("Plan")


def test_a_plan_that_the_allocator_alone_keeps_from_is_had_with_segments_that_grow(workload: MakeWorkload) -> None:
    made = workload(**LARGE)
    answer = recommendation(made, SearchRequest())
    reason = answer.result.plain_reason
    assert reason is not None
    assert reason.cause == "allocator"
    offer = next(one for one in answer.levers if one.options == SEGMENTS)
    assert offer.plan == reason.over
    grown = made.trained_as(made.training.replace(stack=made.training.stack.replace(expandable_segments=True)))
    best = search(grown, num_candidates=1).best
    assert best.plan.describe() == offer.plan
    assert allocator_holds(grown, best)
    assert not [one for one in recommendation(grown, SearchRequest()).levers if SEGMENTS in one.options]


def test_a_larger_micro_batch_of_the_same_plan_is_had_with_segments_that_grow(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", "4xa10g", seq_length=4096, global_batch_size=32, train="lora:r=16")
    answer = recommendation(made, SearchRequest())
    best = answer.result.best
    offer = next(one for one in answer.levers if one.options == SEGMENTS)
    assert (best.plan.zero_stage, best.plan.micro_batch_size) == (3, 1)
    assert offer.plan == best.plan.replace(micro_batch_size=2, num_microbatches=4).describe()
    assert (offer.step_time_s or 0.0) < best.step.step_time_s / 1.03
    assert "simpler" not in offer.in_short


def test_an_estimate_says_that_segments_that_grow_let_the_allocator_hold_a_plan(workload: MakeWorkload) -> None:
    made = workload(**LARGE)
    plan = ParallelPlan(dp=8, zero_stage=3, micro_batch_size=2, num_microbatches=4, recompute="full")
    estimate = evaluate_plan(made, plan)
    assert not allocator_holds(made, estimate)
    (line,) = (one for one in estimate_lines(made, estimate) if one.label == "Fits")
    assert line.text.startswith(f"with {SEGMENTS}: torch's allocator then takes ")
    grown = made.trained_as(made.training.replace(stack=made.training.stack.replace(expandable_segments=True)))
    assert all(one.label != "Fits" for one in estimate_lines(grown, evaluate_plan(grown, plan)))


def test_a_plain_plan_with_room_has_no_lever_before_it(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", seq_length=4096, global_batch_size=64)
    assert not [line for line in recommendation_lines(recommendation(made, SearchRequest())) if line.label == "First"]


@pytest.mark.parametrize(
    ("job", "width"),
    [
        ("qwen3-32b --profile rtx-pro-6000-x8 --seq-len 4k --global-batch 64", 80),
        ("qwen3-32b --profile rtx-pro-6000-x8 --seq-len 4k --global-batch 64", 100),
        ("qwen2.5-7b --profile 4xrtx-4090 --seq-len 4k --global-batch 64 --train lora:r=16", 100),
    ],
)
def test_why_a_simpler_plan_was_passed_over_outlasts_what_else_is_told(job: str, width: int) -> None:
    text = CliRunner().invoke(app, ["recommend", *shlex.split(job)], env={"COLUMNS": str(width)}).stdout
    labels = [line.split("  ")[0] for line in text.splitlines() if line and not line.startswith(" ")]
    assert "Why not" in labels
    assert "First" in labels
    if width == 100:
        assert len(text.splitlines()) <= 22


def test_context_parallelism_of_sequences_that_no_published_run_divides_is_not_simple(workload: MakeWorkload) -> None:
    made = workload("qwen2.5-7b", profile="4xrtx-4090", num_nodes=2, seq_length=4096, train="lora:r=16")
    longer = made.trained_as(made.training.replace(seq_length=16384))
    plan = ParallelPlan(dp=4, cp=2, num_microbatches=16)
    assert (_level(made, plan), _level(longer, plan)) == (6, 2)
