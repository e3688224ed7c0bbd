from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from paraplan.cost.communication.collectives import overlap_s
from paraplan.cost.estimate import evaluate_plan, evaluate_plans, step_times
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError, ProfileError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, list_machines
from paraplan.model.reader import read_model
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, ParallelPlan
from paraplan.plan.training import TrainingSpec

MakeWorkload = Callable[..., Workload]
EXPOSED = (
    "compute_s",
    "recompute_s",
    "tensor_parallel_s",
    "pipeline_bubble_s",
    "pipeline_send_s",
    "data_parallel_s",
    "optimizer_s",
)


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    pp = draw(st.sampled_from([1, 2, 4]))
    dp = draw(st.sampled_from([1, 2, 4]))
    stages = [0] if dp == 1 else [0, 1] if pp > 1 else [0, 1, 2, 3]
    return ParallelPlan(
        dp=dp,
        pp=pp,
        tp=draw(st.sampled_from([1, 2])),
        zero_stage=draw(st.sampled_from(stages)),
        num_microbatches=64 // dp,
        pipeline_schedule="1f1b" if pp > 1 else None,
        rank_order=draw(st.sampled_from([MEGATRON_RANK_ORDER, ("dp", "pp", "cp", "tp"), ("tp", "pp", "dp", "cp")])),
        recompute=draw(st.sampled_from(["none", "full"])),
    )


@given(plan=plans())
@settings(deadline=None, max_examples=25)
def test_exposed_parts_sum_to_the_step(workload: MakeWorkload, plan: ParallelPlan) -> None:
    step = evaluate_plan(workload(), plan).step
    assert min(getattr(step, name) for name in EXPOSED) >= 0
    assert sum(getattr(step, name) for name in EXPOSED) == pytest.approx(step.step_time_s)


@given(rows=st.lists(plans(), min_size=1, max_size=8))
@settings(deadline=None, max_examples=10)
def test_a_table_times_each_plan_as_it_is_timed_alone(workload: MakeWorkload, rows: list[ParallelPlan]) -> None:
    together = step_times(workload(), PlanTable.of_plans(rows)).step_time_s
    alone = [evaluate_plan(workload(), plan).step.step_time_s for plan in rows]
    assert together.tolist() == pytest.approx(alone, rel=1e-6)


@given(rows=st.lists(plans(), min_size=1, max_size=8), pp=st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=10)
def test_plans_of_as_many_stages_are_evaluated_at_once_as_each_is_alone(
    workload: MakeWorkload, rows: list[ParallelPlan], pp: int
) -> None:
    schedule = "1f1b" if pp > 1 else None
    few = [
        plan.replace(pp=pp, pipeline_schedule=schedule, zero_stage=min(plan.zero_stage, 1 if pp > 1 else 3))
        for plan in rows
    ]
    for found, plan in zip(evaluate_plans(workload(), few), few, strict=True):
        alone = evaluate_plan(workload(), plan)
        assert found.memory == alone.memory
        assert found.step.model_dump() == pytest.approx(alone.step.model_dump(), rel=1e-6)


def test_the_bubble_of_equal_stages_is_p_minus_1_slots(workload: MakeWorkload) -> None:
    # A model with a negligible head, so that all stages take the same time: Narayanan et al. 2021, section 2.2.
    made = workload("gpt3-175b", profile="dgx-a100", seq_length=2048)
    plan = ParallelPlan(pp=8, pipeline_schedule="gpipe", num_microbatches=64)
    step = evaluate_plan(made, plan).step
    slots = step.compute_s + step.pipeline_send_s
    assert step.pipeline_bubble_s == pytest.approx(slots / 64 * 7, rel=0.05)


@given(
    machine=st.sampled_from([one.name for one in list_machines()]),
    framework=st.sampled_from(["paraplan", "megatron-core", "torchtitan", "huggingface-trainer", "nemo-automodel"]),
    model=st.sampled_from(["gpt2", "llama-3-8b", "qwen3-30b-a3b"]),
    numbers=st.sampled_from([("fp32", "16bit"), ("bf16", "16bit"), ("fp16", "16bit"), ("bf16", "fp8")]),
    length=st.sampled_from([512, 1024, 131072]),
    micro_batch=st.sampled_from([1, 8]),
    settings_of_stack=st.sampled_from([{}, {"cuda_graphs": "full", "compiled_loss": True}]),
)
@settings(deadline=None, max_examples=30)
def test_no_step_does_more_than_the_peak_of_its_numbers(
    machine: str,
    framework: str,
    model: str,
    numbers: tuple[str, str],
    length: int,
    micro_batch: int,
    settings_of_stack: dict[str, object],
) -> None:
    cluster = cluster_from_profile(machine)
    assume(model != "gpt2" or length <= 1024)
    try:
        spec = read_model(model, seq_length=length)
        training = TrainingSpec.model_validate(
            {
                "global_batch_size": micro_batch * cluster.num_gpus,
                "seq_length": length,
                "precision": numbers[0],
                "linear_precision": numbers[1],
                "stack": settings_of_stack,
            }
        )
        made = Workload.of(spec, training, cluster, framework=framework)
        step = evaluate_plan(made, ParallelPlan(dp=cluster.num_gpus, micro_batch_size=micro_batch)).step
    except ParaplanError:  # a GPU or framework without these numbers
        reject()
    # Attention that a causal mask halves is counted in full, and done by half.
    whole, products = (spec.training_flops_per_token(reach) for reach in (length, 0))
    assert step.mfu * (1 + products / whole) / 2 <= 1


