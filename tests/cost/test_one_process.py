from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paraplan.cost.estimate import PlanEstimate, estimate_plan
from paraplan.cost.framework_files import load_framework
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan

HF_TRAINER = load_framework("huggingface-trainer")

MakeWorkload = Callable[..., Workload]
DDP = ParallelPlan(dp=2, micro_batch_size=4)
ONE_PROCESS = ParallelPlan(devices_per_process=2, micro_batch_size=8)


def gpt2(workload: MakeWorkload, profile: str) -> Workload:
    """GPT-2 on two TITAN RTX as in Hugging Face's "Efficient Training on Multiple GPUs": fp32, 4 x 1024 on each."""
    made = workload("gpt2", profile, seq_length=1024, global_batch_size=8, precision="fp32", attention="eager")
    return replace(made, framework=HF_TRAINER)


def test_data_parallel_and_ddp_rank_as_in_the_guide(workload: MakeWorkload) -> None:
    # train_runtime of 200 steps; the benchmark without NVLink is NCCL_P2P_DISABLE=1.
    measured = {("nvlink", DDP): 101.9003, ("nvlink", ONE_PROCESS): 110.5948, ("", DDP): 131.4367}
    predicted = {
        (link, plan): 200
        * estimate_plan(gpt2(workload, f"titan-rtx-x2{'-' if link else ''}{link}"), plan).step.step_time_s
        for link, plan in measured
    }
    assert sorted(predicted, key=lambda each: predicted[each]) == sorted(measured, key=lambda each: measured[each])
    for each, seconds in measured.items():
        assert predicted[each] == pytest.approx(seconds, rel=0.18), each


def test_without_a_fast_link_one_process_is_slower_than_ddp(workload: MakeWorkload) -> None:
    made = gpt2(workload, "titan-rtx-x2")
    assert estimate_plan(made, ONE_PROCESS).step.step_time_s > estimate_plan(made, DDP).step.step_time_s


def test_what_one_process_sends_is_counted_by_hand(workload: MakeWorkload) -> None:
    made = workload("gpt2", "rtx-3090-x2-nvlink", seq_length=1024, global_batch_size=16, precision="fp32")
    step = estimate_plan(made, ParallelPlan(devices_per_process=2, micro_batch_size=8, num_microbatches=2)).step
    parameters, logits = made.model.parameters.total, 4 * 1024 * 50257
    link = 4 * 14.0625e9  # 4 links of NVLink 3 to the other card
    sent = 2 * parameters * 4 / (0.72 * link) + 2 * logits * 4 / (0.77 * link)
    loss = logits * 38 / (0.8 * made.cluster.gpu.memory_bandwidth_bytes_per_s)
    assert step.data_parallel_s == pytest.approx(2 * (sent + loss), rel=0.1)
    assert step.data_parallel_wire_s == step.data_parallel_s


def test_each_gpu_of_a_process_has_its_share_and_the_first_the_loss_of_all(workload: MakeWorkload) -> None:
    made = workload("gpt2", "rtx-3090-x2-nvlink", seq_length=1024, global_batch_size=8)
    alone = workload("gpt2", "rtx-3090-x2-nvlink", seq_length=1024, global_batch_size=4, gpus=1)
    shared = estimate_plan(made, ONE_PROCESS)
    share = estimate_plan(alone, ParallelPlan(micro_batch_size=4))
    assert shared.step.compute_s == pytest.approx(share.step.compute_s, rel=0.02)
    assert shared.step.tokens_per_s_per_gpu < share.step.tokens_per_s_per_gpu
    kept = (parts(shared), parts(share))
    assert kept[0]["optimizer_state_bytes"] == kept[1]["optimizer_state_bytes"]
    assert shared.peak_memory_bytes > share.peak_memory_bytes


def parts(estimate: PlanEstimate) -> dict[str, int]:
    return dict(estimate.memory[0])
