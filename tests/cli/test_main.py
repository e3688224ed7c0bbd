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


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["recomend"])
    assert result.exit_code == 2
    assert "recomend" in result.stderr


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"paraplan {__version__}\n"