def test_recompute_costs_about_a_third_more_compute(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=4096)
    # What is gathered and reduced is copied, and that is not done again.
    sharding = made.framework.data_parallel.sharding.replace(gather_traffic=0, reduce_traffic=(0, 0))
    framework = made.framework.changed(data_parallel={"sharding": sharding})
    plan = ParallelPlan(dp=8, zero_stage=3, num_microbatches=8, recompute="full")
    early, whole = (
        evaluate_plan(replace(made, framework=framework.changed(kernels={"checkpoints": kind})), plan).step
        for kind in ("early", "whole")
    )
    assert whole.recompute_s == pytest.approx(whole.compute_s / 3, rel=0.15)
    assert early.compute_s == whole.compute_s
    # Of q, k, v, o, gate, up and down the last: 14,336 of 52,224 columns of 4,096.
    assert 0.15 < 1 - early.recompute_s / whole.recompute_s < 14336 / (3 * 14336 + 2 * 4096 + 2 * 1024)


def test_slow_links_expose_the_reduction_that_fast_links_hide(workload: MakeWorkload) -> None:
    plan = ParallelPlan(dp=2, num_microbatches=32)
    bridged, plain = (
        evaluate_plan(workload("gpt2-xl", profile=name), plan).step for name in ("rtx-3090-x2-nvlink", "rtx-3090-x2")
    )
    assert plain.data_parallel_wire_s > 2 * bridged.data_parallel_wire_s
    assert plain.step_time_s > bridged.step_time_s


@pytest.mark.parametrize(
    ("transfer_s", "compute_s", "added_s"),
    [(0.0, 1.0, 0.0), (0.5, 1.0, 0.1), (1.0, 1.0, 0.2), (3.0, 1.0, 2.2), (1.0, 0.0, 1.0)],
)
def test_what_overlaps_slows_down_and_what_is_longer_goes_on_alone(
    transfer_s: float, compute_s: float, added_s: float
) -> None:
    assert overlap_s(np.array(transfer_s), np.array(compute_s), slowdown=1.2) == pytest.approx(added_s)


def test_several_nodes_without_a_network_are_an_error(workload: MakeWorkload) -> None:
    made = workload(num_nodes=2)
    lonely = Workload.of(made.model, made.training, made.cluster.replace(network=None), made.links)
    with pytest.raises(ProfileError, match="names no network, and several nodes need one"):
        evaluate_plan(lonely, ParallelPlan(dp=16))


def test_the_step_of_every_machine_that_comes_with_paraplan_is_estimated(workload: MakeWorkload) -> None:
    made = workload("gpt2", precision="fp32")
    for machine in list_machines():
        cluster = cluster_from_profile(machine.name, num_nodes=1)
        there = Workload.of(made.model, made.training, cluster, made.links)
        plan = ParallelPlan(dp=cluster.num_gpus, num_microbatches=4)
        assert evaluate_plan(there, plan).step.step_time_s > 0, machine.name


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_uneven_stages_in_the_middle_are_seen_by_the_search(workload: MakeWorkload, schedule: str) -> None:
    made = workload("llama-3-8b", num_nodes=2, seq_length=2048, global_batch_size=32)
    plan = ParallelPlan(
        tp=2, pp=8, num_microbatches=32, pipeline_schedule=schedule, stage_blocks=(4, 4, 5, 4, 4, 4, 4, 3)
    )
    searched = step_times(made, PlanTable.of_plans([plan, plan.replace(micro_batch_size=2, num_microbatches=16)]))
    assert searched.step_time_s[0] == pytest.approx(evaluate_plan(made, plan).step.step_time_s, rel=0.01)


