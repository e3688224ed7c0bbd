"""Two ranks that share one GPU and talk over gloo: every axis gives the training of one process."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import BATCH, Trained, train
from rank_harness import RankHarness

from paraplan.plan.parallel import ParallelPlan

HALF = BATCH // 2
GLOO = {"PARAPLAN_BACKEND": "gloo"}
PLANS = {
    "ddp": ParallelPlan(dp=2, micro_batch_size=HALF),
    "zero 1": ParallelPlan(dp=2, zero_stage=1, micro_batch_size=HALF),
    "zero 2": ParallelPlan(dp=2, zero_stage=2, micro_batch_size=2, num_microbatches=2),
    "zero 3": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=HALF),
    "zero 3, parameters on the host": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=HALF, offload="parameters"),
    "zero 1, optimizer on the host": ParallelPlan(dp=2, zero_stage=1, micro_batch_size=HALF, offload="optimizer"),
    "split layers": ParallelPlan(tp=2, micro_batch_size=BATCH),
    "split sequences": ParallelPlan(tp=2, sequence_parallel=True, micro_batch_size=BATCH, recompute="full"),
    "split tokens": ParallelPlan(cp=2, micro_batch_size=BATCH),
    "pipeline": ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=2, num_microbatches=4),
    "zero bubble": ParallelPlan(pp=2, pipeline_schedule="zero_bubble", micro_batch_size=2, num_microbatches=4),
}


def _trained(plan: ParallelPlan) -> Trained:
    return train(plan, num_steps=3)


@pytest.fixture(scope="module")
def harness() -> RankHarness:
    return RankHarness()


@pytest.mark.parametrize("case", PLANS)
def test_ranks_on_one_gpu_train_as_one_process(case: str, harness: RankHarness) -> None:
    (expected,) = harness.run(_trained, ParallelPlan(micro_batch_size=BATCH), size=1, is_fresh=True)
    for found in harness.run(_trained, PLANS[case], size=2, is_fresh=True, environment=GLOO):
        assert found.losses == pytest.approx(expected.losses, rel=1e-4)
        assert found.norms == pytest.approx(expected.norms, rel=1e-3)
        for name, gradient in found.gradients.items():
            size = expected.gradients[name].abs().max().clamp(min=1e-4)
            assert ((gradient - expected.gradients[name]).abs().max() / size).item() < 1e-2, name


@pytest.mark.cuda_only
def test_two_ranks_on_one_gpu_without_gloo_are_told_what_to_do(harness: RankHarness) -> None:
    with pytest.raises(AssertionError, match="local rank 1 has no GPU: this machine has 1"):
        harness.run(_trained, PLANS["ddp"], size=2, is_fresh=True)
    assert torch.cuda.device_count() == 1
