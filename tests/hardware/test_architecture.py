"""Architectures as data: what GPUs share, rates of links by name and capability, and sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paraplan.api.machines import load_cluster
from paraplan.errors import ProfileError
from paraplan.hardware.architecture import LinkRates, architecture_of, list_architectures, load_architecture
from paraplan.hardware.catalogue.profile_files import list_gpus, list_machines, list_networks, load_gpu
from paraplan.units import MIB


def test_every_bundled_gpu_has_an_architecture_with_its_capability() -> None:
    for gpu in list_gpus():
        if gpu.vendor == "cpu":
            assert gpu.shared.name == "unknown"
        else:
            assert gpu.shared.title == gpu.architecture
            assert gpu.compute_capability in gpu.shared.capabilities


def test_no_capability_belongs_to_two_architectures() -> None:
    found = [capability for each in list_architectures() for capability in each.capabilities]
    assert len(found) == len(set(found))
    assert architecture_of("9.0") == "Hopper"
    assert architecture_of("99.0") == "unknown"


def test_a_gpu_profile_and_its_architecture_agree_on_the_rate_of_a_link() -> None:
    for gpu in list_gpus():
        rates = gpu.shared.link_bytes_per_s
        if gpu.nvlink_bandwidth_bytes_per_s is not None and gpu.compute_capability in rates:
            assert gpu.nvlink_bandwidth_bytes_per_s == rates[gpu.compute_capability], gpu.name


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 25e9),
        ("NVIDIA GB200", 50e9),
        ("NVIDIA GeForce RTX 3090", 14.0625e9),
        ("NVIDIA A100-SXM4-80GB", 25e9),
        ("Tesla P100-SXM2-16GB", 20e9),
        ("NVIDIA L4", None),
    ],
)
def test_the_rate_of_a_link_is_found_by_the_name_of_the_gpu(name: str, rate: float | None) -> None:
    assert LinkRates().nvlink(name=name) == rate


def test_the_compute_capability_comes_before_the_name() -> None:
    rates = LinkRates()
    assert rates.nvlink(name="NVIDIA A100", compute_capability="10.0") == 50e9
    assert rates.xgmi("gfx942:sramecc+") == rates.xgmi("942") == 64e9
    assert rates.xgmi("gfx1100") is None


def test_attention_of_a_generation_without_figures_is_that_of_the_older_one() -> None:
    hopper = load_architecture("Hopper")
    assert hopper.attention_speed(4) == hopper.attention_speed(3)
    assert hopper.attention_speed(2).source_kind == "measured"
    assert {load_architecture("CDNA").attention_speed(number).source_kind for number in (1, 2, 3)} == {"assumed"}


def test_an_own_architecture_is_a_file_beside_the_gpu(tmp_path: Path) -> None:
    content = load_architecture("Hopper").model_dump(mode="json") | {"name": "own", "title": "Own"}
    (tmp_path / "own.json").write_text(json.dumps(content))
    gpu = load_gpu("h100").model_dump(mode="json") | {"name": "mine", "architecture": "own.json"}
    (tmp_path / "mine.json").write_text(json.dumps(gpu))
    assert load_gpu(str(tmp_path / "mine.json")).shared.title == "Own"
    (tmp_path / "own.json").write_text("{}")
    with pytest.raises(ProfileError, match=r"own.json: name: is missing"):
        load_gpu(str(tmp_path / "mine.json"))


def test_profiles_whose_source_is_memory_say_so() -> None:
    for profile in (*list_gpus(), *list_machines(), *list_networks()):
        assert ("from memory" in profile.source) == (profile.source_kind == "memory"), profile.name


def test_cuda_gives_less_than_the_driver_tells() -> None:
    """By one machine's nvidia-smi and deviceQuery: 81,559 and 81,106 MiB of an H100, 81,920 and 81,158 of an A100."""
    given = {"dgx-h100": 81106, "dgx-a100": 81158, "rtx-3090-x2": 24154, "l40s-x8": 45589}
    for name, mebibytes in given.items():
        assert load_cluster(name).gpu_memory_bytes == mebibytes * MIB, name
    other = load_cluster("hgx-h800")
    assert other.gpu.driver_reserved_bytes is None
    assert other.gpu.memory_bytes - other.gpu_memory_bytes == load_architecture("Hopper").driver_reserved_bytes
    assert load_cluster("dgx-1-v100").gpu_memory_bytes == 32510 * MIB, "its total is an older driver's"


def test_torchs_sdpa_takes_cudnns_kernels_on_hopper_and_blackwell_alone() -> None:
    for name, generation in (("Hopper", 3), ("Blackwell", 3), ("Ampere", 2), ("Blackwell RTX", 2), ("CDNA 3", 2)):
        architecture = load_architecture(name)
        assert architecture.attention_speed(None, uses_sdpa=True) == architecture.attention_speed(generation), name
        assert architecture.attention_speed(None) == architecture.attention_speed(2)
        assert architecture.attention_speed(1, uses_sdpa=True) == architecture.attention_speed(1)
