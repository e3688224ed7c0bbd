"""What the README shows is run: its commands end well, and its example of a script is the runtime's API."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paraplan.cli.main import COMMANDS, app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHOWN = re.findall(r"^ {4}\$ paraplan (.+)$", README, flags=re.MULTILINE)
FORMATS = (".py", ".md", ".ipynb", ".json", ".sh", ".css", "")
SCRIPTS = re.findall(r"`?((?:scripts|\.ci)/[\w.]+)`?", README)


def test_the_readme_shows_commands() -> None:
    assert SHOWN


@pytest.mark.parametrize("line", SHOWN)
def test_a_shown_command_ends_well_with_the_output_that_is_shown(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = README.split(f"$ paraplan {line}\n", 1)[1]
    expected = [text[4:].rstrip() for text in shown.split("\n    ...", 1)[0].splitlines() if text.startswith("    ")]
    result = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.stderr
    printed = [text.rstrip() for text in result.stdout.splitlines()]
    assert expected
    assert [text for text in expected if text and text not in printed] == []


@pytest.mark.parametrize("path", sorted(set(SCRIPTS)))
def test_a_named_script_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_script_has_a_row_that_says_when_to_run_it() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Scripts")[2]
    named = re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE)))
    there = [path.name for path in (ROOT / "scripts").iterdir() if path.is_file()]
    assert sorted(named) == sorted(there)


def test_every_command_is_described() -> None:
    assert [name for name in COMMANDS if f"`paraplan {name}" not in README] == []


def test_the_example_of_a_training_script_is_python() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(example))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert {"init", "prepare", "shard", "step"} <= called


def test_nobody_is_told_to_install_a_package_of_this_name_which_is_not_published() -> None:
    said = re.compile(r"pip\d? install[^\n`|]*[ \"']paraplan\b")
    folders = (ROOT / name for name in ("paraplan", "scripts", "profiles"))
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix in FORMATS]
    assert [
        str(path) for path in (*files, *ROOT.glob("*.md"), *ROOT.glob("*.yml")) if said.search(path.read_text())
    ] == []