def test_an_offloaded_optimizer_takes_as_long_as_its_bytes_in_the_hosts_memory(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-a100", seq_length=4096)
    plan = ParallelPlan(dp=8, zero_stage=3, offload="optimizer", num_microbatches=8)
    parameters = made.model.parameters.total
    fused_s, looped_s = (
        evaluate_plan(replace(made, framework=made.framework.changed(storage={"optimizer_step": how})), plan).step
        for how in ("fused", "for_loop")
    )
    copied_s = parameters / 8 * 8 / made.cluster.gpu.pcie_bandwidth_bytes_per_s
    stepped_s = parameters * 36 / 202e9  # of two sockets, by all eight ranks together
    assert fused_s.optimizer_s == pytest.approx(copied_s + stepped_s, rel=0.01)
    assert looped_s.optimizer_s == pytest.approx(copied_s + 6 * stepped_s, rel=0.01)


def test_checkpoints_that_are_not_reentrant_cost_the_host_hooks(workload: MakeWorkload) -> None:
    made = workload("qwen2.5-0.5b", seq_length=128)  # which the host bounds
    plan = ParallelPlan(dp=8, num_microbatches=8, recompute="full")
    reentrant, whole = (
        evaluate_plan(replace(made, framework=made.framework.changed(kernels={"checkpoints": kind})), plan).step
        for kind in ("reentrant", "whole")
    )
    assert whole.recompute_s > 1.5 * reentrant.recompute_s
    assert whole.compute_s == reentrant.compute_s


def test_a_loss_without_logits_makes_them_twice_and_moves_none(workload: MakeWorkload) -> None:
    made = workload("gemma-2-2b", seq_length=4096)
    plan = ParallelPlan(dp=8, num_microbatches=8)
    cut = Workload.of(made.model, made.training.replace(loss="cut"), made.cluster)
    once = replace(cut, training=made.training)  # the same kernels, of logits that are made once
    both = [evaluate_plan(one, plan).step.compute_s for one in (cut, once)]
    head_flops = 2 * 8 * 4096 * 256_000 * 2304
    assert both[0] - both[1] > head_flops / made.cluster.gpu.peak_flops_per_s["bf16"]
    assert both[0] - both[1] < 3 * head_flops / made.cluster.gpu.peak_flops_per_s["bf16"]


def test_deepspeed_gathers_module_by_module_in_every_pass(workload: MakeWorkload) -> None:
    told = workload("llama-3.2-1b", seq_length=128)  # which the host bounds
    made = Workload.of(told.model, told.training, told.cluster, framework="deepspeed-zero")
    plans = [ParallelPlan(dp=8, zero_stage=3, num_microbatches=8, recompute=kind) for kind in ("none", "full")]
    sharding = made.framework.data_parallel.sharding
    free = sharding.replace(gather_host_s=0.0, reduce_host_s=0.0)
    without = replace(made, framework=made.framework.changed(data_parallel={"sharding": free}))
    added = [
        evaluate_plan(made, plan).step.step_time_s - evaluate_plan(without, plan).step.step_time_s for plan in plans
    ]
    modules, blocks = 7 + 2 + 4, 16
    passes = 2 * sharding.gather_host_s + sharding.reduce_host_s
    assert added[0] == pytest.approx(8 * blocks * modules * passes, rel=0.05)
    assert added[1] == pytest.approx(8 * blocks * modules * (passes + sharding.gather_host_s), rel=0.05)


def test_interleaved_sends_are_hidden_once_all_stages_are_filled(workload: MakeWorkload) -> None:
    told = workload("llama-3-70b", num_nodes=4, seq_length=4096, global_batch_size=256)
    made = Workload.of(told.model, told.training, told.cluster, framework="megatron-core")
    shown = made.framework.changed(pipeline={"overlaps_sends": False})
    for microbatches, least, most in ((8, 0.0, 1 / 16), (64, 0.6, 113 / 128)):  # 7 + 8 of 16 or 128 chunks fill it
        plan = ParallelPlan(
            dp=1,
            tp=4,
            pp=8,
            pipeline_schedule="interleaved_1f1b",
            virtual_pipeline_size=2,
            num_microbatches=microbatches,
            micro_batch_size=256 // microbatches,
        )
        left = evaluate_plan(made, plan).step.pipeline_send_s
        whole = evaluate_plan(replace(made, framework=shown), plan).step.pipeline_send_s
        assert least <= 1 - left / whole <= most + 1e-6


def test_fp32_scores_have_no_fused_softmax(workload: MakeWorkload) -> None:
    told = workload("gpt2-xl", "dgx-a100", precision="fp32", attention="eager")
    made = Workload.of(told.model, told.training, told.cluster, framework="megatron-core")
    plan = ParallelPlan(dp=8, num_microbatches=8)
    longer, shorter = (
        evaluate_plan(Workload.of(made.model, training, made.cluster, framework="megatron-core"), plan).step.compute_s
        for training in (made.training, made.training.replace(seq_length=512, global_batch_size=128))
    )
    # Twice as long, half as many: scores are twice as many, all else is as much.
    more_scores = 8 * 48 * 25 * 1024 * 1024 / 2
    assert longer - shorter > more_scores * 2 * 16 / 2.04e12


def test_zero_1_shows_its_first_and_last_transfer_however_much_it_overlaps(workload: MakeWorkload) -> None:
    told = workload("llama-3-8b", num_nodes=8, seq_length=1024)
    made = Workload.of(told.model, told.training, told.cluster, framework="megatron-core")
    step = evaluate_plan(made, ParallelPlan(dp=64, zero_stage=1)).step
    assert step.data_parallel_s > step.data_parallel_wire_s / 32
    shown = replace(made, framework=made.framework.changed(data_parallel={"overlaps_zero_1": False}))
    assert step.data_parallel_s < evaluate_plan(shown, ParallelPlan(dp=64, zero_stage=1)).step.data_parallel_s
