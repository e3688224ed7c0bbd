from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from waiting import PATIENCE_S

from paraplan.cli.main import app


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "settings" / "config.json"
    monkeypatch.setenv("PARAPLAN_CONFIG", str(path))
    return path


def run(*words: str) -> str:
    answer = CliRunner().invoke(app, list(words))
    assert answer.exit_code == 0, answer.stderr
    return answer.stdout + answer.stderr


def refused(*words: str) -> str:
    answer = CliRunner().invoke(app, list(words))
    assert answer.exit_code == 2, answer.stdout
    return answer.stderr


def test_what_is_kept_is_the_default_and_the_command_line_comes_before_it(path: Path) -> None:
    run("config", "profile=dgx-a100", "precision=fp32", "price=2.5")
    assert json.loads(path.read_text()) == {"profile": "dgx-a100", "precision": "fp32", "price": "2.5"}
    estimate = ["estimate", "gpt2", "--dp", "2"]
    answer = run(*estimate)
    assert "Machine   dgx-a100" in answer
    assert "fp32, adamw" in answer
    assert "note: --profile dgx-a100 --precision fp32, as paraplan config keeps it" in answer
    given = run(*estimate, "--gpu", "rtx-3090", "--num-gpus", "2", "--precision", "bf16")
    assert "Machine   rtx-3090-x2" in given
    assert "as paraplan config keeps it" not in given
    run("config", "profile=")
    assert "profile" not in json.loads(path.read_text())
    run("config", "--reset")
    assert not path.exists()
    assert "nothing is kept" in run("config", "--show")


def test_a_price_is_the_default_of_recommend_alone(path: Path) -> None:
    run("config", "profile=rtx-3090-x2", "price=1.5")
    assert "cost" in run("recommend", "gpt2", "--seq-len", "512", "--global-batch", "8")
    run("estimate", "gpt2", "--dp", "2")


def test_what_no_option_takes_is_not_kept(path: Path) -> None:
    assert "profile" in refused("config", "profil=dgx-h100")
    assert "no machine" in refused("config", "profile=dgx-h1000") or "dgx-h100" in refused(
        "config", "profile=dgx-h1000"
    )
    assert "not a whole number" in refused("config", "nodes=many")
    assert "there is no precision" in refused("config", "precision=fp33")
    assert "questions need a terminal" in refused("config")
    assert not path.exists()


@pytest.mark.parametrize("text", ["{", "[" * 50_000, '{"profile": 3}', '{"other": "a"}', "\xff"])
def test_a_file_that_somebody_else_wrote_is_named(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text, encoding="latin-1")
    assert str(path) in refused("recommend", "gpt2", "--profile", "dgx-h100").replace("\n", "")
    run("config", "--reset")


def test_six_questions_are_asked_once(path: Path) -> None:
    terminal, theirs = pty.openpty()
    words = [sys.executable, "-m", "paraplan", "config"]
    with subprocess.Popen(words, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        os.write(terminal, b"8xh1000\n8xh100\n\nbf16-pure\n\ntorchtitan\n$2.5\n")
        shown = child.communicate(timeout=PATIENCE_S)[0]
    os.close(terminal)
    os.close(theirs)
    assert child.returncode == 0, shown
    assert "8xh1000" in shown  # said, and asked again
    assert json.loads(path.read_text()) == {
        "profile": "8xh100",
        "precision": "bf16-pure",
        "framework": "torchtitan",
        "price": "$2.5",
    }


def test_forgetting_what_cannot_be_deleted_is_said_in_a_sentence(path: Path) -> None:
    path.mkdir(parents=True)
    assert "cannot delete" in refused("config", "--reset")


def test_below_a_file_nothing_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    monkeypatch.setenv("PARAPLAN_CONFIG", str(path / "x"))
    assert "nothing is kept" in run("config", "--reset")
    assert "cannot write" in refused("config", "price=2")
