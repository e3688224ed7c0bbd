"""`paraplan check`, with real ranks under the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked_launch import launch_forked
from rank_harness import RankHarness
from typer.testing import CliRunner

from paraplan.cli.check import check_text, script_text
from paraplan.cli.main import app
from paraplan.plan.check import CheckReport, CheckRequest, smaller_plan
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.script_check.plans import CheckRunError, check_plan
from paraplan.script_check.records import ScriptReport

MODEL = """
import torch
from torch import nn


class Block(nn.Linear):
    def forward(self, hidden):
        return hidden + super().forward(hidden)


class Model(nn.Module):
    def __init__(self, num_layers, hidden_size, is_wrong):
        super().__init__()
        self.embedding = nn.Embedding(16, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, hidden_size) for _ in range(num_layers))
        self.head = nn.Linear(hidden_size, 16)
        self.is_wrong = is_wrong

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        if self.is_wrong and torch.distributed.is_initialized() and torch.distributed.get_rank():
            hidden = hidden * 2
        return self.head(hidden)


def right(num_layers=80, hidden_size=64):
    return Model(num_layers, hidden_size, False)


def wrong(num_layers=80, hidden_size=64):
    return Model(num_layers, hidden_size, True)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "user_model.py"
    path.write_text(MODEL)
    return str(path)


def write_plan(folder: Path, plan: ParallelPlan) -> str:
    path = folder / "plan.json"
    path.write_text(PlanFile(plan=plan).to_json())
    return str(path)


def check(
    ranks: RankHarness, folder: Path, model: str, plan: ParallelPlan, *, max_ranks: int = 8, **options: Any
) -> CheckReport:
    """Return what the command shows of a check, whose launches are forked with torch imported."""

    def launch(words: list[str]) -> tuple[int, str]:
        ended = launch_forked(ranks, folder, *words, environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
        return ended.returncode, ended.stderr

    small = smaller_plan(plan, max_ranks=max_ranks)
    request = CheckRequest(model=model, plan=small, folder="", max_layers=small.num_stages + 1, **options)
    return check_plan(request, plan, timeout_s=600.0, launch=launch)


@pytest.mark.ranks
def test_a_plan_for_many_ranks_is_checked_on_few_and_equal(ranks: RankHarness, model: str, tmp_path: Path) -> None:
    plan = ParallelPlan(pp=16, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=64)
    report = check(ranks, tmp_path, f"{model}:right", plan, max_ranks=2)
    assert report.is_equal
    assert report.planned.pp == 16
    assert (report.plan.pp, report.plan.num_microbatches) == (2, 4)
    assert report.gradient_error < 1e-5
    assert report.losses == pytest.approx(report.reference_losses, rel=1e-5)
    assert "equal" in "\n".join(check_text(report))


@pytest.mark.ranks
def test_a_difference_ends_with_1_and_names_parameter_and_axis(model: str, tmp_path: Path) -> None:
    path = write_plan(tmp_path, ParallelPlan(dp=8))
    words = ["check", f"{model}:wrong", "--plan", path, "--steps", "1", "--ranks", "2"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert "NOT EQUAL to one process: in step 1" in result.stdout, result.output
    assert "the gradient of embedding.weight differs by" in result.stdout
    assert "to blame  dp (equal with dp=1)" in result.stdout


@pytest.mark.ranks
def test_micro_batches_are_not_blamed_for_what_goes_wrong_without_them_too(
    ranks: RankHarness, model: str, tmp_path: Path
) -> None:
    report = check(ranks, tmp_path, f"{model}:wrong", ParallelPlan(dp=2, num_microbatches=2), num_steps=1)
    assert not report.is_equal
    assert report.blame == ("dp",)
    assert "micro-batch (" not in "\n".join(check_text(report))


@pytest.mark.ranks
def test_ranks_that_fail_are_reported_with_their_error(ranks: RankHarness, model: str, tmp_path: Path) -> None:
    with pytest.raises(CheckRunError) as failure:
        check(ranks, tmp_path, f"{model}:right", ParallelPlan(tp=2))
    assert failure.value.exit_status == 1
    assert "the ranks of the plan 'tp2, micro-batch 1 x 1' failed, status 2" in failure.value.message
    assert "tp=2, but no layer of blocks.0 (Block) can be split" in failure.value.message


def test_a_missing_plan_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", "gpt2", "--plan", str(tmp_path / "absent.json")])
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt2", "--plan", "plan.json", "--shrink"], "--shrink says how --script is run, and none is given"),
        (["gpt2", "--plan", "plan.json", "--module"], "--module says how --script is run, and none is given"),
        (["--plan", "plan.json", "--script", "train.py"], "--script and --plan are two checks"),
        ([], "there is nothing to check"),
    ],
)
def test_options_of_another_check_are_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["check", *words])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize("length", range(8, 60))
def test_no_line_about_a_script_is_too_long_and_none_is_a_unit_alone(length: int) -> None:
    report = ScriptReport(
        script=f"{'x' * length}.py",
        num_ranks=2,
        num_steps=2,
        num_parameters=8,
        is_equal=True,
        difference=None,
        gradient_error=1e-7,
        parameter_error=1e-8,
        losses=(1.0,),
        alone_losses=(1.0,),
        notes=(),
        seconds=6.0,
    )
    lines = script_text(report)
    assert all(len(line) <= 100 and line.isascii() for line in lines)
    assert not any(line.strip() == "s" for line in lines)
