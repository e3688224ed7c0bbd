from collections import defaultdict
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.errors import ProfileError
from paraplan.hardware.bus_bandwidth import (
    GroupSpeed,
    RankGroup,
    bus_bandwidth,
    bus_factor,
    inside_link,
    nearest_nics,
)
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, list_machines, load_network
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.hardware.profiles import Collective, MeasuredCollective, NetworkProfile

TABLE = load_link_speeds()
COLLECTIVES: tuple[Collective, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)

# Bus bandwidths in GB/s that nccl-tests printed for messages of 0.5 GiB and more, each with where it was published.
MEASURED: list[tuple[str, int, int, Collective, float]] = [
    # alazzaro/openmpi_on_ss11, osu/craype/collectives/lumi_opt1_rccl_frontier
    ("frontier", 8, 1, "all_reduce", 134.1),
    ("frontier", 8, 1, "all_gather", 125.3),
    ("frontier", 8, 1, "all_to_all", 67.0),
    ("frontier", 8, 2, "all_reduce", 104.2),
    ("frontier", 8, 2, "all_gather", 79.9),
    ("frontier", 8, 2, "all_to_all", 17.6),
    # stas00/ml-engineering, network/README.md
    ("dgx-a100", 8, 1, "all_reduce", 234.9),
    ("hgx-h200", 4, 1, "all_reduce", 363.3),
    ("hgx-h200", 8, 1, "all_reduce", 473.1),
    ("hgx-h200", 8, 1, "all_gather", 361.4),
    ("hgx-h200", 8, 1, "reduce_scatter", 362.9),
    ("aws-p6-b200-48xlarge", 5, 1, "all_reduce", 677.8),
    ("aws-p6-b200-48xlarge", 8, 1, "all_reduce", 838.0),
    ("mi300x-x8", 8, 1, "all_reduce", 312.9),
    ("mi300x-x8", 2, 1, "all_reduce", 47.7),
    # microsoft/superbenchmark, tests/data
    ("azure-nd96asr-v4", 8, 1, "all_reduce", 235.3),
    ("azure-nd96asr-v4", 8, 1, "all_gather", 223.4),
    ("azure-nd96asr-v4", 8, 1, "all_to_all", 224.3),
    # xxrjun/nccl-tests-cluster
    ("dgx-h100", 8, 1, "all_to_all", 348.0),
    ("dgx-h100", 1, 10, "all_reduce", 48.9),
    ("dgx-h100", 4, 10, "all_reduce", 196.3),
    ("dgx-h100", 4, 10, "reduce_scatter", 195.4),
    ("dgx-h100", 8, 10, "all_to_all", 50.4),
    # NVIDIA/deepops, docs/k8s-cluster
    ("dgx-a100", 8, 2, "all_reduce", 188.5),
    # aws-samples/awsome-distributed-training, micro-benchmarks/nccl-tests
    ("aws-p4de-24xlarge", 8, 2, "all_reduce", 78.3),
    ("aws-p5-48xlarge", 8, 2, "all_reduce", 487.1),
    # boeschf/nccl-benchmark-on-alps-2025
    ("gh200-x4", 4, 1, "all_reduce", 339.1),
    ("gh200-x4", 4, 2, "all_reduce", 158.3),
    # NVIDIA/nccl-tests, issue 178: a bridged pair, and one card more
    ("a100-pcie-x8-bridged", 2, 1, "all_reduce", 208.0),
    ("a100-pcie-x8-bridged", 3, 1, "all_reduce", 20.0),
    # Panlichen/nccl-tests
    ("rtx-4090-x2", 2, 1, "all_reduce", 9.1),
    ("rtx-4090-x8", 8, 1, "all_reduce", 2.6),
    # local-inference-lab/rtx6kpro
    ("rtx-pro-6000-x8", 8, 1, "all_reduce", 46.4),
]


def predicted(machine: str, gpus: int, nodes: int, collective: Collective) -> float:
    cluster = cluster_from_profile(machine, num_nodes=nodes)
    group = RankGroup(gpus=tuple(range(gpus)), num_nodes=nodes)
    return bus_bandwidth(cluster, group, collective, TABLE).bus_bandwidth_bytes_per_s / 1e9


def test_predicted_bus_bandwidths_stay_near_published_ones_on_each_kind_of_link() -> None:
    errors = defaultdict(list)
    for machine, gpus, nodes, collective, measured in MEASURED:
        error = abs(predicted(machine, gpus, nodes, collective) - measured) / measured
        errors[machine].append(error)
        assert error < 0.16, (machine, gpus, nodes, collective)
    assert median(error for found in errors.values() for error in found) < 0.05


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [("all_reduce", 8, 1.75), ("all_gather", 4, 0.75), ("all_to_all", 2, 0.5), ("broadcast", 8, 1.0)],
)
def test_bus_factors_are_those_of_nccl_tests(collective: Collective, ranks: int, factor: float) -> None:
    assert bus_factor(collective, ranks) == factor


