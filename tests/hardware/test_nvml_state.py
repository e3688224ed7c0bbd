"""The states of GPUs, from the real pynvml on a fake driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fake_nvml
import nvml_machines
import pytest

pytestmark = pytest.mark.skipif(fake_nvml.compiler() is None, reason="no C compiler to build the fake driver with")

BUSY = {"busy": 87, "clock": 1200, "slowed_by": 0x4 | 0x40, "ecc_errors": 3, "used": 40 * 2**30, "pcie_width": 8}


def driver(folder: Path, **others: object) -> dict[str, str]:
    machine = nvml_machines.dgx_h100() | others
    machine["gpus"][1] |= BUSY
    return os.environ | {"LD_LIBRARY_PATH": str(fake_nvml.build_driver(nvml_machines.as_json(machine), folder))}


def topo(*words: str, env: dict[str, str]) -> str:
    command = [sys.executable, "-m", "paraplan", "topo", *words]
    return subprocess.run(command, env=env | {"COLUMNS": "140"}, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("missing", [[], ["nvmlDeviceGetCurrentClocksEventReasons"]])
def test_the_state_of_each_gpu_is_read(tmp_path: Path, missing: list[str]) -> None:
    idle, busy = json.loads(topo("--json", env=driver(tmp_path, missing_functions=missing)))["states"][:2]
    assert (busy["busy_share"], busy["power_w"], busy["power_limit_w"]) == (0.87, 150.0, 300.0)
    assert busy["slowed_by"] == ["power cap", "thermal (hardware)"]
    assert (busy["ecc_errors"], busy["sm_clock_mhz"], busy["sm_clock_max_mhz"]) == (3, 1200, 1980)
    assert (busy["pcie_width"], busy["pcie_width_max"]) == (8, 16)
    assert (idle["busy_share"], idle["slowed_by"], idle["ecc_errors"]) == (None, [], 0)


def test_the_states_stand_beside_the_gpus_and_are_watched_until_ctrl_c(tmp_path: Path) -> None:
    env = driver(tmp_path)
    (row,) = (line for line in topo(env=env).splitlines() if "power cap" in line)
    for words in ("40 of", "87%", "150 of 300 W", "1200 of 1980 MHz", "5 x8 of 5 x16", "61 C"):
        assert words in row
    command = [sys.executable, "-m", "paraplan", "topo", "--watch", "0.2"]
    with subprocess.Popen(command, env=env | {"COLUMNS": "140"}, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        seen = 0
        while seen < 3 and (line := child.stdout.readline()):
            seen += "power cap" in line
        child.send_signal(signal.SIGINT)
        child.stdout.read()
    assert seen == 3
    assert child.returncode == 130


def test_watching_is_for_this_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paraplan", "topo", "--watch", "1", "--profile", "dgx-h100"]
    done = subprocess.run(command, capture_output=True, text=True, env=driver(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--watch looks at this machine" in done.stderr
