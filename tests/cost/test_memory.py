from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.cost.estimate import PlanEstimate, evaluate_plan, peak_memory, stage_memories
from paraplan.cost.pipeline.stages import even_stage, in_flight
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.memory_record import MEMORY_PARTS
from paraplan.plan.parallel import ParallelPlan
from paraplan.units import format_share

GPT2_PARAMETERS = 124_439_808  # transformers' GPT2LMHeadModel from the published config
MakeWorkload = Callable[..., Workload]


def stage(workload: Workload, **plan: object) -> dict[str, int]:
    return evaluate_plan(workload, ParallelPlan.model_validate(plan)).memory[0].model_dump()


def test_one_process_in_fp32_holds_16_bytes_a_parameter_under_adamw(workload: MakeWorkload) -> None:
    memory = stage(workload(precision="fp32"), num_microbatches=64)
    assert memory["parameter_bytes"] == 4 * GPT2_PARAMETERS
    assert memory["gradient_bytes"] == 4 * GPT2_PARAMETERS
    assert memory["optimizer_state_bytes"] == 8 * GPT2_PARAMETERS


def test_plain_sgd_keeps_no_optimizer_state(workload: MakeWorkload) -> None:
    assert stage(workload(optimizer="sgd"))["optimizer_state_bytes"] == 0


def test_zero_1_shards_optimizer_state_over_dp(workload: MakeWorkload) -> None:
    sharded = stage(workload(precision="fp32"), dp=8, zero_stage=1)
    # FSDP's shards are rows of each parameter, so those of the first rank are a little larger than an eighth.
    assert sharded["optimizer_state_bytes"] == pytest.approx(GPT2_PARAMETERS, rel=1e-4)
    # FSDP also keeps its shard of the parameters beside what it gathers for the step.
    assert sharded["parameter_bytes"] == pytest.approx((4 + 4 / 8) * GPT2_PARAMETERS, rel=1e-4)


def test_zero_3_shards_parameters_over_dp(workload: MakeWorkload) -> None:
    wide, narrow = (stage(workload(precision="fp32"), dp=dp, zero_stage=3) for dp in (8, 2))
    # What is gathered does not depend on dp, so the difference is that of the shards.
    shards = 4 * GPT2_PARAMETERS
    assert narrow["parameter_bytes"] - wide["parameter_bytes"] == pytest.approx(shards / 2 - shards / 8, rel=1e-4)
    assert wide["parameter_bytes"] < shards


def test_full_recompute_keeps_one_hidden_state_a_block(workload: MakeWorkload) -> None:
    eight, four = (stage(workload(), recompute="full", micro_batch_size=size)["activation_bytes"] for size in (8, 4))
    # Under autocast the residual stream is in fp32. What follows the blocks is kept as ever: the final norm's input in
    # fp32, the head's in 16 bits, and log-probabilities in 16 and in 32 bits.
    blocks, embedding_mask, head = 12 * 768 * 4, 768, 768 * (4 + 2) + 50257 * (2 + 4)
    assert eight - four == pytest.approx(4 * 1024 * (blocks + embedding_mask + head), rel=0.001)


def test_1f1b_keeps_fewer_micro_batches_towards_the_end_and_gpipe_all() -> None:
    def kept(schedule: str) -> list[float]:
        plan = ParallelPlan.model_validate({"pp": 4, "pipeline_schedule": schedule, "num_microbatches": 64})
        table = PlanTable.of_plans([plan])
        return [float(in_flight(table, even_stage(table, 12, np.array([rank])))[0]) for rank in range(4)]

    assert kept("1f1b") == [4, 3, 2, 1]
    assert kept("gpipe") == [64] * 4
    # Rank i puts off the weight gradients of i micro-batches.
    assert kept("zero_bubble") == [4] * 4


def test_gpipe_keeps_the_activations_of_every_micro_batch(workload: MakeWorkload) -> None:
    twelve, eight, four = (
        evaluate_plan(workload(), ParallelPlan(pp=4, pipeline_schedule="gpipe", num_microbatches=count)).memory[1]
        for count in (12, 8, 4)
    )
    assert twelve.activation_bytes - eight.activation_bytes == eight.activation_bytes - four.activation_bytes > 0


