"""Labels with which tables of published runs name their GPUs, and the kinds that they mean."""

from __future__ import annotations

from functools import cache

import pytest

from paraplan.accuracy.machines import gpu_by_label
from paraplan.hardware.catalogue.profile_files import find_gpu, list_gpus, load_gpu

KIND_OF_LABEL = {
    "A10-24GB": "a10",
    "A40-48GB": "a40",
    "A100-40GB": "a100-sxm-40gb",
    "A100-80GB": "a100-sxm-80gb",
    "A100-40GB-PCIe": "a100-pcie-40gb",
    "A100-80GB-PCIe": "a100-pcie-80gb",
    "A800-80GB": "a800-sxm-80gb",
    "H100": "h100-sxm-80gb",
    "H100-80GB": "h100-sxm-80gb",
    "H100-96GB": "h100-sxm-96gb",
    "H100-80GB-PCIe": "h100-pcie-80gb",
    "H100-94GB-NVL": "h100-nvl-94gb",
    "H800-80GB": "h800-sxm-80gb",
    "H200": "h200-sxm-141gb",
    "H200-141GB": "h200-sxm-141gb",
    "H20": "h20-96gb",
    "H20-141GB": "h20-141gb",
    "GH200": "gh200-96gb",
    "GH200 120GB": "gh200-quad-96gb",
    "B200": "b200-sxm-180gb",
    "B300": "b300-sxm-288gb",
    "GB200": "gb200-186gb",
    "GB300": "gb300-288gb",
    "L4": "l4",
    "L4-24GB": "l4",
    "L40S": "l40s",
    "L40S-48GB": "l40s",
    "T4-16GB": "t4",
    "P100-16GB": "p100-sxm2-16gb",
    "V100-16GB": "v100-sxm2-16gb",
    "V100-32GB": "v100-sxm2-32gb",
    "V100S-32GB": "v100s-pcie-32gb",
    "A2-16GB": "a2",
    "A30-24GB": "a30",
    "MI250X": "mi250x-gcd-64gb",
    "MI300X": "mi300x-192gb",
    "MI325X": "mi325x-256gb",
    "GTX1080Ti-11GB": "gtx-1080-ti",
    "RTX2080Ti-11GB": "rtx-2080-ti",
    "RTX3070-8GB": "rtx-3070",
    "RTX3080-10GB": "rtx-3080",
    "RTX2080-8GB": "rtx-2080",
    "RTX2080SUPER-8GB": "rtx-2080-super",
    "RTX3060-12GB": "rtx-3060",
    "RTX3060Ti-8GB": "rtx-3060-ti",
    "RTX3080-12GB": "rtx-3080-12gb",
    "RTX3080-MaxQ-16GB": "rtx-3080-max-q",
    "RTX3080Ti-12GB": "rtx-3080-ti",
    "RTX3090-24GB": "rtx-3090",
    "RTX3090Ti-24GB": "rtx-3090-ti",
    "RTX4060Ti": "rtx-4060-ti-16gb",
    "RTX4060Ti-8GB": "rtx-4060-ti-8gb",
    "RTX4070-12GB": "rtx-4070",
    "RTX4070TiSUPER-16GB": "rtx-4070-ti-super",
    "RTX4080SUPER-16GB": "rtx-4080-super",
    "RTX4090-24GB": "rtx-4090",
    "RTX4090D-24GB": "rtx-4090-d",
    "RTX5060Ti-16GB": "rtx-5060-ti-16gb",
    "RTX5080-16GB": "rtx-5080",
    "RTX5090-32GB": "rtx-5090",
    "RTXA4000-16GB": "rtx-a4000",
    "RTXA4500-20GB": "rtx-a4500",
    "RTXA5000-24GB": "rtx-a5000",
    "RTXA5500-24GB": "rtx-a5500",
    "RTXA6000-48GB": "rtx-a6000",
    "RTX4000Ada-20GB": "rtx-4000-ada",
    "RTX6000Ada-48GB": "rtx-6000-ada",
    "QuadroRTX6000-24GB": "quadro-rtx-6000",
    "QuadroRTX8000-48GB": "quadro-rtx-8000",
    "TITAN-RTX-24GB": "titan-rtx",
}


known_gpus = cache(list_gpus)


@pytest.mark.parametrize(("label", "kind"), KIND_OF_LABEL.items())
def test_a_label_of_a_table_means_one_kind_of_gpu(label: str, kind: str) -> None:
    assert gpu_by_label(label, known_gpus()).name == kind


def test_each_kind_of_gpu_is_meant_by_its_own_name() -> None:
    known = list_gpus()
    assert [gpu_by_label(gpu.name, known).name for gpu in known] == [gpu.name for gpu in known]


def test_professional_cards_have_the_full_tensor_rate_and_geforce_cards_half_of_it() -> None:
    geforce = {gpu.name: 2 for gpu in list_gpus() if "GeForce" in gpu.title and "bf16" in gpu.peak_flops_per_s}
    assert {"rtx-3060", "rtx-4080-super", "rtx-5080"} <= set(geforce)
    professional = dict.fromkeys(("rtx-a4000", "rtx-a5000", "rtx-5000-ada", "a2"), 4)
    for name, tensor_of_fp32 in (geforce | professional).items():
        peak = load_gpu(name).peak_flops_per_s
        assert peak["bf16"] == pytest.approx(tensor_of_fp32 * peak["fp32"], rel=0.01), name


def test_the_500_w_h100_is_slower_than_the_700_w_one_and_holds_more() -> None:
    slow, fast = load_gpu("h100-96gb"), load_gpu("h100-80gb")
    assert slow.memory_bytes > fast.memory_bytes
    assert slow.memory_bandwidth_bytes_per_s < fast.memory_bandwidth_bytes_per_s
    assert slow.peak_flops_per_s["bf16"] == fast.peak_flops_per_s["bf16"]  # one chip
    assert slow.clock_share < fast.clock_share == 1


def test_cards_of_one_chip_are_told_apart_by_the_name_that_the_driver_gives() -> None:
    names = {"Quadro RTX 6000": "quadro-rtx-6000", "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada"}
    for driver_name, kind in names.items():
        found = find_gpu(driver_name)
        assert found is not None
        assert found.name == kind
