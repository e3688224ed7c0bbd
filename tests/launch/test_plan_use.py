"""A plan that nobody runs: the launcher says so at the end."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from launching import ForkedLaunch, WriteScript

from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stack import StackSettings
from paraplan.plan.training import TrainingSpec

NOT_READ = "the script ran without its plan"
MEET = (
    "import torch.distributed as dist\nfrom paraplan import runtime\nfrom paraplan.plan.parallel import ParallelPlan\n"
)
SCRIPTS = {
    "plain": ("print('trained')", True),
    "exits": ("import sys; sys.exit(0)", True),
    "runtime": (MEET + "runtime.init(); dist.barrier()", False),
    "another plan": (MEET + "runtime.init(ParallelPlan(dp=2)); dist.barrier()", True),
}


@pytest.mark.parametrize(
    ("name", "logs"),
    [("plain", []), ("exits", ["--log-dir", "logs"]), ("runtime", ["--log-dir", "logs"]), ("another plan", [])],
)
def test_a_script_that_does_not_read_its_plan_is_told_of(
    name: str, logs: list[str], tmp_path: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    text, is_told = SCRIPTS[name]
    (tmp_path / "plan.json").write_text(PlanFile(plan=ParallelPlan(dp=2)).to_json())
    done = launch_forked("--plan", "plan.json", *logs, script(text))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(NOT_READ) == is_told
    assert not [*tmp_path.rglob("plan-read")]


def test_without_a_plan_nothing_is_said_of_one(script: WriteScript, launch_forked: ForkedLaunch) -> None:
    done = launch_forked("--nproc-per-node", 2, script("print('trained')"))
    assert done.returncode == 0
    assert NOT_READ not in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_a_plan_that_accelerate_takes_was_read(
    tmp_path: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    (tmp_path / "plan.json").write_text(PlanFile(plan=ParallelPlan(dp=2)).to_json())
    done = launch_forked(
        "--plan", "plan.json", script("from accelerate import Accelerator\nAccelerator(cpu=True).wait_for_everyone()")
    )
    assert done.returncode == 0, done.stderr
    assert NOT_READ not in done.stderr


def test_ranks_of_a_plan_that_was_made_for_segments_that_grow_have_the_variable(
    tmp_path: Path, script: WriteScript, launch_forked: ForkedLaunch
) -> None:
    training = TrainingSpec(global_batch_size=2, seq_length=8, stack=StackSettings(expandable_segments=True))
    (tmp_path / "plan.json").write_text(PlanFile(plan=ParallelPlan(dp=2), training=training).to_json())
    done = launch_forked("--plan", "plan.json", script("import os; print(os.environ['PYTORCH_CUDA_ALLOC_CONF'])"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("expandable_segments:True") == 2
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in each rank: the plan was made for it" in done.stderr
