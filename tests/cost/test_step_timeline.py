from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from paraplan.cost.estimate import estimate_plan, evaluate_plan
from paraplan.cost.framework_files import load_framework
from paraplan.cost.timeline import pipeline_timeline, step_timeline
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan

MakeWorkload = Callable[..., Workload]


def plan(**fields: Any) -> ParallelPlan:
    values: dict[str, Any] = {"dp": 2, "pp": 4, "num_microbatches": 8, "pipeline_schedule": "1f1b"}
    return ParallelPlan.model_validate(values | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pipeline_schedule": "gpipe"},
        {"pipeline_schedule": "zero_bubble"},
        {"recompute": "full"},
        {"stage_blocks": (2, 4, 4, 2)},
        {"dp": 1, "tp": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_a_course_takes_as_long_as_the_estimate_says(fields: dict[str, Any], workload: MakeWorkload) -> None:
    made = plan(**fields)
    load = workload("gpt2", global_batch_size=made.global_batch_size)
    timeline = pipeline_timeline(load, made)
    step = estimate_plan(load, made).step
    assert timeline is not None
    assert timeline.end_s == pytest.approx(step.step_time_s - step.data_parallel_s - step.optimizer_s, rel=1e-6)


@pytest.mark.parametrize(("blocks", "chunks"), [(16, 4), (17, 4), (18, 3), (14, 3), (7, 2)])
def test_a_course_of_unequal_chunks_takes_as_long_as_the_estimate_says(
    blocks: int, chunks: int, workload: MakeWorkload
) -> None:
    made = plan(pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=chunks, num_microbatches=16)
    load = workload("gpt2", global_batch_size=made.global_batch_size)
    (run,) = load.model.runs
    load = replace(load, model=load.model.replace(runs=(run.replace(count=blocks),)))
    timeline, step = pipeline_timeline(load, made), evaluate_plan(load, made).step
    assert timeline is not None
    assert timeline.end_s == pytest.approx(step.step_time_s - step.data_parallel_s - step.optimizer_s, rel=0.05)


def test_a_chunk_takes_as_long_as_its_blocks(workload: MakeWorkload) -> None:
    load = workload("gpt2", global_batch_size=16)
    timeline = pipeline_timeline(load, plan(pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=2))
    assert timeline is not None
    seconds = {each.virtual_stage: each.end_s - each.start_s for each in timeline.ranks[1] if each.kind == "forward"}
    assert seconds[1] == pytest.approx(2 * seconds[5]), "two of the twelve blocks, and one"


def test_chunks_of_a_rank_take_as_long_as_its_blocks(workload: MakeWorkload) -> None:
    load = workload("gpt2", global_batch_size=16)
    whole, halves = (
        pipeline_timeline(load, plan(pipeline_schedule=schedule, virtual_pipeline_size=chunks))
        for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 3))
    )
    assert whole is not None
    assert halves is not None
    assert halves.end_s < whole.end_s
    for rank in range(4):  # three times as many boundaries are sent
        assert halves.busy_s(rank) == pytest.approx(whole.busy_s(rank), rel=0.1)


def test_without_a_pipeline_there_is_no_course(workload: MakeWorkload) -> None:
    assert pipeline_timeline(workload(), ParallelPlan(dp=8, num_microbatches=8)) is None


@pytest.mark.parametrize(
    "made",
    [
        ParallelPlan(dp=8, num_microbatches=8),
        ParallelPlan(dp=4, tp=2, zero_stage=1, sequence_parallel=True, num_microbatches=4),
        ParallelPlan(dp=4, cp=2, zero_stage=3, num_microbatches=4),
        plan(zero_stage=1),
        plan(pipeline_schedule="zero_bubble"),
        plan(dp=1, tp=2, pipeline_schedule="interleaved_1f1b", virtual_pipeline_size=3),
        plan(recompute="full", dp=1, tp=2),
    ],
    ids=ParallelPlan.describe,
)
def test_the_parts_of_a_course_are_those_of_the_estimate(made: ParallelPlan, workload: MakeWorkload) -> None:
    load = workload("gpt2", global_batch_size=made.global_batch_size)
    estimate = estimate_plan(load, made)
    timeline = step_timeline(load, estimate)
    waited = sum(each.end_s - each.start_s for each in timeline.reduction)
    assert waited == pytest.approx(estimate.step.data_parallel_s)
    assert timeline.operations_end_s + waited + timeline.optimizer_s == pytest.approx(timeline.step_time_s)
    sent = max(timeline.sending_s(rank) for rank in range(made.pp))
    step = estimate.step
    assert sent == pytest.approx(step.tensor_parallel_s + step.context_parallel_s + step.pipeline_send_s, rel=1e-6)
    for rank in timeline.ranks:
        for operation in rank:
            edges = [operation.start_s, *(edge for each in operation.transfers for edge in each[2:]), operation.end_s]
            assert all(later > earlier - 1e-9 for earlier, later in pairwise(edges))


def test_what_replicas_exchange_is_named_by_the_zero_stage(workload: MakeWorkload) -> None:
    def kinds(**fields: Any) -> set[str]:
        load = workload("gpt2", global_batch_size=8)
        timeline = step_timeline(load, estimate_plan(load, ParallelPlan(dp=8, **fields)))
        return {each.collective for each in (*timeline.reduction, *timeline.hidden)}

    assert kinds() == {"all_reduce"}
    assert kinds(zero_stage=1) == kinds(zero_stage=3) == {"reduce_scatter", "all_gather"}


@pytest.mark.parametrize(("framework", "share"), [("torchtitan", 1 / 2), ("megatron-core", 1 / 3)])
def test_what_replicas_exchange_has_the_width_of_their_gradients(
    framework: str, share: float, workload: MakeWorkload
) -> None:
    load = replace(workload("llama-3-8b", num_nodes=4, global_batch_size=32), framework=load_framework(framework))
    timeline = step_timeline(load, estimate_plan(load, ParallelPlan(dp=32, zero_stage=3)))
    seconds = {each.collective: each.end_s - each.start_s for each in timeline.reduction}
    # fp32 gradients, or 16-bit ones, beside parameters that are gathered twice in 16 bits
    assert seconds["reduce_scatter"] / sum(seconds.values()) == pytest.approx(share)


def test_hybrid_sharding_averages_between_its_groups(workload: MakeWorkload) -> None:
    made = ParallelPlan(dp=8, zero_stage=3, zero_shards=4)
    load = workload("gpt2", global_batch_size=8)
    timeline = step_timeline(load, estimate_plan(load, made))
    assert {each.collective for each in timeline.reduction} == {"reduce_scatter", "all_gather", "all_reduce"}
