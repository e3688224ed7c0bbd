"""Labels with which tables of published runs name their GPUs, and the kinds that they mean."""

from __future__ import annotations

import pytest

from paraplan.hardware.described import gpu_by_label
from paraplan.hardware.profile_files import find_gpu, list_gpus, load_gpu

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
    "GH200": "gh200-96gb",
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
    "MI250X": "mi250x-gcd-64gb",
    "MI300X": "mi300x-192gb",
    "MI325X": "mi325x-256gb",
    "GTX1080Ti-11GB": "gtx-1080-ti",
    "RTX2080Ti-11GB": "rtx-2080-ti",
    "RTX3070-8GB": "rtx-3070",
    "RTX3080-10GB": "rtx-3080",
    "RTX3080-MaxQ-16GB": "rtx-3080-max-q",
    "RTX3090-24GB": "rtx-3090",
    "RTX4090-24GB": "rtx-4090",
    "RTX5090-32GB": "rtx-5090",
    "RTXA4000-16GB": "rtx-a4000",
    "RTXA4500-20GB": "rtx-a4500",
    "RTXA5000-24GB": "rtx-a5000",
    "RTXA5500-24GB": "rtx-a5500",
    "RTXA6000-48GB": "rtx-a6000",
    "RTX6000Ada-48GB": "rtx-6000-ada",
    "QuadroRTX6000-24GB": "quadro-rtx-6000",
    "QuadroRTX8000-48GB": "quadro-rtx-8000",
    "TITAN-RTX-24GB": "titan-rtx",
}


@pytest.mark.parametrize(("label", "kind"), KIND_OF_LABEL.items())
def test_a_label_of_a_table_means_one_kind_of_gpu(label: str, kind: str) -> None:
    assert gpu_by_label(label).name == kind


def test_each_kind_of_gpu_is_meant_by_its_own_name() -> None:
    known = list_gpus()
    assert [gpu_by_label(gpu.name, known).name for gpu in known] == [gpu.name for gpu in known]


def test_professional_ampere_cards_have_the_full_tensor_rate_and_geforce_cards_half_of_it() -> None:
    for name, tensor_of_fp32 in (("rtx-a4000", 4), ("rtx-a5000", 4), ("rtx-3070", 2), ("rtx-3080", 2)):
        peak = load_gpu(name).peak_flops_per_s
        assert peak["bf16"] == pytest.approx(tensor_of_fp32 * peak["fp32"], rel=0.01)


def test_the_500_w_h100_is_slower_than_the_700_w_one_and_holds_more() -> None:
    slow, fast = load_gpu("h100-96gb"), load_gpu("h100-80gb")
    assert slow.memory_bytes > fast.memory_bytes
    assert slow.memory_bandwidth_bytes_per_s < fast.memory_bandwidth_bytes_per_s
    assert slow.peak_flops_per_s["bf16"] < fast.peak_flops_per_s["bf16"]


def test_cards_of_one_chip_are_told_apart_by_the_name_that_the_driver_gives() -> None:
    names = {"Quadro RTX 6000": "quadro-rtx-6000", "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada"}
    for driver_name, kind in names.items():
        found = find_gpu(driver_name)
        assert found is not None
        assert found.name == kind
