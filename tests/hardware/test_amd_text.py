"""What rocm-smi, amd-smi and TransferBench print."""

from __future__ import annotations

import json

import pytest

from paraplan.errors import TopologyError
from paraplan.hardware.readers.any_text import read_topology
from paraplan.hardware.topology import LinkType, NodeTopology


def read(text: str) -> NodeTopology:
    return read_topology(text, source="test")


def rocm_table(title: str, cells: list[list[str]]) -> str:
    count = len(cells)
    head = "       " + "".join(f"GPU{number:<10}" for number in range(count))
    rows = [f"GPU{number:<4}" + "".join(f"{cell:<13}" for cell in row) for number, row in enumerate(cells)]
    return "\n".join([f"{title:=^80}", head, *rows, ""])


def pairs(inside: str, across: str, *, count: int = 4, itself: str = "0") -> list[list[str]]:
    half = count // 2
    return [
        [itself if a == b else inside if a // half == b // half else across for b in range(count)] for a in range(count)
    ]


def numa(nodes: list[int]) -> str:
    return "\n".join(f"GPU[{gpu}]\t\t: (Topology) Numa Node: {node}" for gpu, node in enumerate(nodes)) + "\n"


def show_topo() -> str:
    return (
        rocm_table(" ROCm System Management Interface ", [])
        + rocm_table(" Weight between two GPUs ", pairs("15", "72"))
        + "WARNING: AMD GPU device(s) is/are in a low-power state.\n"
        + rocm_table(" Hops between two GPUs ", pairs("1", "3"))
        + rocm_table(" Link Type between two GPUs ", pairs("XGMI", "PCIE"))
        + numa([0, 0, 1, 1])
    )


def test_two_hives_of_xgmi_are_two_islands() -> None:
    node = read(show_topo())
    assert node.nvlink_islands == [[0, 1], [2, 3]]
    assert node.link(0, 2).link_type is LinkType.SYS  # type: ignore[union-attr]
    assert node.numa_groups == {0: [0, 1], 1: [2, 3]}
    assert node.warnings == ()


def test_pcie_with_two_hops_stays_below_one_cpu() -> None:
    text = rocm_table(" Link Type between two GPUs ", pairs("PCIE", "PCIE")) + rocm_table(
        " Hops between two GPUs ", pairs("2", "3")
    )
    node = read(text)
    assert node.link(0, 1).link_type is LinkType.PHB  # type: ignore[union-attr]
    assert node.link(1, 2).link_type is LinkType.SYS  # type: ignore[union-attr]


def test_numa_lines_alone_number_the_gpus() -> None:
    node = read(numa([3, 3, 1, 1]) + "End of ROCm SMI Log")
    assert node.numa_groups == {1: [2, 3], 3: [0, 1]}
    assert node.links == ()


def test_a_table_under_the_title_of_one_that_failed_is_known_by_its_words() -> None:
    text = rocm_table(" Weight between two GPUs ", pairs("XGMI", "XXXX")).replace(
        "       GPU0", "ERROR: GPU[1] : Cannot read Link Weight\n\n       GPU0"
    )
    node = read(text)
    assert node.nvlink_islands == [[0, 1], [2, 3]]
    assert any("4 pairs" in warning for warning in node.warnings)


BUS_IDS = ["0000:05:00.0", "0000:26:00.0", "0000:46:00.0"]


def amd_smi_table(title: str, cell: str, itself: str) -> str:
    rows = [
        f"{label} " + " ".join(f"{itself if label == other else cell:<12}" for other in BUS_IDS) for label in BUS_IDS
    ]
    return "\n".join([f"{title} TABLE:", " " * 13 + " ".join(BUS_IDS), *rows, ""])


def test_amd_smi_names_gpus_by_bus_id_and_gives_their_bandwidth() -> None:
    text = amd_smi_table("ACCESS", "ENABLED", "ENABLED") + amd_smi_table("LINK TYPE", "XGMI", "SELF")
    node = read(text + amd_smi_table("NUMA BW", "25000-50000", "N/A") + amd_smi_table("DMA", "T", "SELF"))
    assert [gpu.pci_bus_id for gpu in node.gpus] == BUS_IDS
    assert node.nvlink_all_to_all
    assert {link.bandwidth_bytes_per_s for link in node.links} == {50e9}
    assert all(pair.is_allowed for pair in node.peer_access)


def test_the_weight_of_one_xgmi_hop_tells_xgmi_and_a_count_of_hops_tells_nothing() -> None:
    assert read(amd_smi_table("WEIGHT", "15", "0")).nvlink_all_to_all
    hops_alone = read(amd_smi_table("HOPS", "1", "0"))
    assert len(hops_alone.gpus) == 3
    assert hops_alone.links == ()
    assert any("do not say" in warning for warning in hops_alone.warnings)


WIRED = {(0, 1), (1, 2), (2, 3), (0, 3)}
"""A ring of four dies: its two diagonals have no link."""


def ring(wired: str, other: str, itself: str = "0") -> list[list[str]]:
    return [
        [itself if a == b else wired if (min(a, b), max(a, b)) in WIRED else other for b in range(4)] for a in range(4)
    ]


@pytest.mark.parametrize(
    ("title", "cells"),
    [
        (" Weight between two GPUs ", ring("15", "30")),
        (" Hops between two GPUs ", ring("1", "2")),
        ("NUMA BW TABLE:", ring("50000-200000", "0-0", "N/A")),
    ],
)
def test_pairs_that_are_called_xgmi_without_a_link_of_their_own_are_not_linked(
    title: str, cells: list[list[str]]
) -> None:
    node = read(rocm_table(title, cells) + rocm_table(" Link Type between two GPUs ", pairs("XGMI", "XGMI")))
    assert {(link.gpu_a, link.gpu_b) for link in node.links if link.link_type is LinkType.XGMI} == WIRED
    assert {node.link(0, 2).link_type, node.link(1, 3).link_type} == {LinkType.SYS}  # type: ignore[union-attr]
    assert any("2 of 6 pairs" in warning for warning in node.warnings)


@pytest.mark.parametrize("cell", ["0-0", "N/A"])
def test_bandwidths_that_are_zero_or_missing_for_all_pairs_tell_nothing_of_links(cell: str) -> None:
    types = amd_smi_table("LINK TYPE", "XGMI", "SELF")
    assert read(types + amd_smi_table("NUMA BW", cell, "N/A")).nvlink_all_to_all


def test_weights_of_zero_are_not_taken_for_distances() -> None:
    node = read(amd_smi_table("WEIGHT", "0", "0") + amd_smi_table("LINK TYPE", "PCIE", "SELF"))
    assert {link.link_type for link in node.links} == {LinkType.PHB}


def test_transfer_bench_gives_links_bus_ids_and_numa_nodes() -> None:
    text = (
        "        | GPU 00 | GPU 01 | PCIe Bus ID  | #CUs | Closest NUMA | DMA engines\n"
        "--------+--------+--------+--------------+------+--------------+----\n"
        " GPU 00 |    -   | XGMI-1 | 0000:0c:00.0 |  304 | 0            |0,1,2\n"
        " GPU 01 | XGMI-1 |    -   | 0000:9f:00.0 |  304 | 1            |0,1,2\n"
    )
    node = read(text)
    assert node.nvlink_islands == [[0, 1]]
    assert [gpu.pci_bus_id for gpu in node.gpus] == ["0000:0c:00.0", "0000:9f:00.0"]
    assert node.numa_groups == {0: [0], 1: [1]}


def test_a_cut_table_of_xgmi_traffic_says_what_it_infers() -> None:
    text = (
        "LINK METRIC TABLE:\n       bdf          bit_rate max_bandwidth link_type 05:00.0 26:00.0 46:00.0\n"
        "GPU0   05:00.0      32 Gb/s  512 Gb/s      XGMI\n Read                    N/A     12 KB 1 KB\n"
    )
    node = read(text)
    assert node.nvlink_all_to_all
    assert any("taken to be like" in warning for warning in node.warnings)


def test_rocm_smi_json_has_cards_and_pairs() -> None:
    cards = {
        f"card{number}": {"PCI Bus": f"0000:{number + 5:02X}:00.0", "(Topology) Numa Node": "0", "Unique ID": "N/A"}
        for number in range(2)
    }
    system = {"Driver version": "6.3.6", "(Topology) Link type between DRM devices 0 and 1": "XGMI"}
    node = read(json.dumps(cards | {"system": system}))
    assert node.nvlink_islands == [[0, 1]]
    assert node.driver_version == "6.3.6"
    assert node.gpus[1].pci_bus_id == "0000:06:00.0"
    assert node.gpus[1].uuid is None


def test_amd_smi_json_of_both_forms_reads_alike() -> None:
    new = [
        {"gpu": a, "bdf": BUS_IDS[a], "links": [{"gpu": b, "link_type": "XGMI" if a != b else "SELF"} for b in (0, 1)]}
        for a in (0, 1)
    ]
    old = [{"gpu": a, "link_type": {f"gpu_{b}": "XGMI" if a != b else "SELF" for b in (0, 1)}} for a in (0, 1)]
    assert read(json.dumps(new)).links == read(json.dumps(old)).links
    assert read(json.dumps(new)).nvlink_all_to_all


def test_a_report_without_any_gpu_is_an_error() -> None:
    with pytest.raises(TopologyError, match="names no GPU"):
        read("===== ROCm System Management Interface =====\n===== End of ROCm SMI Log =====")
