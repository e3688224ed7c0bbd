"""Builds the fake driver: a libnvidia-ml.so.1 that answers for a machine described in JSON."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("fake_nvml.c")

GPU_DEFAULTS: dict[str, Any] = {
    "name": "",
    "uuid": "",
    "bus_id": "",
    "memory": 0,
    "used": 0,
    "major": 0,
    "minor": 0,
    "ecc": -1,
    "mig": -1,
    "numa": -1,
    "first_cpu": -1,
    "last_cpu": -1,
    "milliwatts": 300000,
    "pcie_generation": 4,
    "pcie_width": 16,
    "busy": -1,
    "clock": 1980,
    "slowed_by": 0,
    "ecc_errors": 0,
    "nvlink_version": 0,
    "switch_links": 0,
    "failure": 0,
    "handle_failure": 0,
    "memory_failure": 0,
    "power_failure": 0,
}
TEXTS = ("name", "uuid", "bus_id")


def compiler() -> str | None:
    """Return the C compiler of this machine, None where there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def build_driver(description: str, folder: Path) -> Path:
    """Build the library for a JSON description in `folder` and return the folder to put on LD_LIBRARY_PATH."""
    machine = json.loads(description)
    (folder / "machine.h").write_text(make_header(machine))
    command = [compiler() or "cc", "-shared", "-fPIC", "-O0", "-I", str(folder), str(SOURCE)]
    command += [f"-DWITHOUT_{name}" for name in machine.get("missing_functions", ())]
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([*command, "-o", str(library)], check=True, capture_output=True, text=True)
    return folder


def make_header(machine: dict[str, Any]) -> str:
    """Return machine.h: the description as C tables."""
    gpus = [GPU_DEFAULTS | machine.get("every_gpu", {}) | gpu for gpu in machine["gpus"]]
    slices = [{"gpu": number} | one for number, gpu in enumerate(gpus) for one in gpu.get("slices", ())]
    fields = [f"char {name}[64];" if name in TEXTS else f"long long {name};" for name in GPU_DEFAULTS]
    rows = [", ".join(json.dumps(gpu[name]) for name in GPU_DEFAULTS) for gpu in gpus]
    slice_rows = [
        f"{one['gpu']}, {json.dumps(one['name'])}, {json.dumps(one['uuid'])}, {one['memory']}" for one in slices
    ]
    return "\n".join(
        [
            f"#define GPUS {len(gpus)}",
            f"#define SLICES {len(slices)}",
            f"#define INIT_RESULT {machine.get('init_result', 0)}",
            f"#define PEER_STATUS {machine.get('peer_status', 0)}",
            f"#define DRIVER_VERSION {json.dumps(machine['driver_version'])}",
            f"#define CUDA_VERSION {machine['cuda_version']}",
            f"struct gpu {{ {' '.join(fields)} }};",
            "struct slice { int gpu; char name[64]; char uuid[64]; unsigned long long memory; };",
            f"static struct gpu gpus[GPUS + 1] = {{ {', '.join(f'{{ {row} }}' for row in rows)} }};",
            f"static struct slice slices[SLICES + 1] = {{ {', '.join(slice_rows) or '{0}'} }};",
            f"static int nvlinks[GPUS + 1][GPUS + 1] = {make_table(machine.get('nvlinks', [[0]]))};",
            f"static int levels[GPUS + 1][GPUS + 1] = {make_table(machine.get('levels', [[0]]))};",
            "",
        ]
    )


def make_table(rows: list[list[int]]) -> str:
    """Return a table of numbers as a C initialiser."""
    return "{ " + ", ".join("{ " + ", ".join(str(cell) for cell in row) + " }" for row in rows) + " }"
