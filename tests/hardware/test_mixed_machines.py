"""Machines of several kinds of GPU, and of cards without P2P."""

from __future__ import annotations

import pytest

from paraplan.errors import ProfileError, UsageError
from paraplan.hardware.bus_bandwidth import inside_link
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_gpu, load_machine


@pytest.mark.parametrize("name", ["rtx-3090+rtx-4090", "1x3090 + 1x4090", "RTX-4090+RTX-3090"])
def test_kinds_joined_by_a_plus_are_one_machine_counted_by_the_slower(name: str) -> None:
    cluster = cluster_from_profile(name)
    assert cluster.gpu.name == "rtx-3090"
    assert sorted(gpu.name or "" for gpu in cluster.node.gpus) == [
        "NVIDIA GeForce RTX 3090",
        "NVIDIA GeForce RTX 4090",
    ]
    assert "1 x NVIDIA GeForce RTX 3090" in str(cluster)
    assert "1 x NVIDIA GeForce RTX 4090" in str(cluster)
    assert load_machine(cluster.name).node.links == cluster.node.links


def test_the_least_memory_counts_whichever_card_has_it() -> None:
    cluster = cluster_from_profile("2xrtx-3090+2xrtx-4080")
    assert cluster.num_gpus == 4
    least = min(load_gpu("rtx-3090").memory_bytes, load_gpu("rtx-4080").memory_bytes)
    assert cluster.gpu_memory_bytes <= least
    assert cluster.gpu.name == "rtx-3090"


def test_an_unknown_kind_and_links_that_join_no_two_kinds_are_named() -> None:
    with pytest.raises(ProfileError, match="no gpu profile is called 'nothing'"):
        cluster_from_profile("rtx-3090+nothing")
    with pytest.raises(UsageError, match="link='nvlink-pairs' does not join GPUs of several kinds"):
        cluster_from_profile("rtx-3090+a6000", link="nvlink-pairs")


def test_without_p2p_pairs_copy_through_the_host_as_slowly_as_was_measured() -> None:
    usual, slow = cluster_from_profile("2xrtx-4090"), cluster_from_profile("2xrtx-4090", link="no-p2p")
    assert inside_link(usual, [0, 1]).kind == inside_link(slow, [0, 1]).kind == "pcie-host"
    assert inside_link(usual, [0, 1]).pair_bytes_per_s == 21e9
    assert inside_link(slow, [0, 1]).pair_bytes_per_s == 4e9
    assert cluster_from_profile(slow.name) == slow
    card = cluster_from_profile("2xrtx-a6000", link="no-p2p")
    assert inside_link(card, [0, 1]).kind == "pcie-host"


@pytest.mark.parametrize(
    ("name", "gib", "gigabytes_per_s"),
    [("dgx-spark", 111, 273), ("mi350x-x8", 288, 8000), ("2xrtx-pro-5000", 47, 1344), ("2xrtx-pro-4500", 31, 896)],
)
def test_new_machines_have_the_memory_and_bandwidth_of_their_sheets(
    name: str, gib: float, gigabytes_per_s: float
) -> None:
    cluster = cluster_from_profile(name)
    assert cluster.gpu_memory_bytes / 2**30 == pytest.approx(gib, rel=0.02)
    assert cluster.gpu.memory_bandwidth_bytes_per_s == gigabytes_per_s * 1e9


def test_a_spark_named_by_its_gpu_offloads_into_no_memory_that_it_shares() -> None:
    assert cluster_from_profile("1xgb10") == cluster_from_profile("dgx-spark")
    assert (cluster_from_profile("dgx-spark").host_memory_bytes or 0) <= 8 * 2**30
