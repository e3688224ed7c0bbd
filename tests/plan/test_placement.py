from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.errors import PlanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_gpu, load_network
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology
from paraplan.plan.files import PlannedPlacement
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, Axis, ParallelPlan
from paraplan.plan.placement.links import link_rates, ring_edges
from paraplan.plan.placement.place import place as place_by
from paraplan.plan.placement.traffic import AxisTraffic
from paraplan.plan.ranks import RankGrid

ANY_AXIS = AxisTraffic(tp=7.0, cp=3.0, dp=2.0, pp=1.0)
USUAL = AxisTraffic(tp=64.0, cp=16.0, dp=4.0, pp=1.0)


def place(plan: ParallelPlan, cluster: Cluster) -> PlannedPlacement:
    return place_by(plan, cluster, traffic=USUAL)


def order_cost(plan: ParallelPlan, cluster: Cluster, order: Sequence[int], traffic: AxisTraffic = USUAL) -> float:
    """Seconds of the traffic: the bytes of each axis by the slowest link of its rings."""
    rates = link_rates(cluster)
    slowest: dict[Axis, float] = {}
    for edge in ring_edges(RankGrid.of_plan(plan), per_node=len(order), wraps_pipeline=plan.virtual_pipeline_size > 1):
        slowest[edge.axis] = min(slowest.get(edge.axis, float("inf")), rates.rate(edge, order))
    return sum(traffic.bytes_of(axis) / rate for axis, rate in slowest.items())


def plan(rank_order: tuple[str, ...] = MEGATRON_RANK_ORDER, **degrees: int) -> ParallelPlan:
    schedule = "1f1b" if degrees.get("pp", 1) > 1 else None
    return ParallelPlan.model_validate({**degrees, "pipeline_schedule": schedule, "rank_order": rank_order})


def cluster_of(links: dict[tuple[int, int], float], *, num_gpus: int, num_nodes: int = 1, nics: int = 0) -> Cluster:
    node = NodeTopology(
        source="test",
        gpus=tuple(Gpu(index=index) for index in range(num_gpus)),
        links=tuple(
            GpuLink(gpu_a=low, gpu_b=high, link_type=LinkType.NV, nvlink_count=1, bandwidth_bytes_per_s=rate * 1e9)
            for (low, high), rate in links.items()
        ),
        nics=tuple(
            Nic(
                name=f"nic{number}",
                rate_bytes_per_s=25e9,
                gpu_links={gpu: LinkType.PIX if gpu % nics == number else LinkType.SYS for gpu in range(num_gpus)},
            )
            for number in range(nics)
        ),
    )
    network = load_network("infiniband-hdr200-8")
    return Cluster(name="test", gpu=load_gpu("a100-sxm-80gb"), node=node, num_nodes=num_nodes, network=network)


def test_tensor_parallel_pairs_stand_on_the_bridges_that_plain_numbering_misses() -> None:
    pairs, cluster = plan(tp=2, dp=2), cluster_from_profile("rtx-3090-x4-crossed")
    placement = place(pairs, cluster)
    assert placement.local_gpus == (0, 2, 1, 3)
    assert placement.slowest_bytes_per_s["tp"] == 56.25e9
    assert order_cost(pairs, cluster, placement.local_gpus) < order_cost(pairs, cluster, range(4)) / 2


def test_a_pipeline_leaves_the_bridges_to_data_parallel_pairs() -> None:
    placement = place(plan(pp=2, dp=2), cluster_from_profile("rtx-3090-x4-crossed"))
    assert placement.slowest_bytes_per_s["dp"] == 56.25e9
    assert placement.slowest_bytes_per_s["pp"] < 30e9


def test_fewer_ranks_than_gpus_take_the_best_linked_ones() -> None:
    assert place(plan(tp=2), cluster_from_profile("rtx-3090-x4-crossed")).local_gpus == (0, 2)
    assert place(plan(dp=8), cluster_from_profile("dgx-2")).local_gpus == tuple(range(8))


def test_plain_numbering_is_kept_where_nothing_is_better() -> None:
    for machine, degrees in (("dgx-h100", {"tp": 4, "dp": 2}), ("frontier", {"tp": 2, "dp": 4}), ("cpu", {"dp": 2})):
        of_all = plan(**degrees)
        assert place(of_all, cluster_from_profile(machine)).local_gpus == tuple(range(of_all.world_size))


def test_a_cube_mesh_has_a_ring_of_double_links() -> None:
    placement = place(plan(dp=8), cluster_from_profile("dgx-1"))
    assert placement.slowest_bytes_per_s["dp"] == 50e9
    halves = place(plan(tp=4, dp=2), cluster_from_profile("dgx-1"))
    assert min(halves.slowest_bytes_per_s.values()) >= 25e9  # every link of every group is an NVLink


