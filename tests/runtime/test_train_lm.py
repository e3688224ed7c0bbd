"""The language-model script: one file under python and under every kind of plan."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from case_selection import with_all
from forked_launch import run_forked
from rank_harness import RankHarness

from paraplan.errors import UsageError
from paraplan.plan.files import ModelReference, PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_lm.py"
SMALL = ("--hidden", "32", "--layers", "3", "--heads", "2", "--eval-batches", "2", "--log-every", "10", "--lr", "0.01")

PLANS = [
    ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=2, num_microbatches=4),
    *with_all(  # the script does the same under these; what a plan changes is in test_plan_equality
        [
            ParallelPlan(dp=2, zero_stage=3, micro_batch_size=2, num_microbatches=2),
            ParallelPlan(dp=2, micro_batch_size=2, num_microbatches=2),
            ParallelPlan(tp=2, sequence_parallel=True, micro_batch_size=8, recompute="full"),
            ParallelPlan(dp=2, zero_stage=1, micro_batch_size=4),
            ParallelPlan(dp=2, zero_stage=2, micro_batch_size=4, recompute="full"),
            ParallelPlan(pp=2, pipeline_schedule="gpipe", micro_batch_size=2, num_microbatches=4),
            ParallelPlan(tp=2, micro_batch_size=4, num_microbatches=2),
        ]
    ),
]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number:02}.txt").write_text("to train is to learn what the next byte will be. " * 20)
    return folder


def run_script(arguments: tuple[str, ...], plan_file: str | None) -> str:
    """Run the script in this rank and return what it prints."""
    if plan_file is not None:
        os.environ["PARAPLAN_PLAN"] = plan_file
    sys.argv = [str(SCRIPT), *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


def validation_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"validation loss ([0-9.]+)", output)]


@pytest.fixture(scope="module")
def one_process_losses(ranks: RankHarness, text_folder: Path) -> list[float]:
    output = ranks.run_alone(run_script, _arguments(text_folder, "--batch", "8"), None)
    return validation_losses(output)


def _arguments(folder: Path, *more: str, steps: int = 4) -> tuple[str, ...]:
    return (*SMALL, "--data", str(folder), "--steps", str(steps), "--seq-len", "32", *more)


def test_the_loss_falls_in_one_process(ranks: RankHarness, text_folder: Path) -> None:
    output = ranks.run_alone(run_script, _arguments(text_folder, "--batch", "8", steps=30), None)
    before, after = validation_losses(output)
    assert before == pytest.approx(5.55, abs=0.1)  # ln 256, for bytes about which nothing is known
    assert after < 0.6 * before


@pytest.mark.ranks
@pytest.mark.parametrize("plan", PLANS, ids=ParallelPlan.describe)
def test_every_plan_gives_the_losses_of_one_process(
    plan: ParallelPlan, ranks: RankHarness, text_folder: Path, tmp_path: Path, one_process_losses: list[float]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PlanFile(plan=plan).to_json())
    outputs = ranks.run(run_script, _arguments(text_folder), str(path), size=2)
    assert validation_losses(outputs[0]) == pytest.approx(one_process_losses, abs=2e-3)
    assert plan.describe() in outputs[0]
    assert outputs[1] == ""


@pytest.mark.ranks
def test_the_plan_file_gives_batch_and_sequence_length(ranks: RankHarness, text_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    training = TrainingSpec(global_batch_size=8, seq_length=2000, precision="fp32")
    path.write_text(PlanFile(plan=PLANS[0], training=training).to_json())
    arguments = (*SMALL, "--data", str(text_folder), "--steps", "1")
    with pytest.raises(AssertionError, match=r"a sequence of 2000 bytes is outside 1\.\.1024"):
        ranks.run(run_script, arguments, str(path), size=2)


def forked_script(plan_file: str) -> tuple[int, str, str]:
    """Return how the script ends in a fork, where the interpreter is not started anew."""
    ended = run_forked([sys.executable, str(SCRIPT), "--steps", "1"], env=os.environ | {"PARAPLAN_PLAN": plan_file})
    return ended.returncode, ended.stdout, ended.stderr


def test_a_user_error_ends_the_script_with_one_line_and_status_2(ranks: RankHarness, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PlanFile(plan=ParallelPlan(), model=ModelReference(name="other", num_parameters=1)).to_json())
    status, stdout, stderr = ranks.run_alone(forked_script, str(path), is_fresh=True)
    assert (status, stdout) == (2, "")
    assert stderr.startswith("error: the plan was made for other with 1 parameters")
    assert len(stderr.splitlines()) == 1


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("train_lm_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_windows_follow_each_other_and_their_targets_are_one_byte_later() -> None:
    script = _script()
    windows = script.Windows(script.bytes_of(bytes(range(10))), 3)
    assert len(windows) == 3
    inputs, targets = windows[1]
    assert inputs.tolist() == [3, 4, 5]
    assert targets.tolist() == [4, 5, 6]


def test_a_folder_without_enough_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a single file")
    with pytest.raises(UsageError, match="holds 1 text files"):
        _script().read_text(tmp_path)
    with pytest.raises(UsageError, match="is no folder"):
        _script().read_text(tmp_path / "absent")
