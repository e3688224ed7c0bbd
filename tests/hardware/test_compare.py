"""Which of several machines differs from the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.hardware.catalogue.profile_files import load_machine
from paraplan.hardware.node_differences import compare_nodes, weakest_node
from paraplan.hardware.topology import Gpu, GpuLink, LinkType, Nic, NodeTopology

MACHINE = load_machine("dgx-h100").node


def node(name: str, **changes: object) -> NodeTopology:
    gpus = tuple(gpu.replace(nvlink_count=18, pcie_width=16) for gpu in MACHINE.gpus)
    plain = MACHINE.replace(hostname=name, driver_version="550.54", cuda_version="12.4", gpus=gpus)
    return plain.replace(**changes)


def changed_gpu(position: int, **changes: object) -> tuple[Gpu, ...]:
    gpus = list(node("x").gpus)
    gpus[position] = gpus[position].replace(**changes)
    return tuple(gpus)


def changed_nic(name: str, **changes: object) -> tuple[Nic, ...]:
    return tuple(nic.replace(**changes) if nic.name == name else nic for nic in MACHINE.nics)


def test_of_equal_machines_nothing_is_said() -> None:
    assert compare_nodes([node("a"), node("b"), node("c")]) == []
    assert compare_nodes([node("a")]) == []
    assert compare_nodes([]) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"driver_version": "535.1"}, "node 1 (b) has driver 535.1, where 2 of 3 have driver 550.54"),
        ({"gpus": node("x").gpus[:7]}, "node 1 (b) has 7 GPUs, where 2 of 3 have 8 GPUs"),
        (
            {"gpus": changed_gpu(3, nvlink_count=17)},
            "node 1 (b) has 17 active NVLinks on GPU 3, where 2 of 3 have 18 active NVLinks on GPU 3",
        ),
        (
            {"gpus": changed_gpu(5, pcie_width=8)},
            "node 1 (b) has PCIe x8 on GPU 5, where 2 of 3 have PCIe x16 on GPU 5",
        ),
        ({"gpus": changed_gpu(0, mig_enabled=None)}, None),
        (
            {"nics": changed_nic("mlx5_3", rate_bytes_per_s=2.5e10)},
            "node 1 (b) has 200 Gb/s on mlx5_3, where 2 of 3 have 400 Gb/s on mlx5_3",
        ),
        ({"nics": changed_nic("mlx5_3", state="down")}, "node 1 (b) has mlx5_3 down, where 2 of 3 have mlx5_3 up"),
        ({"nics": MACHINE.nics[1:]}, "node 1 (b) has no mlx5_0, where 2 of 3 have mlx5_0"),
        ({"driver_version": None}, None),
    ],
)
def test_the_node_that_differs_is_named_with_what_it_has(changes: dict[str, object], sentence: str | None) -> None:
    said = compare_nodes([node("a"), node("b", **changes), node("c")])
    assert said == ([sentence] if sentence else [])


def test_another_kind_of_gpu_is_named() -> None:
    gpus = tuple(gpu.replace(name="NVIDIA H200") for gpu in node("x").gpus)
    said = compare_nodes([node("a"), node("b"), node("c", gpus=gpus)])
    assert said == [f"node 2 (c) has NVIDIA H200, where 2 of 3 have {MACHINE.gpus[0].name}"]


def test_of_two_nodes_the_one_with_less_is_the_one_that_differs() -> None:
    for pair in (0, 1):
        nodes = [node("a"), node("b")]
        nodes[pair] = nodes[pair].replace(gpus=changed_gpu(3, nvlink_count=17))
        (said,) = compare_nodes(nodes)
        assert said.startswith(f"node {pair} (")


def test_pairs_with_a_slower_link_share_a_sentence() -> None:
    links = tuple(
        link.replace(nvlink_count=12) if link.gpu_a == 0 and link.gpu_b < 4 else link for link in MACHINE.links
    )
    assert compare_nodes([node("a"), node("b", links=links)]) == [
        "node 1 (b) has NV12 between GPUs 0-1, 0-2, 0-3, where node 0 (a) has NV18 between GPUs 0-1, 0-2, 0-3"
    ]


def test_a_bridge_that_is_missing_is_the_fault_of_the_node_without_it() -> None:
    gpus = (Gpu(index=0), Gpu(index=1))
    bridged = NodeTopology(
        source="test", gpus=gpus, links=(GpuLink(gpu_a=0, gpu_b=1, link_type=LinkType.NV, nvlink_count=4),)
    )
    bare = bridged.replace(links=(GpuLink(gpu_a=0, gpu_b=1, link_type=LinkType.PHB),))
    assert compare_nodes([bare, bridged]) == ["node 0 has PHB between GPUs 0-1, where node 1 has NV4 between GPUs 0-1"]


def test_nics_with_other_names_are_compared_by_their_rates() -> None:
    renamed = tuple(Nic(name=f"en{number}", rate_bytes_per_s=2.5e10) for number in range(2))
    other = tuple(Nic(name=f"p{number}", rate_bytes_per_s=2.5e10) for number in range(2))
    slow = (other[0], other[1].replace(rate_bytes_per_s=1.25e9))
    assert compare_nodes([node("a", nics=renamed), node("b", nics=other)]) == []
    (said,) = compare_nodes([node("a", nics=renamed), node("b", nics=other), node("c", nics=slow)])
    assert said == "node 2 (c) has 1 NIC of 200 Gb/s, 1 NIC of 10 Gb/s, where 2 of 3 have 2 NICs of 200 Gb/s"


def test_memory_counts_as_different_only_beyond_what_drivers_hold_back() -> None:
    size = MACHINE.gpus[0].memory_total_bytes
    assert size is not None
    nearly = changed_gpu(0, memory_total_bytes=round(size * 0.99))
    half = changed_gpu(0, memory_total_bytes=size // 2)
    assert compare_nodes([node("a"), node("b", gpus=nearly)]) == []
    (said,) = compare_nodes([node("a"), node("b", gpus=half)])
    assert said.startswith("node 1 (b) has 39.8 GiB on GPU 0")


def test_two_nodes_of_one_name_are_noticed() -> None:
    assert compare_nodes([node("a"), node("a")]) == ["2 nodes call themselves a"]


def test_the_weakest_node_has_the_fewest_gpus_and_then_the_slowest_network() -> None:
    few, slow = node("few", gpus=node("x").gpus[:7]), node("slow", nics=changed_nic("mlx5_0", rate_bytes_per_s=1e9))
    assert weakest_node([node("a"), slow, few]) is few
    assert weakest_node([node("a"), slow]) is slow


CHANGES: list[Callable[[NodeTopology], NodeTopology]] = [
    lambda one: one,
    lambda one: one.replace(driver_version="535.1"),
    lambda one: one.replace(gpus=one.gpus[:6]),
    lambda one: one.replace(nics=()),
    lambda one: one.replace(links=()),
    lambda one: one.replace(gpus=changed_gpu(2, nvlink_count=0, numa_node=None)),
]


@given(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=5))
def test_the_order_of_nodes_changes_only_their_numbers(changes: list[Callable[[NodeTopology], NodeTopology]]) -> None:
    nodes = [change(node(f"h{number}")) for number, change in enumerate(changes)]
    forward, backward = compare_nodes(nodes), compare_nodes(nodes[::-1])
    assert len(forward) == len(backward)
    if all(change is CHANGES[0] for change in changes):
        assert forward == []