def test_one_gpu_outside_an_nvlink_pair_makes_the_group_ten_times_slower() -> None:
    assert predicted("a100-pcie-x8-bridged", 2, 1, "all_reduce") > 10 * predicted(
        "a100-pcie-x8-bridged", 3, 1, "all_reduce"
    )


def test_nvlinks_without_a_switch_divide_over_the_peers() -> None:
    cluster = cluster_from_profile("polaris")
    assert inside_link(cluster, (0, 1)).payload_bytes_per_s == 100e9
    assert inside_link(cluster, (0, 1, 2, 3)).payload_bytes_per_s == 300e9
    assert inside_link(cluster, (0, 1, 2, 3)).pair_bytes_per_s == 100e9
    switched = cluster_from_profile("dgx-a100")
    assert inside_link(switched, (0, 1)).payload_bytes_per_s == inside_link(switched, range(8)).payload_bytes_per_s


def test_gpus_that_nvlink_reaches_only_in_part_use_pcie() -> None:
    cluster = cluster_from_profile("dgx-1")
    assert inside_link(cluster, (0, 4)).kind == "nvlink-direct"
    assert inside_link(cluster, (0, 5)).kind == "pcie-peer"
    assert inside_link(cluster, range(8)).payload_bytes_per_s == 150e9


def test_cards_without_peer_access_share_the_memory_of_the_host() -> None:
    cluster = cluster_from_profile("rtx-4090-x8")
    assert inside_link(cluster, (0, 1)).kind == "pcie-host"
    assert inside_link(cluster, range(8)).payload_bytes_per_s == inside_link(cluster, (0, 1)).payload_bytes_per_s / 4


def test_groups_that_leave_a_node_together_share_its_nics() -> None:
    cluster = cluster_from_profile("aws-p4d-24xlarge", num_nodes=4)
    alone = bus_bandwidth(cluster, RankGroup(gpus=(0,), num_nodes=4), "all_reduce", TABLE)
    shared = bus_bandwidth(cluster, RankGroup(gpus=(0,), num_nodes=4, groups_per_node=8), "all_reduce", TABLE)
    assert alone.payload_bytes_per_s == 12.5e9  # one GPU uses the NIC next to it
    assert shared.payload_bytes_per_s == 50e9 / 8


def test_the_nearest_nics_are_those_behind_the_same_switch() -> None:
    assert nearest_nics(cluster_from_profile("dgx-h100").node, 5) == ["mlx5_5"]
    assert nearest_nics(cluster_from_profile("dgx-a100").node, 0) == ["mlx5_0", "mlx5_1"]
    assert nearest_nics(cluster_from_profile("rtx-4090-x2").node, 0) == []


def test_a_measurement_of_the_same_group_is_preferred() -> None:
    measured = MeasuredCollective(
        collective="all_reduce",
        num_ranks=8,
        link="nvswitch-4",
        latency_s=1e-5,
        bus_bandwidth_bytes_per_s=4.4e11,
        source="a test",
    )
    cluster = cluster_from_profile("dgx-h100").replace(measured=(measured,))
    group = RankGroup(gpus=tuple(range(8)))
    assert bus_bandwidth(cluster, group, "all_reduce", TABLE).bus_bandwidth_bytes_per_s == 4.4e11
    assert bus_bandwidth(cluster, group, "all_gather", TABLE).bus_bandwidth_bytes_per_s != 4.4e11


def test_several_nodes_without_a_network_are_an_error() -> None:
    cluster = cluster_from_profile("t4-x2", num_nodes=2)
    with pytest.raises(ProfileError, match="names no network"):
        bus_bandwidth(cluster, RankGroup(gpus=(0, 1), num_nodes=2), "all_reduce", TABLE)
    with pytest.raises(ProfileError, match=r"'carrier'"):
        TABLE.speed("carrier")


def test_a_group_of_one_takes_no_time() -> None:
    assert bus_bandwidth(cluster_from_profile("cpu"), RankGroup(gpus=(0,)), "all_reduce", TABLE).time_s(1e9) == 0


MACHINES = {machine.name: machine for machine in list_machines() if len(machine.node.gpus) > 1 and machine.network}


@given(st.sampled_from(sorted(MACHINES)), st.sampled_from(COLLECTIVES), st.data())
def test_times_are_positive_and_grow_with_the_message(
    machine: str, collective: Collective, data: st.DataObject
) -> None:
    cluster = cluster_from_profile(machine, num_nodes=data.draw(st.sampled_from([1, 2, 5])))
    count = data.draw(st.integers(1 if cluster.num_nodes > 1 else 2, cluster.gpus_per_node))
    group = RankGroup(gpus=tuple(range(count)), num_nodes=cluster.num_nodes)
    speed = bus_bandwidth(cluster, group, collective, TABLE)
    assert 0 < speed.time_s(1e3) < speed.time_s(1e6) < speed.time_s(1e9)
    assert speed.bus_bandwidth_bytes_per_s <= 2 * speed.payload_bytes_per_s


