from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from paraplan import __version__
from paraplan.cli.main import COMMANDS, app


def test_help_lists_every_command_with_a_sentence() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    for name in COMMANDS:
        line = next(line for line in result.stdout.splitlines() if line.strip(" │").startswith(f"{name} "))
        assert len(line.split(name, 1)[1].strip(" │")) > 20


# The launcher takes the place of the process that calls it: its help is in test_launch_command.py.
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "launch"])
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "--" in result.stdout


def test_the_package_is_a_program() -> None:
    command = [sys.executable, "-m", "paraplan", "recommend", "--help"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--global-batch" in finished.stdout


def test_an_unknown_command_is_a_usage_error_that_names_near_ones() -> None:
    result = CliRunner().invoke(app, ["recomend"])
    assert result.exit_code == 2
    assert "there is no command 'recomend'" in result.stderr
    assert "did you mean recommend" in result.stderr


def test_help_and_version_are_words_too() -> None:
    run = CliRunner().invoke
    assert run(app, ["help"]).stdout == run(app, ["--help"]).stdout
    assert run(app, ["help", "verify"]).stdout == run(app, ["verify", "--help"]).stdout
    assert run(app, ["version"]).stdout == run(app, ["--version"]).stdout


def test_numbers_have_their_limits_in_errors_and_not_in_help() -> None:
    shown = CliRunner().invoke(app, ["recommend", "--help"], env={"COLUMNS": "120"}).stdout
    assert "1000000" not in shown
    for value in ("0", "many", "1000001", "1.5"):
        result = CliRunner().invoke(app, ["recommend", "gpt2", "--tp", value], env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert f"'{value}' is no whole number from 1 to 1,000,000" in result.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"paraplan {__version__}\n"
