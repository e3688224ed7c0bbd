from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paraplan.cost.communication.collectives import GroupLinks, data_links, expert_links, group_links
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.hardware.bus_bandwidth import RankGroup, bus_bandwidth
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, Axis, ParallelPlan

MakeWorkload = Callable[..., Workload]
GIGABYTE = np.array([1e9])


def links(workload: Workload, axis: Axis, **plan: object) -> GroupLinks:
    return group_links(workload, PlanTable.of_plans([ParallelPlan.model_validate(plan)]), axis)


def bus(workload: Workload, axis: Axis, **plan: object) -> float:
    return links(workload, axis, **plan).speeds["all_reduce"][0].bus_bandwidth_bytes_per_s


def test_a_column_of_times_is_that_of_the_link_model(workload: MakeWorkload) -> None:
    made = workload()
    group = RankGroup(gpus=tuple(range(8)))
    expected = bus_bandwidth(made.cluster, group, "all_reduce", made.links).time_s(1e9)
    assert links(made, "dp", dp=8).all_reduce_s(GIGABYTE) == pytest.approx(expected)


def test_a_group_of_one_costs_nothing(workload: MakeWorkload) -> None:
    assert links(workload(), "tp", dp=8).all_reduce_s(GIGABYTE) == 0


def test_bridge_pairs_serve_neighbours_and_pcie_the_rest(workload: MakeWorkload) -> None:
    made = workload(profile="a100-pcie-x4-bridged")
    assert bus(made, "tp", tp=2, dp=2) > 5 * bus(made, "dp", tp=2, dp=2)


def test_rings_that_leave_a_node_share_its_nics(workload: MakeWorkload) -> None:
    made = workload(num_nodes=2)
    alone, shared = bus(made, "dp", dp=16), bus(made, "dp", dp=2, tp=8)
    assert alone > 4 * shared


def test_a_pipeline_neighbour_in_the_node_is_nearer_than_one_behind_the_network(workload: MakeWorkload) -> None:
    made = workload(num_nodes=2)
    inside = links(made, "pp", pp=2, dp=8, pipeline_schedule="1f1b", rank_order=("dp", "pp", "cp", "tp"))
    across = links(made, "pp", pp=2, dp=8, pipeline_schedule="1f1b")
    assert inside.send_s(GIGABYTE) < across.send_s(GIGABYTE)


@pytest.mark.parametrize("apart", [("cp", "pp", "dp", "tp"), ("pp", "cp", "dp", "tp")])
def test_orders_that_place_ranks_alike_have_the_same_links(workload: MakeWorkload, apart: tuple[Axis, ...]) -> None:
    made = workload(num_nodes=2)
    plan = {"pp": 4, "cp": 4, "pipeline_schedule": "1f1b"}
    alike = tuple(axis for axis in apart if axis != "dp")
    first, second = (PlanTable.of_plans([ParallelPlan(**plan, rank_order=order)]) for order in (apart, ("dp", *alike)))  # type: ignore[arg-type]
    for table in (first, second):
        table.ep[:] = 4
    seconds = [expert_links(made, table)[0].all_to_all_s(GIGABYTE) for table in (first, second)]
    assert seconds[0] == seconds[1]
    assert group_links(made, first, "dp").all_reduce_s(GIGABYTE) == group_links(made, second, "dp").all_reduce_s(
        GIGABYTE
    )


def test_data_and_context_parallel_ranks_apart_average_over_the_slower_links(workload: MakeWorkload) -> None:
    made = workload(num_nodes=2)
    plan = ParallelPlan(pp=4, cp=2, dp=2, pipeline_schedule="1f1b", rank_order=("cp", "pp", "dp", "tp"))
    apart, beside = (PlanTable.of_plans([each]) for each in (plan, plan.replace(rank_order=MEGATRON_RANK_ORDER)))
    seconds = [data_links(made, table)[0].all_reduce_s(GIGABYTE) for table in (apart, beside)]
    assert seconds[0] > 2 * seconds[1]
