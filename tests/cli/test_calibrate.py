from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from waiting import PATIENCE_S

from paraplan.cli.main import app
from paraplan.hardware.catalogue.profile_files import cluster_from_profile


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
    return result.exit_code, result.stdout, result.stderr


def test_real_ranks_make_a_profile_that_other_commands_predict_with(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="measuring needs torch")
    path = tmp_path / "here.json"
    command = [sys.executable, "-m", "paraplan", "calibrate", "--ranks", "2", "--seconds", "1", "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())  # lines wrap where the name of this CPU has them wrap
    assert "2 ranks, measured all at once" in said
    assert "paraplan calibrate on 2 CPU processes" in said
    cluster = cluster_from_profile(str(path))
    calibration = cluster.gpu.calibration
    assert calibration is not None
    fit = calibration.fit("fp32")
    assert fit is not None
    assert 1e8 < fit.matmul_flops_per_s < 1e13
    assert "torch" in calibration.source
    assert cluster.gpu.peak_flops_per_s["fp32"] > 0
    estimate = ["estimate", "gpt2", "--seq-len", "128", "--dp", "2", "--precision", "fp32", "--json"]
    status, stdout, stderr = run(*estimate, "--profile", str(path))
    assert (status, stderr) == (0, "")
    own = json.loads(stdout)["step"]
    nominal = json.loads(run(*estimate, "--profile", "cpu")[1])["step"]
    assert own["compute_s"] != nominal["compute_s"]


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "here.json"):
        status, _, stderr = run("calibrate", "-o", str(path))
        assert status == 2
        assert f"cannot write {path}" in stderr.replace("\n", "")


def test_runs_and_ranks_are_two_ways() -> None:
    status, _, stderr = run("calibrate", "--runs", "runs.csv", "--ranks", "2")
    assert status == 2
    assert "--runs fits to runs, and --ranks measures" in stderr


def test_runs_that_are_not_there_or_too_few_are_told(tmp_path: Path) -> None:
    status, _, stderr = run("calibrate", "--runs", str(tmp_path / "absent.csv"))
    assert status == 2
    assert "cannot read" in stderr
    path = tmp_path / "runs.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    status, _, stderr = run("calibrate", "--runs", str(path))
    assert status == 2
    assert "has no column" in stderr
