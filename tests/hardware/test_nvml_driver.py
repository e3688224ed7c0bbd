"""The real pynvml against a fake driver: a C library that answers for a described machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_nvml
import nvml_machines
import pytest
from waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(fake_nvml.compiler() is None, reason="no C compiler to build the fake driver with")


def topo(machine: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    path = fake_nvml.build_driver(nvml_machines.as_json(machine), folder)
    return subprocess.run(
        [sys.executable, "-m", "paraplan", "topo", "--json"],
        env=os.environ | {"LD_LIBRARY_PATH": str(path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def report(machine: dict[str, Any], folder: Path) -> dict[str, Any]:
    done = topo(machine, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def widths(found: dict[str, Any]) -> dict[tuple[int, int], int]:
    return {
        (link["gpu_a"], link["gpu_b"]): link["nvlink_count"] for link in found["links"] if link["link_type"] == "NV"
    }


def test_a_dgx_1_shows_its_cube_mesh_with_one_and_two_links(tmp_path: Path) -> None:
    found = report(nvml_machines.dgx1_v100(), tmp_path)
    mesh = nvml_machines.CUBE_MESH
    assert widths(found) == {(a, b): mesh[a][b] for a in range(8) for b in range(a + 1, 8) if mesh[a][b]}
    assert found["nvlink_islands"] == [list(range(8))]
    assert found["nvlink_all_to_all"] is False
    assert found["numa_groups"] == {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]}
    assert {gpu["nvlink_count"] for gpu in found["gpus"]} == {6}
    double = next(link for link in found["links"] if (link["gpu_a"], link["gpu_b"]) == (0, 3))
    assert double["bandwidth_bytes_per_s"] == 50e9
    assert found["gpus"][0] | {"memory_total_bytes": 32510 * 2**20, "compute_capability": "7.0"} == found["gpus"][0]
    assert (found["driver_version"], found["cuda_version"]) == ("535.161.08", "12.2")
    assert found["warnings"] == []


def test_gpus_behind_nvswitches_are_all_joined_by_as_many_links_as_each_has(tmp_path: Path) -> None:
    found = report(nvml_machines.dgx_h100(), tmp_path)
    assert set(widths(found).values()) == {18}
    assert found["nvlink_all_to_all"] is True
    assert {link["bandwidth_bytes_per_s"] for link in found["links"]} == {450e9}
    assert found["gpus"][5]["cpu_affinity"] == "32-63"
    assert len({gpu["fabric_clique"] for gpu in found["gpus"]}) == 1


def test_bridges_across_sockets_are_pairs_and_a_narrow_slot_is_shown(tmp_path: Path) -> None:
    found = report(nvml_machines.two_bridges(), tmp_path)
    assert found["nvlink_islands"] == [[0, 2], [1, 3]]
    others = {(link["gpu_a"], link["gpu_b"]): link["link_type"] for link in found["links"]}
    assert others[0, 1] == "PHB"
    assert others[0, 3] == "SYS"
    assert found["gpus"][0]["pcie_width"] == 8
    assert found["gpus"][0]["pcie_width_max"] == 16
    assert next(pair for pair in found["peer_access"] if (pair["gpu_a"], pair["gpu_b"]) == (0, 1))["nvlink"] == "NS"


def test_mig_slices_are_listed_with_their_uuids(tmp_path: Path) -> None:
    (gpu,) = report(nvml_machines.mig(), tmp_path)["gpus"]
    assert gpu["mig_enabled"] is True
    assert [(one["uuid"], one["memory_total_bytes"] // 2**20) for one in gpu["mig_instances"]] == [
        ("MIG-aaaa", 40448),
        ("MIG-bbbb", 9984),
    ]


def test_a_lost_gpu_is_left_out_and_unanswered_questions_are_said(tmp_path: Path) -> None:
    found = report(nvml_machines.lost_gpu(), tmp_path)
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 1, 2, 3, 4, 5, 6]
    assert found["gpus"][2]["memory_total_bytes"] is None
    assert found["gpus"][1]["power_limit_w"] is None
    said = "\n".join(found["warnings"])
    assert "GPU 7 cannot be used" in said
    assert "memory unknown for GPU 2: not supported" in said
    assert "power limit unknown for GPU 1: no permission" in said
    assert "GPU 4 has 2 NVLinks that are down" in said


def test_an_old_driver_without_newer_calls_gives_what_it_has(tmp_path: Path) -> None:
    found = report(nvml_machines.old_driver(), tmp_path)
    assert widths(found)[0, 4] == 2
    assert found["cuda_version"] == "9.2"
    assert {gpu["numa_node"] for gpu in found["gpus"]} == {None}
    assert {gpu["mig_enabled"] for gpu in found["gpus"]} == {None}


def test_the_table_shows_the_cuda_index_beside_that_of_nvml(tmp_path: Path) -> None:
    path = fake_nvml.build_driver(nvml_machines.as_json(nvml_machines.two_bridges()), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "paraplan", "topo"],
        env=os.environ
        | {
            "LD_LIBRARY_PATH": str(path),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": "3,1",
            "COLUMNS": "150",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    table = done.stdout.split("\n\n")[1]
    rows = [line.split() for line in table.splitlines() if line[:1].isdigit()]
    assert [row[:2] for row in rows] == [["0", "-"], ["1", "1"], ["2", "-"], ["3", "0"]]


def test_a_driver_that_is_not_loaded_ends_with_status_3_and_one_line(tmp_path: Path) -> None:
    done = topo(nvml_machines.no_driver_loaded(), tmp_path)
    assert done.returncode == 3
    assert "not loaded" in done.stderr
    assert "--profile" in done.stderr
    assert done.stdout == ""
