"""Whole jobs on a GPU: copies in memory, questions to a job that runs, slow ranks, and what is left of a killed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from launching import launcher_command, launcher_environment, wait_until_dead
from recovery_script import SCRIPT as RECOVERY
from recovery_script import descendants, losses

Record = Callable[[str, Any], None]
HERE = Path(__file__).parent
GLOO = {"PARAPLAN_BACKEND": "gloo"}

TRAIN = """
    import sys, time
    import torch
    from gpu_cases import batch_of, engine_of, HAS_GPU
    from paraplan import runtime
    from paraplan.plan.parallel import ParallelPlan

    slow_rank, steps, ranks = (int(word) for word in sys.argv[1:])
    job, engine = engine_of(ParallelPlan(dp=ranks, micro_batch_size=8), precision="bf16", verify="off")
    batches = [batch_of(step) for step in range(8)]
    for step in range(steps):
        loss = engine.step(*batches[step % 8])
        if job.world.rank == slow_rank and step > 30:
            time.sleep(0.1)
        if step % 20 == 0 and job.is_main:
            print("step", step, loss.item(), flush=True)
    job.close()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tmp").mkdir()
    found = launcher_environment(tmp_path / "tmp")
    found["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1]), found.get("PYTHONPATH", "")])
    return found


def launch(environment: dict[str, str], folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = launcher_command(*words)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=140, check=False
    )


def paraplan(environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paraplan", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(dedent(text))
    return path


@pytest.mark.parametrize("size", [1, 2])
def test_a_lost_rank_goes_on_from_the_copy_in_memory(
    size: int, environment: dict[str, str], tmp_path: Path, record_property: Record
) -> None:
    path, folder = written(tmp_path, RECOVERY), tmp_path / "none"
    words = (path, f"folder={folder}", "steps=11", "plans=zero3", "dropout=0")
    ranks = ("--no-logs", "--nproc-per-node", size)
    options = ("--memory-checkpoint", 4, "--max-restarts", 1)
    broken = launch(environment | GLOO, tmp_path, *ranks, *options, *words, f"faults={size - 1}@7")
    record_property("said", broken.stderr[-1500:])
    assert broken.returncode == 0, broken.stderr
    assert "going on after 4 steps from the copy in memory" in broken.stderr
    whole = launch(environment | GLOO, tmp_path, *ranks, *words)
    assert losses(broken.stdout) == pytest.approx(losses(whole.stdout), rel=1e-5)


@pytest.fixture
def training(environment: dict[str, str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A job of two ranks that trains for as long as a test, with its run folder."""
    command = launcher_command("--log-dir", "run", "--nproc-per-node", 2, written(tmp_path, TRAIN), -1, 1_000_000, 2)
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment | GLOO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        said = [job.stdout.readline()]
        while "step 40 " not in said[-1]:
            said.append(job.stdout.readline())
            assert said[-1], "".join(said)
        yield job, tmp_path / "run"
        job.kill()
        job.stdout.close()


def test_a_job_that_runs_answers(
    training: tuple[subprocess.Popen[str], Path], environment: dict[str, str], tmp_path: Path, record_property: Record
) -> None:
    _, folder = training
    listed = paraplan(environment, "ps")
    record_property("ps", listed.stdout)
    assert str(folder.name) in listed.stdout or "train.py" in listed.stdout
    stacks = paraplan(environment, "stacks", folder)
    record_property("stacks", stacks.stdout + stacks.stderr)
    assert stacks.returncode == 0
    profiled = paraplan(environment, "profile", folder, "--seconds", "0.5", "--json")
    assert profiled.returncode == 0, profiled.stderr
    (trace,) = json.loads(profiled.stdout)["traces"].values()
    events = json.loads(Path(trace).read_text())["traceEvents"]
    kinds = {event.get("cat") for event in events}
    assert "cpu_op" in kinds
    if torch.cuda.is_available():
        assert "kernel" in kinds
    predicted = tmp_path / "predicted.json"
    options = ("gpt2", "--profile", "1xh100", "--global-batch", "8", "--seq-len", "128", "--trace", predicted)
    assert paraplan(environment, "estimate", *options).returncode == 0
    compared = paraplan(environment, "compare", predicted, trace)
    record_property("compared", compared.stdout + compared.stderr)
    assert compared.returncode == 0


def test_nothing_is_left_of_a_killed_launcher(
    training: tuple[subprocess.Popen[str], Path], record_property: Record
) -> None:
    job, _ = training
    family = [job.pid, *descendants(job.pid)]
    held = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    job.send_signal(signal.SIGKILL)
    job.wait(timeout=60)
    assert wait_until_dead(*family) == []
    if torch.cuda.is_available():
        time.sleep(1.0)
        record_property("bytes_freed", torch.cuda.mem_get_info()[0] - held)


def test_ctrl_c_ends_a_job_at_once(training: tuple[subprocess.Popen[str], Path], record_property: Record) -> None:
    job, _ = training
    family = [job.pid, *descendants(job.pid)]
    started_s = time.monotonic()
    job.send_signal(signal.SIGINT)
    job.wait(timeout=60)
    record_property("seconds", time.monotonic() - started_s)
    assert wait_until_dead(*family) == []


def test_a_slow_rank_is_named(environment: dict[str, str], tmp_path: Path, record_property: Record) -> None:
    words = ("--no-logs", "--nproc-per-node", 2, written(tmp_path, TRAIN), 1, 120, 2)
    done = launch(environment | GLOO, tmp_path, *words)
    record_property("said", done.stderr[-1500:])
    assert done.returncode == 0, done.stderr
    assert "paraplan: rank 1 (" in done.stderr


def test_equal_ranks_are_not_named(environment: dict[str, str], tmp_path: Path, record_property: Record) -> None:
    words = ("--no-logs", "--nproc-per-node", 2, written(tmp_path, TRAIN), -1, 120, 2)
    done = launch(environment | GLOO, tmp_path, *words)
    record_property("said", done.stderr[-1500:])
    assert done.returncode == 0, done.stderr
    assert "since step" not in done.stderr


@pytest.mark.cuda_only
def test_doctor_measures_the_gpu(environment: dict[str, str], record_property: Record) -> None:
    done = paraplan(environment, "doctor", "--nproc-per-node", 1, "--seconds", 5, "--json")
    record_property("report", done.stdout[-4000:])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.cuda_only
def test_a_preflight_that_measures_lets_a_good_gpu_pass(
    environment: dict[str, str], tmp_path: Path, record_property: Record
) -> None:
    path = written(tmp_path, "import torch; print(torch.ones(1, device='cuda').item())")
    done = launch(environment, tmp_path, "--no-logs", "--preflight", "measure", "--nproc-per-node", 1, path)
    record_property("said", done.stderr[-1500:])
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda_only
def test_states_of_the_gpu_are_read_while_it_works(environment: dict[str, str], record_property: Record) -> None:
    from paraplan.hardware.probe.nvml_state import gpu_states

    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(200):
        left @ left
    with gpu_states() as states:
        (state,) = states.read()
    torch.cuda.synchronize()
    record_property("state", state.model_dump(mode="json"))
    assert state.power_w is not None
    assert state.sm_clock_mhz is not None
    shown = paraplan(environment, "topo")
    record_property("topo", shown.stdout)
    assert shown.returncode == 0