def test_a_network_that_was_measured_by_ranks_gets_slower_with_them_and_stays_at_its_ends() -> None:
    network = load_network("aws-efa-3200-playbook")
    assert rate_of(network, "all_reduce", 64) == 99.6e9
    assert rate_of(network, "all_reduce", 90) == pytest.approx((99.6e9 * 84.7e9) ** 0.5, rel=0.01)
    assert rate_of(network, "all_gather", 4096) == rate_of(network, "all_gather", 512)
    assert network.measured_rate("send_recv", 64) is None
    assert load_network("aws-efa-3200").measured_rate("all_reduce", 64) is None
    slingshot = load_network("slingshot-200-2")
    assert slingshot.measured_rate("reduce_scatter", 32) == slingshot.measured_rate("all_gather", 32)


def test_a_group_of_one_gpu_a_node_is_as_slow_as_its_ranks_and_has_its_share_of_the_nics() -> None:
    cluster = cluster_from_profile("aws-p5-48xlarge", num_nodes=32)
    measured = cluster.replace(network=load_network("aws-efa-3200-playbook"))
    whole = bus_bandwidth(measured, RankGroup(gpus=tuple(range(8)), num_nodes=32), "all_reduce", TABLE)
    single = bus_bandwidth(measured, RankGroup(gpus=(0,), num_nodes=32, groups_per_node=8), "all_reduce", TABLE)
    assert reached(whole, 2**28) == pytest.approx(64.9e9)  # 256 ranks
    assert reached(single, 2**28) == pytest.approx(160.1e9 / 8)  # 32 ranks
    plain = bus_bandwidth(cluster, RankGroup(gpus=tuple(range(8)), num_nodes=32), "all_reduce", TABLE)
    assert plain.bus_bandwidth_bytes_per_s > 2 * whole.bus_bandwidth_bytes_per_s


@pytest.mark.parametrize("num_nodes", [2, 8, 32, 256, 540])
@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
def test_messages_as_long_as_those_measured_reach_what_was_measured(num_nodes: int, collective: Collective) -> None:
    cluster = cluster_from_profile("polaris", num_nodes=num_nodes)
    assert cluster.network is not None
    speed = bus_bandwidth(cluster, RankGroup(gpus=(0, 1, 2, 3), num_nodes=num_nodes), collective, TABLE)
    measured = cluster.network.measured_rate(collective, 4 * num_nodes)
    assert measured is not None
    assert reached(speed, measured.message_bytes) == pytest.approx(measured.bus_bandwidth_bytes_per_s, rel=1e-6)
    assert reached(speed, 2**24) < reached(speed, 2**28) < reached(speed, 2**30)


def test_no_latency_makes_a_message_longer_than_it_was_measured() -> None:
    slow = cluster_from_profile("polaris", num_nodes=540)
    assert slow.network is not None
    waiting = slow.replace(network=slow.network.replace(latency_s=1e-3))
    speed = bus_bandwidth(waiting, RankGroup(gpus=(0, 1, 2, 3), num_nodes=540), "all_gather", TABLE)
    assert reached(speed, 2**28) == pytest.approx(4.27e9, rel=1e-6)


def test_rings_of_a_node_without_a_switch_carry_what_its_narrowest_cut_does() -> None:
    frontier = cluster_from_profile("frontier")
    rates = [inside_link(frontier, gpus).payload_bytes_per_s / 50e9 for gpus in ((0, 1), (0, 1, 2, 3), (0, 2, 4, 6))]
    assert rates == [4, 2, 2]  # links: of a module; between two modules; of the chain 0-2-4-6 with its ends joined
    assert inside_link(frontier, tuple(range(8))).payload_bytes_per_s == 5 * 50e9  # those that leave a module
    full = cluster_from_profile("8xmi300x")
    assert inside_link(full, tuple(range(8))).payload_bytes_per_s == pytest.approx(7 * 64e9, rel=0.01)


def test_an_all_reduce_goes_by_trees_where_a_ring_of_as_many_ranks_takes_longer() -> None:
    group = RankGroup(gpus=tuple(range(8)), num_nodes=256)
    near, far = (bus_bandwidth(of_latency(latency_s), group, "all_reduce", TABLE) for latency_s in (1e-9, 1e-4))
    assert near.latency_s < 1e-3
    assert far.latency_s < 2 * 256 * 8 * 1e-4 / 10  # up a tree of 256 nodes and down again, not round a ring


def of_latency(latency_s: float) -> Cluster:
    cluster = cluster_from_profile("frontier", num_nodes=256)
    assert cluster.network is not None
    return cluster.replace(network=cluster.network.replace(latency_s=latency_s))


def rate_of(network: NetworkProfile, collective: Collective, num_ranks: int) -> float:
    rate = network.measured_rate(collective, num_ranks)
    assert rate is not None
    return rate.bus_bandwidth_bytes_per_s


def reached(speed: GroupSpeed, num_bytes: int) -> float:
    """Return what nccl-tests would print for messages of so many bytes."""
    return bus_factor(speed.collective, speed.num_ranks) * num_bytes / speed.time_s(num_bytes)
