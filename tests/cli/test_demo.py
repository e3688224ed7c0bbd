from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paraplan.cli.main import app


def test_a_script_that_was_changed_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "train_lm.py").write_text("mine")
    refused = CliRunner().invoke(app, ["demo", str(tmp_path)])
    assert refused.exit_code == 2
    assert "was changed" in refused.stderr
    assert (tmp_path / "train_lm.py").read_text() == "mine"


@pytest.mark.with_all
def test_the_demo_plans_for_this_machine_and_trains(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paraplan", "demo", str(tmp_path / "here"), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "$ paraplan launch --plan plan.json train_lm.py --steps 3" in done.stdout
    assert "validation loss" in done.stdout
    assert "Next:" in done.stdout
    assert (tmp_path / "here" / "plan.json").exists()
