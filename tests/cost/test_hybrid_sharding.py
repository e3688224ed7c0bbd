from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paraplan.cost.communication.collectives import data_links
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan

MakeWorkload = Callable[..., Workload]
DP = ParallelPlan(dp=32, num_microbatches=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_group_of_all_ranks_costs_what_zero_costs(workload: MakeWorkload, stage: int) -> None:
    made = workload("gpt2-xl", num_nodes=4)
    whole = estimate_plan(made, DP.replace(zero_stage=stage))
    group = estimate_plan(made, DP.replace(zero_stage=stage, zero_shards=32))
    assert group.step == whole.step
    assert group.memory == whole.memory


def test_optimizer_state_is_divided_over_a_group_alone(workload: MakeWorkload) -> None:
    made = workload("gpt2-xl", num_nodes=4)
    states = {
        shards: estimate_plan(made, DP.replace(zero_stage=3, zero_shards=shards)).memory[0].optimizer_state_bytes
        for shards in (2, 8, 32)
    }
    assert states[2] == pytest.approx(4 * states[8], rel=1e-2)
    assert states[8] == pytest.approx(4 * states[32], rel=1e-2)


def test_groups_inside_a_node_gather_over_its_links_and_average_shards_between_nodes(workload: MakeWorkload) -> None:
    made = workload("gpt2-xl", num_nodes=4)
    table = PlanTable.of_plans([DP.replace(zero_stage=3, zero_shards=8)])
    shards, replicas = data_links(made, table)
    assert (shards.size.tolist(), replicas.size.tolist()) == ([8], [4])
    assert shards.speeds["all_gather"][0].kind == "nvswitch-4"
    assert replicas.speeds["all_reduce"][0].kind == "rdma"
    # Eight such groups leave a node at the same time: each has one of its eight NICs.
    assert replicas.speeds["all_reduce"][0].payload_bytes_per_s == pytest.approx(50e9, rel=0.05)


def test_a_ring_of_replicas_is_counted_by_hand(workload: MakeWorkload) -> None:
    # ZeRO-2 in groups of 8: one gather of 16-bit weights, and for each micro-batch a reduce-scatter and an all-reduce.
    made = workload("gpt2-xl", num_nodes=4)
    plan = DP.replace(zero_stage=2, zero_shards=8)
    shards, replicas = data_links(made, PlanTable.of_plans([plan]))
    parameters, blocks = made.model.parameters.total, made.model.num_blocks

    def seconds(links: object, name: str, num_bytes: float) -> float:
        return float(getattr(links, name)(np.array([num_bytes]))[0])

    unit = parameters * 4 / blocks
    reduced = seconds(shards, "reduce_scatter_s", unit) + seconds(replicas, "all_reduce_s", unit / 8)
    gathered = seconds(shards, "all_gather_s", parameters * 2 / blocks)
    wire = estimate_plan(made, plan).step.data_parallel_wire_s
    assert wire == pytest.approx(blocks * (gathered + 2 * reduced), rel=0.06)
