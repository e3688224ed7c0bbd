from __future__ import annotations

import pytest

from paraplan.accuracy.machines import DescribedMachines, described_cluster, gpu_by_label
from paraplan.errors import ProfileError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.topology import LinkType


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("A100-80GB", "a100-sxm-80gb"),
        ("A100-40GB", "a100-sxm-40gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("RTX4090-24GB", "rtx-4090"),
        ("TITAN-RTX-24GB", "titan-rtx"),
        ("H100-80GB", "h100-sxm-80gb"),
    ],
)
def test_labels_of_published_tables_find_their_gpu(label: str, name: str) -> None:
    assert gpu_by_label(label).name == name


def test_an_unknown_label_is_an_error_with_near_names() -> None:
    with pytest.raises(ProfileError, match="no profile describes the GPU 'H1000-80GB'"):
        gpu_by_label("H1000-80GB")


def test_a_node_has_nvlink_unless_its_link_is_said_to_be_pcie() -> None:
    fast = described_cluster(DescribedMachines(gpu="A100-80GB", num_gpus=8, link="NVLink3 600GB/s"))
    slow = described_cluster(DescribedMachines(gpu="A100-80GB", num_gpus=8, link="PCIe"))
    assert fast.node.nvlink_all_to_all
    assert not slow.node.nvlink_islands


def test_bridges_join_pairs() -> None:
    machines = DescribedMachines(gpu="TITAN-RTX-24GB", num_gpus=4, gpus_per_node=4, link="NVLink bridge pairs + PCIe")
    node = described_cluster(machines).node
    assert node.nvlink_islands == [[0, 1], [2, 3]]
    link = node.link(1, 2)
    assert link is not None
    assert link.link_type is LinkType.NODE


def test_the_network_is_that_of_the_description_or_the_usual_one() -> None:
    known = described_cluster(DescribedMachines(gpu="A100-80GB", num_gpus=16, network_bits_per_s_per_gpu=100e9))
    usual = described_cluster(DescribedMachines(gpu="H100-80GB", num_gpus=16))
    assert known.network is not None
    assert usual.network is not None
    assert known.network.nic_bandwidth_bytes_per_s == 12.5e9
    assert usual.network.nic_bandwidth_bytes_per_s == 50e9
    assert (known.num_nodes, known.gpus_per_node) == (2, 8)


def test_a_rack_of_gb200_is_one_nvlink_domain() -> None:
    cluster = described_cluster(DescribedMachines(gpu="GB200", num_gpus=256, gpus_per_node=4))
    assert (cluster.num_nodes, cluster.gpus_per_node) == (4, 64)


def test_gpus_that_fill_no_whole_nodes_are_an_error() -> None:
    with pytest.raises(ProfileError, match="12 GPUs are no whole number of nodes of 8"):
        described_cluster(DescribedMachines(gpu="A100-80GB", num_gpus=12, gpus_per_node=8))
    assert described_cluster(DescribedMachines(gpu="A100-80GB", num_gpus=12)).gpus_per_node == 6


@pytest.mark.parametrize(
    ("num_gpus", "link", "links_of_neighbours"),
    [(4, "NVLink2 (4-GPU V100 node)", 2), (8, "NVLink2 300GB/s", 1), (16, "NVSwitch (DGX-2)", 6)],
)
def test_v100s_divide_their_nvlinks_over_their_peers_unless_a_switch_is_named(
    num_gpus: int, link: str, links_of_neighbours: int
) -> None:
    machines = DescribedMachines(gpu="V100-32GB", num_gpus=num_gpus, gpus_per_node=num_gpus, link=link)
    joined = described_cluster(machines).node.link(0, 1)
    assert joined is not None
    assert joined.nvlink_count == links_of_neighbours


def test_four_gpus_a_node_stand_on_a_board_without_a_switch() -> None:
    h200, racks, half = (
        described_cluster(DescribedMachines(gpu=gpu, num_gpus=8, gpus_per_node=size))
        for gpu, size in (("H200", 4), ("GB200", 4), ("H200", 8))
    )
    assert [cluster.node.links[0].nvlink_count for cluster in (h200, racks, half)] == [6, 18, 18]


def test_gh200s_share_the_power_of_their_board_where_four_make_a_node() -> None:
    board, alone = (
        described_cluster(DescribedMachines(gpu="GH200", num_gpus=8, gpus_per_node=size)).gpu for size in (4, 1)
    )
    assert (board.name, alone.name) == ("gh200-quad-96gb", "gh200-96gb")
    assert board.clock_share < alone.clock_share == 1


@pytest.mark.parametrize(("gpu", "profile"), [("MI250X", "frontier"), ("MI300X", "mi300x-x8")])
def test_gpus_of_amd_are_linked_as_their_boards_are(gpu: str, profile: str) -> None:
    node = described_cluster(DescribedMachines(gpu=gpu, num_gpus=16, gpus_per_node=8)).node
    assert node.links == cluster_from_profile(profile).node.links
