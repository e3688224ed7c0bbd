from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paraplan.cost.communication.exchanges import context_parallel_s
from paraplan.cost.framework_files import load_framework
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan

MEGATRON_CORE = load_framework("megatron-core")

MakeWorkload = Callable[..., Workload]


def test_tokens_for_heads_between_nodes_wait_for_each_gpus_own_nic(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", num_nodes=2, seq_length=262144)
    table = PlanTable.of_plans([ParallelPlan(dp=2, cp=8), ParallelPlan(cp=16)])
    inside, across = context_parallel_s(made, table)[0]
    # Queries and outputs of 16,384 tokens a rank, 8,192 elements of 2 bytes, and the 8 heads of keys and of values
    # twice: 8 of 16 parts leave the node, over a NIC of 50 GB/s for each GPU, of which a collective reaches a part.
    least = 16384 * (8192 + 2 * 2 * 1024) * 2 * 8 / 16 / 50e9
    assert least < across < 1.5 * least
    assert inside < across / 2
    rings = context_parallel_s(replace(made, framework=MEGATRON_CORE), table)[0]
    assert rings[1] < across


def test_recompute_exchanges_again(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", seq_length=8192)
    plan = ParallelPlan(cp=8)
    forward, backward = context_parallel_s(made, PlanTable.of_plans([plan, plan.replace(recompute="full")]))
    assert backward / forward == pytest.approx([1, 2])