def test_eager_attention_keeps_the_scores(workload: MakeWorkload) -> None:
    scores = 12 * 12 * 1024 * 1024 * 2
    eager, sdpa = (stage(workload(attention=kernel))["activation_bytes"] for kernel in ("eager", "sdpa"))
    assert eager - sdpa > 2 * scores


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    pp = draw(st.sampled_from([1, 1, 2, 3, 4]))
    dp = draw(st.sampled_from([1, 2, 4, 8]))
    tp = draw(st.sampled_from([1, 2, 4]))
    stages = [0] if dp == 1 else [0, 1] if pp > 1 else [0, 1, 2, 3]
    return ParallelPlan(
        dp=dp,
        tp=tp,
        pp=pp,
        zero_stage=draw(st.sampled_from(stages)),
        sequence_parallel=tp > 1 and draw(st.booleans()),
        micro_batch_size=draw(st.integers(1, 4)),
        num_microbatches=draw(st.integers(pp, 16)),
        pipeline_schedule=draw(st.sampled_from(["gpipe", "1f1b"])) if pp > 1 else None,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
    )


def parts(estimate: PlanEstimate) -> list[list[int]]:
    return [[getattr(row, name) for name in MEMORY_PARTS] for row in estimate.memory]


@given(plan=plans())
@settings(deadline=None, max_examples=25)
def test_parts_are_not_negative_and_sum_to_the_total(workload: MakeWorkload, plan: ParallelPlan) -> None:
    estimate = evaluate_plan(workload(), plan)
    for row, values in zip(estimate.memory, parts(estimate), strict=True):
        assert min(values) >= 0
        assert sum(values) == row.total_bytes


@given(plan=plans())
@settings(deadline=None, max_examples=25)
def test_more_data_parallel_ranks_never_need_more_memory(workload: MakeWorkload, plan: ParallelPlan) -> None:
    if plan.dp == 1:
        return
    wider = plan.replace(dp=2 * plan.dp)
    before, after = (evaluate_plan(workload(), one).peak_memory_bytes for one in (plan, wider))
    assert after <= before


@given(plan=plans())
@settings(deadline=None, max_examples=25)
def test_more_recompute_never_keeps_more_activations(workload: MakeWorkload, plan: ParallelPlan) -> None:
    kept = [
        max(row.activation_bytes for row in evaluate_plan(workload(), plan.replace(recompute=name)).memory)
        for name in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)


@given(rows=st.lists(plans(), min_size=1, max_size=12))
@settings(deadline=None, max_examples=10)
def test_a_table_prices_each_plan_as_it_is_priced_alone(workload: MakeWorkload, rows: list[ParallelPlan]) -> None:
    together = peak_memory(workload(), PlanTable.of_plans(rows))
    alone = [evaluate_plan(workload(), plan).peak_memory_bytes for plan in rows]
    assert together.tolist() == pytest.approx(alone, abs=5)


def test_nvidia_smi_shows_no_more_than_the_gpu_has_of_a_plan_that_fits(workload: MakeWorkload) -> None:
    large = workload("llama-3-70b", num_nodes=8, global_batch_size=512, seq_length=8192)
    plan = ParallelPlan(dp=64, zero_stage=3, micro_batch_size=2, num_microbatches=4, recompute="full")
    (stage,) = stage_memories(large, plan)
    assert stage.total_bytes <= large.usable_memory_bytes
    assert stage.device_bytes <= large.cluster.gpu_memory_bytes
    (doubled,) = stage_memories(large, plan.replace(micro_batch_size=4, num_microbatches=2))
    assert doubled.total_bytes > large.usable_memory_bytes
    assert doubled.device_bytes > large.cluster.gpu_memory_bytes


def test_a_gpu_that_communicators_fill_holds_nothing_and_a_peak_is_still_a_share_of_it(workload: MakeWorkload) -> None:
    made = workload()
    tiny = replace(made, constants=made.constants.replace(context_bytes=made.cluster.gpu_memory_bytes))
    estimate = evaluate_plan(tiny, ParallelPlan(dp=2, tp=4, num_microbatches=32))
    assert estimate.usable_memory_bytes == 1
    assert not estimate.fits
    assert format_share(estimate.peak_memory_bytes / estimate.usable_memory_bytes) == "over 9999%"
    assert format_share(0.851) == "85%"


def test_the_allocator_keeps_no_copies_of_gradients_for_a_step_that_the_host_makes(workload: MakeWorkload) -> None:
    made = workload("glm-4-9b", profile="v100-pcie-x4", seq_length=1024, global_batch_size=16, precision="fp16")
    made = Workload.of(made.model, made.training, made.cluster, framework="deepspeed-zero")
    plan = ParallelPlan(dp=4, zero_stage=3, micro_batch_size=4, recompute="full", offload="optimizer")
    found = evaluate_plan(made, plan)
    flat_bytes = 6 * made.model.parameters.total / 4  # made on the GPU where the step is there
    assert found.cached_device_bytes - found.peak_memory_bytes < 0.5 * flat_bytes
