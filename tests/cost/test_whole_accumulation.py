"""FSDP without a reduction before the last micro-batch, and losses of gathered logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.framework_files import load_framework
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan

MakeWorkload = Callable[..., Workload]
FSDP = load_framework("fsdp")


def test_gradients_stay_whole_in_fp32_until_the_last_micro_batch_reduces_them(workload: MakeWorkload) -> None:
    model = workload("llama-3-8b", seq_length=1024)
    whole = FSDP.changed(data_parallel={"accumulates_whole": True})
    plan = ParallelPlan(dp=8, zero_stage=3, num_microbatches=4, recompute="full")
    before, after = (evaluate_plan(replace(model, framework=each), plan) for each in (FSDP, whole))
    parameters = 8_030_261_248
    gradients = [each.memory[0].gradient_bytes / parameters for each in (before, after)]
    assert gradients[0] < 2
    assert 4 <= gradients[1] < 4.4  # with those of the block that is reduced
    assert after.step.data_parallel_wire_s < before.step.data_parallel_wire_s
    once = plan.replace(num_microbatches=1)
    alone = [evaluate_plan(replace(model, framework=each), once).memory[0] for each in (FSDP, whole)]
    assert alone[0] == alone[1]


def test_gathered_logits_are_whole_on_each_rank_of_tensor_parallelism(workload: MakeWorkload) -> None:
    model = workload("llama-3-8b", seq_length=8192)
    gathers = FSDP.changed(loss={"gathers_logits": True})
    plan = ParallelPlan(tp=8, sequence_parallel=True, recompute="full", micro_batch_size=4)
    divided, gathered = (evaluate_plan(replace(model, framework=each), plan).memory[0] for each in (FSDP, gathers))
    logits = 4 * 8192 * 128256
    assert gathered.total_bytes - divided.total_bytes == pytest.approx(10 * logits * 7 / 8, rel=0.1)
