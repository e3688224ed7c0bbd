from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paraplan.cost.blocks.module_traffic import LLAMA_KERNELS, num_kernels
from paraplan.cost.communication.data_parallel import weight_work
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.framework_files import FrameworkCatalog, load_framework
from paraplan.cost.implementations import implementations
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.slowest import slowest_gpu_share
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision

FSDP1 = implementations().sharding["fsdp1"]
COMPOSER = load_framework("fsdp").changed(data_parallel={"sharding": FSDP1})
DEEPSPEED_ZERO = load_framework("deepspeed-zero")
FSDP = load_framework("fsdp")
HF_TRAINER = load_framework("huggingface-trainer")
MEGATRON_2021 = FrameworkCatalog().bundled("megatron-lm")
MEGATRON_2022 = FrameworkCatalog().bundled("megatron-lm-2022")

MakeWorkload = Callable[..., Workload]
DP = ParallelPlan(dp=8, num_microbatches=4)


@pytest.fixture
def made(workload: MakeWorkload) -> Workload:
    return workload("gpt2", profile="dgx-a100", seq_length=1024)


def bytes_of(made: Workload, plan: ParallelPlan) -> tuple[float, float, float]:
    work = weight_work(made, PlanTable.of_plans([plan]))
    return float(work.cast[0]), float(work.forward[0]), float(work.backward[0])


def test_replicas_cast_their_weights_and_add_and_send_fp32_gradients(made: Workload) -> None:
    # 4 + 4 + 4 bytes to add a gradient in three of four micro-batches, 4 + 4 into a bucket in one.
    assert bytes_of(made, DP) == (6, 0, 0.75 * 12 + 8 / 4)
    assert bytes_of(made, DP.replace(num_microbatches=1)) == (6, 0, 8)
    assert bytes_of(made, ParallelPlan(num_microbatches=32)) == pytest.approx((6, 0, 31 / 32 * 12))


@pytest.mark.parametrize(
    ("stage", "forward", "backward"),
    [(1, 4 / 4, 6 / 4 + 0.75 * (2 + 2 * 4)), (2, 4 / 4, 6), (3, 4, 4 + 6)],
)
def test_shards_are_copied_when_they_are_gathered_and_reduced(
    made: Workload, stage: int, forward: float, backward: float
) -> None:
    assert bytes_of(made, DP.replace(zero_stage=stage)) == (0, forward, backward)


@pytest.mark.parametrize(
    ("framework", "stage", "backward"),
    [
        (MEGATRON_2021, 0, 0.75 * (2 + 2 * 2)),
        (MEGATRON_2021.changed(storage={"gradient_bytes": 4}), 0, 0.75 * (2 + 2 * 4)),
        (MEGATRON_2022, 0, 0),
        (HF_TRAINER, 0, 0.75 * 12 + 16 / 4),
        (FSDP, 3, 4 + 6),
        (COMPOSER, 3, 18),
        (COMPOSER.changed(storage={"gradient_bytes": 2}), 3, 8),
        (DEEPSPEED_ZERO, 3, 4 + 12),
        (DEEPSPEED_ZERO, 2, 12),
    ],
)
def test_each_framework_moves_its_gradients_as_its_source_does(
    made: Workload, framework: FrameworkProfile, stage: int, backward: float
) -> None:
    assert bytes_of(replace(made, framework=framework), DP.replace(zero_stage=stage))[2] == backward


def sharded_by(made: Workload, **values: object) -> Workload:
    sharding = made.framework.data_parallel.sharding.replace(**values)
    return replace(made, framework=made.framework.changed(data_parallel={"sharding": sharding}))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_step_takes_as_much_longer_as_its_copies_take_at_the_memory_s_bandwidth(
    made: Workload, precision: TrainingPrecision
) -> None:
    made = replace(made, training=made.training.replace(precision=precision))
    plain = sharded_by(made, gather_traffic=0, reduce_traffic=(0, 0))
    plan = DP.replace(zero_stage=3, micro_batch_size=16)  # more than the host needs to start it
    moved = 124_439_808 * (4 + 4 + 6) / made.memory_bandwidth_bytes_per_s
    steps = [evaluate_plan(each, plan).step for each in (made, plain)]
    slowest = slowest_gpu_share(made.constants, PlanTable.of_plans([plan]))[0]
    assert steps[0].compute_s - steps[1].compute_s == pytest.approx(4 * moved * slowest, rel=1e-6)


