"""Commands on a machine with a GPU: what it is, how it is measured, and what a failed job says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Record = Callable[[str, Any], None]
CUDA_SCRIPTS = {
    "out of memory": "import torch\nheld = [torch.empty(2**34, device='cuda') for _ in range(64)]\n",
    "device assert": "import torch\ntorch.zeros(4, device='cuda')[torch.tensor([9], device='cuda')].cpu()\n",
}
TRITON_SCRIPT = """
import torch
from torch import nn
model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).cuda())
model(torch.ones(8, 64, device="cuda")).mean().backward()
print("compiled on", torch.cuda.get_device_name(), flush=True)
"""


def run(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paraplan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.cuda_only
def test_topo_reads_the_gpu_from_nvml(record_property: Record) -> None:
    done = run("topo", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    record_property("topology", found)
    assert found["gpus"][0]["name"] == torch.cuda.get_device_name()
    total = torch.cuda.get_device_properties(0).total_memory
    assert found["gpus"][0]["memory_total_bytes"] == pytest.approx(total, rel=0.02)
    major, minor = torch.cuda.get_device_capability()
    assert found["gpus"][0]["compute_capability"] in (f"{major}.{minor}", [major, minor])


@pytest.mark.cuda_only
def test_a_plan_is_recommended_for_this_machine(record_property: Record) -> None:
    done = run("recommend", "gpt2", "--seq-len", "1024", "--global-batch", "8", "--json")
    assert done.returncode == 0, done.stderr
    record_property("plan", json.loads(done.stdout)["plan"])


def test_a_script_with_a_compiler_runs_in_a_forked_rank(tmp_path: Path) -> None:
    script = tmp_path / "compiled.py"
    script.write_text(TRITON_SCRIPT if torch.cuda.is_available() else "print('compiled on no GPU')")
    done = run("launch", "--nproc-per-node", "1", str(script))
    assert done.returncode == 0, done.stderr
    assert "compiled on" in done.stdout


@pytest.mark.cuda_only
@pytest.mark.parametrize(("fault", "words"), [("out of memory", "memory"), ("device assert", "assert")])
def test_a_failed_job_says_what_the_gpu_said(fault: str, words: str, tmp_path: Path, record_property: Record) -> None:
    script = tmp_path / "fault.py"
    script.write_text(CUDA_SCRIPTS[fault])
    done = run("launch", "--nproc-per-node", "1", str(script))
    record_property("said", done.stderr[-1500:])
    assert done.returncode != 0
    assert words in done.stderr.lower()


@pytest.mark.cuda_only
def test_a_prediction_is_laid_beside_a_measured_run(tmp_path: Path, record_property: Record) -> None:
    """GPT-2 small on this GPU: time and memory as predicted and as measured, with no constant of this machine."""
    plan = tmp_path / "plan.json"
    options = ("gpt2", "--seq-len", "1024", "--global-batch", "8", "--precision", "bf16", "--attention", "sdpa")
    done = run("recommend", *options, "-o", str(plan))
    assert done.returncode == 0, done.stderr
    scripts = Path(__file__).parents[2] / "scripts"
    training = [str(scripts / "train_hf.py"), "--config", "gpt2", "--data", str(scripts), "--steps", "20"]
    done = run("launch", "--nproc-per-node", "1", "--plan", str(plan), *training, timeout_s=180.0)
    record_property("said", done.stderr[-1500:])
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stderr
