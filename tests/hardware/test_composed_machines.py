"""Machines by a number of GPUs of a kind, and names as clouds and drivers print them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paraplan.errors import ParaplanError, ProfileError, UsageError
from paraplan.hardware.catalogue.composed_machines import LinkKind, counted_gpus
from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_gpu, load_machine, one_machine


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("8xH100", (8, "h100")),
        ("4 x RTX 3090", (4, "rtx-3090")),
        ("4x-rtx-3090", (4, "rtx-3090")),
        ("rtx-3090-x4", (4, "rtx-3090")),
        ("3090x2", None),
        ("dgx-h100", None),
        ("0xh100", None),
    ],
)
def test_names_say_how_many_gpus_of_which_kind(name: str, expected: tuple[int, str] | None) -> None:
    assert counted_gpus(name) == expected


@pytest.mark.parametrize(
    ("name", "machine", "gpus"),
    [
        ("8xh100", "dgx-h100", 8),
        ("2xH100", "dgx-h100", 2),
        ("8xmi300x", "mi300x-x8", 8),
        ("4xrtx-4090", "rtx-4090-x4", 4),
        ("3090x2", "rtx-3090-x2", 2),
        ("4x4090", "rtx-4090-x4", 4),
        ("2xRTX3090", "rtx-3090-x2", 2),
        ("8x H100 SXM5", "dgx-h100", 8),
        ("8xh100-nvl", "8xh100-nvl-94gb", 8),
        ("Standard_ND96asr_v4", "azure-nd96asr-v4", 8),
        ("ml.p4d.24xlarge", "aws-p4d-24xlarge", 8),
    ],
)
def test_a_bundled_machine_with_these_gpus_is_taken(name: str, machine: str, gpus: int) -> None:
    found = cluster_from_profile(name)
    assert (found.name, found.num_gpus) == (machine, gpus)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpu_8x_h100_sxm5", "did you mean 8xh100-sxm?"),
        ("Lambda-8xA100", "did you mean 8xa100?"),
        ("8xmi251", "8xmi250"),
        ("g5.2xlarge", "--profile g5.12xlarge --gpus-per-node N"),
        ("Standard_NC24ads_A100_v4", "--profile nc96ads-a100-v4 --gpus-per-node N"),
        ("2xm40", "profiles list --kind gpu"),
        ("my-server", "8xh100, 4xrtx-3090"),
        ("8xh100x2", "did you mean 8xh100"),
        ("32xh100:4", "did you mean 32xh100"),
        ("1 " * 50_000 + "x", "8xh100, 4xrtx-3090"),
        ("32 h100s", "did you mean 32xh100"),
    ],
)
def test_the_name_of_a_machine_that_nobody_described_leads_to_one_that_works(name: str, hint: str) -> None:
    with pytest.raises(ProfileError) as caught:
        cluster_from_profile(name)
    assert caught.value.hint is not None
    assert hint in caught.value.hint
    assert len(caught.value.hint) < 200


@pytest.mark.parametrize(("name", "maker"), [("tpu-v4-8", "TPUs"), ("gaudi2", "Intel"), ("8xmps", "Apple")])
def test_what_is_no_gpu_of_nvidia_or_amd_is_said_to_be_none(name: str, maker: str) -> None:
    with pytest.raises(ProfileError, match=f"{maker}.* not planned for"):
        cluster_from_profile(name)


def test_a_machine_that_nobody_described_is_composed_with_the_links_that_are_usual() -> None:
    rig = cluster_from_profile("4xrtx-3090")
    assert (rig.name, rig.num_gpus, {link.link_type for link in rig.node.links}) == ("4xrtx-3090", 4, {"PHB"})
    assert len(rig.node.links) == 6
    large = cluster_from_profile("8xh100", num_nodes=4, network="100g")
    assert (large.num_gpus, {link.nvlink_count for link in large.node.links}) == (32, {18})
    assert large.network is not None
    assert large.network.name == "ethernet-100g"


@pytest.mark.parametrize(
    ("name", "how", "machine", "nodes", "per_node"),
    [
        ("32xh100", {}, "dgx-h100", 4, 8),
        ("12xh100", {}, "dgx-h100", 2, 6),
        ("32xh100", {"num_nodes": 8}, "dgx-h100", 8, 4),
        ("32xh100", {"gpus_per_node": 4}, "dgx-h100", 8, 4),
        ("16xrtx-4090", {}, "8xrtx-4090", 2, 8),
        ("16xv100-sxm3-32gb", {}, "dgx-2", 1, 16),
        ("144xgb200", {}, "gb200-nvl72", 2, 72),
        ("2048xb200", {}, "dgx-b200", 256, 8),
        *((name, {}, "dgx-h100", 4, 8) for name in ("4xdgx-h100", "dgx-h100 x4", "4x8xh100", "32 H100", "H100:32")),
        ("2 x p5.48xlarge", {"num_nodes": 2}, "aws-p5-48xlarge", 2, 8),
        ("16xh100-pcie-pcie", {}, "16xh100-pcie-80gb", 1, 16),  # links that a name says are those of one machine
    ],
)
def test_more_gpus_than_a_machine_has_are_several_machines(
    name: str, how: dict[str, int], machine: str, nodes: int, per_node: int
) -> None:
    found = cluster_from_profile(name, **how)
    assert (found.name, found.num_nodes, found.gpus_per_node) == (machine, nodes, per_node)
    assert found.network is not None
    assert len(one_machine(name).node.gpus) == per_node or how


def test_more_gpus_of_a_file_than_a_machine_has_are_several_machines(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(load_gpu("h100").model_dump(mode="json", exclude={"architecture_profile"})))
    found = cluster_from_profile(f"16x{path}")
    assert (found.num_nodes, found.gpus_per_node) == (2, 8)


@pytest.mark.parametrize(("name", "how"), [("17xh100", {}), ("9xh100", {}), ("32xh100", {"num_nodes": 2})])
def test_gpus_that_do_not_divide_over_machines_are_told_with_a_way_out(name: str, how: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"{name}: a machine has at most 8 NVIDIA H100") as refused:
        cluster_from_profile(name, **how)
    assert "--profile 8xh100-sxm-80gb --nodes" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("name", "gpu", "links"),
    [
        ("4xh100-pcie", "h100-pcie-80gb", {"PHB"}),
        ("2xa100-pcie", "a100-pcie-80gb", {"PHB"}),
        ("4xa100-pcie-nvlink-pairs", "a100-pcie-80gb", {"PHB", "NV"}),
        ("16xh100-pcie-pcie", "h100-pcie-80gb", {"PHB"}),
        ("16xh100-sxm-80gb-pcie", "h100-sxm-80gb", {"PHB"}),
    ],
)
def test_a_gpu_that_is_called_as_links_are_is_told_apart(name: str, gpu: str, links: set[str]) -> None:
    found = cluster_from_profile(name)
    assert (found.gpu.name, {link.link_type for link in found.node.links}) == (gpu, links)


def test_every_command_takes_them_and_no_more_gpus_than_were_named() -> None:
    assert len(load_machine("2xh100").node.gpus) == len(load_machine("2xh100").node.links) + 1 == 2
    assert cluster_from_profile("4xh100", gpus_per_node=2).num_gpus == 2
    with pytest.raises(ParaplanError, match=r"gpus_per_node=8, but dgx-h100 has 4 GPUs"):
        cluster_from_profile("4xh100", gpus_per_node=8)


def test_a_machine_is_composed_of_gpus_that_a_file_describes(tmp_path: Path) -> None:
    content = load_gpu("rtx-4090").model_dump(mode="json", exclude={"architecture_profile"}, exclude_none=True)
    (tmp_path / "Ours.json").write_text(json.dumps(content | {"name": "ours"}))
    found = cluster_from_profile(f"4x{tmp_path / 'Ours.json'}", link="pcie")
    assert (found.name, found.num_gpus, found.gpu.name) == ("4xours", 4, "ours")
    assert found.gpu.peak_flops_per_s == load_gpu("rtx-4090").peak_flops_per_s
    assert cluster_from_profile(f"4 x {tmp_path / 'Ours.json'}", link="pcie") == found
    with pytest.raises(ProfileError, match=r"cannot read /none\.json"):
        cluster_from_profile("4x/none.json")


def test_a_file_that_is_called_as_a_number_of_gpus_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "4xh100"
    path.write_text('{"name": "mine", "gpu": "rtx-3090", "num_gpus": 2}')
    assert cluster_from_profile(str(path)).gpu.name == "rtx-3090"


def test_pairs_over_bridges_are_named_and_read_back() -> None:
    rig = cluster_from_profile("4xrtx-3090", link="nvlink-pairs")
    bridged = {(link.gpu_a, link.gpu_b) for link in rig.node.links if link.link_type == "NV"}
    assert bridged == {(0, 1), (2, 3)}
    assert cluster_from_profile(rig.name) == rig


@pytest.mark.parametrize(
    ("name", "link", "words"),
    [
        ("4xrtx-3090", "nvswitch", "bridges between cards alone"),
        ("4xt4", "nvlink-pairs", "has no NVLink"),
        ("dgx-h100", "pcie", "link goes with --gpu"),
        ("rtx-3090", None, "no machine profile is called"),
        ("8xfoo", None, "no machine profile is called"),
    ],
)
def test_what_cannot_be_had_is_told(name: str, link: LinkKind | None, words: str) -> None:
    with pytest.raises(ParaplanError, match=words):
        cluster_from_profile(name, link=link)
