"""What the slowest of many GPUs takes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paraplan.cost.constants import CostConstants
from paraplan.cost.estimate import evaluate_plan
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.slowest import largest_of, slowest_gpu_share
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan


def test_the_largest_of_normal_numbers_is_that_of_draws() -> None:
    draws = np.random.default_rng(0).standard_normal((20_000, 64))
    found = largest_of(np.array([1, 8, 64]))
    assert found[0] == 0
    assert found[1:] == pytest.approx([draws[:, :8].max(axis=1).mean(), draws.max(axis=1).mean()], rel=0.02)


def test_more_gpus_wait_for_a_slower_one() -> None:
    plans = [ParallelPlan(), ParallelPlan(dp=8), ParallelPlan(dp=8, tp=8), ParallelPlan(devices_per_process=8)]
    shares = slowest_gpu_share(CostConstants(), PlanTable.of_plans(plans))
    assert shares == pytest.approx([1, 1.0214, 1.0351, 1.0214], abs=2e-4)  # 8 % are 5.4 deviations of 1.5 %
    assert slowest_gpu_share(CostConstants().for_cpu(), PlanTable.of_plans(plans)).tolist() == [1, 1, 1, 1]


def test_a_step_of_many_gpus_is_that_of_the_slowest(workload: Callable[..., Workload]) -> None:
    steps = [
        evaluate_plan(workload("llama-3-8b", num_nodes=nodes, seq_length=4096, global_batch_size=dp), plan).step
        for nodes, dp in ((1, 8), (64, 512))
        for plan in [ParallelPlan(dp=dp, zero_stage=3, micro_batch_size=1)]
    ]
    assert steps[1].compute_s / steps[0].compute_s == pytest.approx(1.0457 / 1.0214, rel=0.002)
