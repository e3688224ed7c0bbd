"""The machines that the fake driver plays, as JSON."""

from __future__ import annotations

import json
from typing import Any

MIB = 2**20

# The hybrid cube mesh of a DGX-1 with V100: six links a GPU, two to some neighbours and one to others.
CUBE_MESH = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
]


def two_sockets(count: int, *, near: int, far: int = 50) -> list[list[int]]:
    """Return the levels of GPUs of which the first half is on one socket and the second on another."""
    half = count // 2
    return [[near if first // half == second // half else far for second in range(count)] for first in range(count)]


def gpus(count: int, *, cpus_per_gpu: int = 8) -> list[dict[str, Any]]:
    """Return GPUs with an identity each, half of them on NUMA node 0 and half on 1."""
    half = max(1, count // 2)
    return [
        {
            "uuid": f"GPU-{number:08x}-0000-4000-8000-000000000000",
            "bus_id": f"0000DEAD:{16 * (number + 1):02X}:00.0",
            "numa": number // half,
            "first_cpu": number // half * half * cpus_per_gpu,
            "last_cpu": (number // half + 1) * half * cpus_per_gpu - 1,
        }
        for number in range(count)
    ]


def dgx1_v100() -> dict[str, Any]:
    """Eight V100 with direct NVLinks in a cube mesh."""
    return {
        "driver_version": "535.161.08",
        "cuda_version": 12020,
        "every_gpu": {
            "name": "Tesla V100-SXM2-32GB",
            "memory": 32510 * MIB,
            "major": 7,
            "ecc": 1,
            "nvlink_version": 2,
            "pcie_generation": 3,
        },
        "gpus": gpus(8),
        "nvlinks": CUBE_MESH,
        "levels": two_sockets(8, near=20),
    }


def dgx_h100() -> dict[str, Any]:
    """Eight H100 behind NVSwitches."""
    return {
        "driver_version": "550.90.07",
        "cuda_version": 12040,
        "every_gpu": {
            "name": "NVIDIA H100 80GB HBM3",
            "memory": 81559 * MIB,
            "major": 9,
            "ecc": 1,
            "mig": 0,
            "nvlink_version": 6,
            "switch_links": 18,
            "pcie_generation": 5,
        },
        "gpus": gpus(8),
        "levels": two_sockets(8, near=40),
    }


def two_bridges() -> dict[str, Any]:
    """Four RTX A6000, of which 0 and 2, and 1 and 3, have a bridge, across sockets."""
    bridges = [[4 if abs(first - second) == 2 else 0 for second in range(4)] for first in range(4)]
    return {
        "driver_version": "560.35.03",
        "cuda_version": 12060,
        "every_gpu": {
            "name": "NVIDIA RTX A6000",
            "memory": 49140 * MIB,
            "major": 8,
            "minor": 6,
            "nvlink_version": 5,
            "pcie_width": 8,
        },
        "gpus": gpus(4),
        "nvlinks": bridges,
        "levels": two_sockets(4, near=30),
        "peer_status": 0,
    }


def mig() -> dict[str, Any]:
    """One H100 in MIG mode with two slices."""
    slices = [
        {"name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "uuid": "MIG-aaaa", "memory": 40448 * MIB},
        {"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "uuid": "MIG-bbbb", "memory": 9984 * MIB},
    ]
    machine = dgx_h100()
    machine["gpus"] = [gpus(1)[0] | {"mig": 1, "slices": slices, "switch_links": 0}]
    machine["levels"] = [[0]]
    return machine


def lost_gpu() -> dict[str, Any]:
    """The DGX-1 of which GPU 7 fell off the bus, GPU 2 hides its memory, and nobody may ask GPU 1 for its power."""
    machine = dgx1_v100()
    machine["gpus"][7]["failure"] = 15
    machine["gpus"][2]["memory_failure"] = 3
    machine["gpus"][1]["power_failure"] = 4
    return machine


def old_driver() -> dict[str, Any]:
    """The DGX-1 under a driver that knows neither MIG nor NUMA affinity nor what is at the end of a link."""
    machine = dgx1_v100()
    machine["driver_version"] = "396.82"
    machine["cuda_version"] = 9020
    machine["missing_functions"] = [
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMemoryAffinity",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetGpuFabricInfoV",
    ]
    return machine


def no_driver_loaded() -> dict[str, Any]:
    """A library that is installed while the kernel module is not loaded."""
    return dgx1_v100() | {"init_result": 9}


def as_json(machine: dict[str, Any]) -> str:
    """Return a description as the text that the driver is built from."""
    return json.dumps(machine)
