"""`paraplan check`, with real ranks under the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paraplan.cli.main import app
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan

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


def right(num_layers=80, hidden_size=4096):
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


@pytest.mark.ranks
def test_a_plan_for_many_ranks_is_checked_on_few_and_equal(model: str, tmp_path: Path) -> None:
    plan = ParallelPlan(pp=16, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=64)
    words = ["check", f"{model}:right", "--plan", write_plan(tmp_path, plan), "--ranks", "2", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["is_equal"]
    assert report["planned"]["pp"] == 16
    assert (report["plan"]["pp"], report["plan"]["num_microbatches"]) == (2, 4)
    assert report["gradient_error"] < 1e-5
    assert report["losses"] == pytest.approx(report["reference_losses"], rel=1e-5)


@pytest.mark.ranks
def test_a_difference_ends_with_1_and_names_parameter_and_axis(model: str, tmp_path: Path) -> None:
    path = write_plan(tmp_path, ParallelPlan(dp=2, num_microbatches=2))
    result = CliRunner().invoke(app, ["check", f"{model}:wrong", "--plan", path, "--steps", "1"])
    assert result.exit_code == 1, result.output
    assert "NOT EQUAL to one process: in step 1" in result.stdout, result.output
    assert "the gradient of embedding.weight differs by" in result.stdout
    assert "to blame  dp (equal with dp=1)" in result.stdout
    assert "micro-batch (" not in result.stdout


@pytest.mark.ranks
def test_ranks_that_fail_are_reported_with_their_error(model: str, tmp_path: Path) -> None:
    words = [
        "check",
        f"{model}:right",
        "--plan",
        write_plan(tmp_path, ParallelPlan(tp=2)),
        "--split-by",
        "transformers",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert "the ranks of the plan 'tp2, micro-batch 1 x 1' failed, status 2" in result.stderr
    assert "transformers has no plan for Model" in result.stderr


def test_an_unknown_splitter_and_a_missing_plan_are_refused(tmp_path: Path) -> None:
    path = write_plan(tmp_path, ParallelPlan())
    result = CliRunner().invoke(app, ["check", "gpt2", "--plan", path, "--split-by", "nobody"])
    assert result.exit_code == 2
    assert "--split-by nobody is unknown" in result.stderr
    result = CliRunner().invoke(app, ["check", "gpt2", "--plan", str(tmp_path / "absent.json")])
    assert result.exit_code == 2
