"""JSON that is nested or long beyond reason is refused in a sentence by every command that reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paraplan.cli.main import app

NESTED, HUGE = '{"a":' + "[" * 200_000, '{"gpus": ' + "1" * 5000 + "}"
WHERE = ("--profile", "dgx-h100", "--nodes", "1", "--global-batch", "8")


@pytest.mark.parametrize("text", [NESTED, HUGE])
@pytest.mark.parametrize(
    "words",
    [
        ["estimate", "FILE", *WHERE],
        ["recommend", "FILE", *WHERE],
        ["estimate", "llama-2-7b", *WHERE, "--plan", "FILE"],
        ["topo", "--from", "FILE"],
        ["export", "FILE", "--to", "megatron"],
        ["import", "FILE", "--model", "llama-2-7b", "--profile", "dgx-h100"],
        ["validate", "FILE"],
        ["compare", "FILE"],
        ["verify", "FILE"],
        ["profiles", "show", "FILE"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_json_nested_or_huge_is_a_sentence(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    done = CliRunner().invoke(app, [word.replace("FILE", str(path)) for word in words])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2
    assert done.stderr.startswith(("error: ", "Usage: ")), done.stderr[:300]
    assert len(done.stderr) < 2000


@pytest.mark.parametrize("source", [["--profile", "dgx-h100"], ["--profile", "4xh100-pcie"], ["--profile", "dgx-a100"]])
def test_the_json_of_topo_is_read_back_as_the_same_machine(tmp_path: Path, source: list[str]) -> None:
    first = CliRunner().invoke(app, ["topo", *source, "--json"])
    (tmp_path / "t.json").write_text(first.stdout)
    again = CliRunner().invoke(app, ["topo", "--from", str(tmp_path / "t.json"), "--json"])
    assert again.exit_code == 0, again.stderr
    before, after = json.loads(first.stdout), json.loads(again.stdout)
    assert {name: after[name] for name in ("gpus", "links", "nics", "nvlink_islands")} == {
        name: before[name] for name in ("gpus", "links", "nics", "nvlink_islands")
    }
    (tmp_path / "t2.json").write_text(again.stdout)
    third = CliRunner().invoke(app, ["topo", "--from", str(tmp_path / "t2.json"), "--json"])
    assert json.loads(third.stdout) == after