def test_a_pipeline_between_nodes_stays_on_its_rail() -> None:
    cluster = cluster_from_profile("aws-p4d-24xlarge", num_nodes=2)
    placement = place(plan(tp=2, pp=4, dp=2), cluster)
    # Ranks 4 to 7 of the first node send to ranks 0 to 3 of the second: each pair shares a NIC.
    assert [gpu // 2 for gpu in placement.local_gpus[4:]] == [gpu // 2 for gpu in placement.local_gpus[:4]]


def test_a_plan_that_does_not_fill_its_nodes_is_refused() -> None:
    with pytest.raises(PlanError, match="12 ranks"):
        place(plan(dp=12), cluster_from_profile("dgx-h100", num_nodes=2))
    with pytest.raises(PlanError, match="at most 16"):
        place(plan(dp=32), cluster_from_profile("dgx-h100", num_nodes=2))


DEGREES = [
    {"tp": 2, "dp": 2},
    {"pp": 2, "dp": 2},
    {"tp": 4},
    {"pp": 4},
    {"tp": 2, "pp": 2},
    {"cp": 2, "dp": 2},
    {"dp": 3},
]
RATES = st.sampled_from([10.0, 25.0, 50.0, 300.0])


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[ParallelPlan, Cluster]:
    degrees = draw(st.sampled_from(DEGREES))
    num_nodes = draw(st.sampled_from([1, 2]))
    num_gpus = draw(st.integers(4, 5)) if num_nodes == 1 else 4
    pairs = [(low, high) for low in range(num_gpus) for high in range(low + 1, num_gpus)]
    links = draw(st.dictionaries(st.sampled_from(pairs), RATES))
    if num_nodes == 2:
        degrees = {**degrees, "dp": degrees.get("dp", 1) * 2} if degrees != {"dp": 3} else {"dp": 8}
    order = draw(st.permutations(MEGATRON_RANK_ORDER))
    nics = draw(st.sampled_from([0, 1, 2]))
    return plan(tuple(order), **degrees), cluster_of(links, num_gpus=num_gpus, num_nodes=num_nodes, nics=nics)


@given(small_cases())
@settings(max_examples=50, deadline=None)
def test_the_order_found_is_the_best_of_all_orders(case: tuple[ParallelPlan, Cluster]) -> None:
    chosen, cluster = case
    order = place_by(chosen, cluster, traffic=ANY_AXIS).local_gpus
    every = permutations(range(cluster.gpus_per_node), len(order))
    best = min(order_cost(chosen, cluster, other, ANY_AXIS) for other in every)
    assert order_cost(chosen, cluster, order, ANY_AXIS) == pytest.approx(best)
    assert sorted(set(order)) == sorted(order)


@st.composite
def large_cases(draw: st.DrawFn) -> tuple[ParallelPlan, Cluster]:
    num_gpus = draw(st.sampled_from([8, 16]))
    axes = draw(st.permutations(["tp", "dp", "pp"]))
    split = draw(
        st.sampled_from([(num_gpus, 1, 1), (num_gpus // 2, 2, 1), (num_gpus // 4, 4, 1), (num_gpus // 4, 2, 2)])
    )
    pairs = [(low, high) for low in range(num_gpus) for high in range(low + 1, num_gpus)]
    links = draw(st.dictionaries(st.sampled_from(pairs), RATES, min_size=num_gpus // 2))
    return plan(**dict(zip(axes, split, strict=True))), cluster_of(links, num_gpus=num_gpus)


@given(large_cases())
@settings(max_examples=20, deadline=None)
def test_a_placement_of_many_gpus_is_never_worse_than_plain_numbering(case: tuple[ParallelPlan, Cluster]) -> None:
    order = place(*case).local_gpus
    assert order_cost(*case, order) <= order_cost(*case, range(len(order))) * (1 + 1e-9)
    assert sorted(order) == list(range(case[1].gpus_per_node))


@pytest.mark.parametrize(
    ("degrees", "slowest"),
    [
        ({"tp": 4, "dp": 4}, {"tp": 26e9}),
        ({"tp": 2, "pp": 2, "dp": 4}, {"tp": 300e9, "dp": 26e9}),
        ({"tp": 8, "dp": 2}, {"tp": 26e9}),
    ],
)
def test_sixteen_gpus_get_their_groups_on_crossed_bridges(degrees: dict[str, int], slowest: dict[Axis, float]) -> None:
    bridges = {(gpu, gpu + 8): 300.0 for gpu in range(8)} | {
        (low, high): 26.0
        for low in range(16)
        for high in range(low + 1, 16)
        if high != low + 8 and (low ^ high) & 1 == 0
    }
    rates = place(plan(**degrees), cluster_of(bridges, num_gpus=16)).slowest_bytes_per_s
    assert {axis: rates[axis] for axis in slowest} == slowest