def test_the_host_is_the_limit_of_small_blocks_that_are_gathered(workload: MakeWorkload) -> None:
    small, large = workload("gpt2", seq_length=256), workload("llama-3-8b", seq_length=4096)
    plans = [ParallelPlan(dp=8, num_microbatches=4, zero_stage=stage) for stage in (0, 1, 2, 3)]

    def compute_s(of: Workload) -> list[float]:
        return [evaluate_plan(of, plan).step.compute_s for plan in plans]

    whole, once, reduced, gathered = compute_s(small)
    assert gathered > reduced > once > whole
    # 12 blocks, two gathers and a reduction each, are more than what the GPU does beside the host's other work.
    assert gathered - whole > 4 * 12 * (0.3e-3 + 0.5e-3) * 0.9
    without = sharded_by(large, gather_host_s=0.0, reduce_host_s=0.0)
    assert compute_s(large) == pytest.approx(compute_s(without))


def test_a_recomputed_pass_casts_again_and_gathers_nothing(made: Workload) -> None:
    plan = DP.replace(recompute="full", micro_batch_size=2)
    made = replace(made, framework=made.framework.changed(kernels={"host_s_per_block": 0.0}))  # no block waits for it
    bandwidth = made.memory_bandwidth_bytes_per_s
    uncast = replace(made, framework=made.framework.changed(storage={"is_autocast": False}))
    casts = [evaluate_plan(each, plan).step.recompute_s for each in (made, uncast)]
    matmuls = 12 * 12 * 768 * 768
    assert casts[0] - casts[1] >= 4 * 6 * matmuls / bandwidth * 0.99
    gathered = [
        evaluate_plan(each, plan.replace(zero_stage=3)).step.recompute_s
        for each in (made, sharded_by(made, gather_traffic=0))
    ]
    assert np.ptp(gathered) == 0


def test_recompute_and_halves_of_a_backward_pass_cost_the_host_more(workload: MakeWorkload) -> None:
    small = workload("gpt2", seq_length=64, global_batch_size=4)
    steps = {
        recompute: evaluate_plan(small, ParallelPlan(recompute=recompute, micro_batch_size=1, num_microbatches=4)).step
        for recompute in ("none", "selective_ops", "full")
    }
    host_s = small.framework.kernels.host_s_per_block * num_kernels(small.model.runs[0].block) / LLAMA_KERNELS
    assert steps["none"].compute_s == pytest.approx(4 * 12 * host_s * 3.4, rel=0.15)
    again = [steps[name].recompute_s / (4 * 12 * host_s) for name in ("selective_ops", "full")]
    assert again == pytest.approx([6.2, 2.9])
    pipelines = [
        evaluate_plan(
            small, ParallelPlan(pp=2, pipeline_schedule=schedule, micro_batch_size=1, num_microbatches=4)
        ).step
        for schedule in ("1f1b", "zero_bubble")
    ]
    assert pipelines[1].compute_s > 1.2 * pipelines[0].compute_s


def test_compiled_blocks_take_the_host_half_the_time(workload: MakeWorkload) -> None:
    plain, compiled = (workload("gpt2", seq_length=64, compiled=each).block_kernels for each in (False, True))
    assert compiled.host_s_per_block == pytest.approx(0.5 * plain.host_s_per_block)
    assert plain.starts_modules
    assert not compiled.starts_modules  # whose hooks cost more backward and again


def test_sdpa_without_a_fused_kernel_keeps_all_scores(workload: MakeWorkload) -> None:
    def makes_scores(model: str, profile: str, **options: Any) -> bool:
        return workload(model, profile=profile, seq_length=512, **options).writes_out_scores

    assert makes_scores("llama-3.2-1b", "dgx-h100", precision="fp32")
    assert not makes_scores("llama-3.2-1b", "dgx-h100", precision="bf16")
    assert makes_scores("llama-3.2-1b", "titan-rtx-x2", precision="fp16")  # compute capability 7.5
    assert not makes_scores("gpt2", "titan-rtx-x2", precision="fp32")  # as many keys as queries
    assert not makes_scores("llama-3.2-1b", "dgx-h100", precision="fp32", attention="eager")
