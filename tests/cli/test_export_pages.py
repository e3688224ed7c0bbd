"""The pages: every command that they show behind a `$` is run, and what they write of others exists."""

from __future__ import annotations

import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
from case_selection import with_all
from forked_launch import launch_forked
from rank_harness import RankHarness
from typer.testing import CliRunner

from paraplan.cli.explain import TOPICS
from paraplan.cli.main import COMMANDS, app
from paraplan.interop.export import TARGETS

PAGES = Path(__file__).parent.parent.parent / "paraplan" / "docs"
NAMES = tuple(name for name in TOPICS if "\n    $ paraplan " in (PAGES / f"{name}.md").read_text())
SHOWN = re.compile(r"^ {4}\$ (paraplan .+)$", flags=re.MULTILINE)
MENTIONED = re.compile(r"(?:^ {4}(?:\$ )?|`)paraplan ([a-z]+\b[^`\n]*)", flags=re.MULTILINE)
FILES = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def run(words: list[str], folder: Path, ranks: RankHarness) -> tuple[int, str]:
    """Return exit status and output of a command. A launch ends its process, and so it gets one of its own."""
    if words[0] != "launch":
        result = CliRunner().invoke(app, words, env={"NO_COLOR": "1"})
        return result.exit_code, result.output
    ended = launch_forked(ranks, folder, *words[1:], environment={"NO_COLOR": "1", "OMP_NUM_THREADS": "1"})
    return ended.returncode, ended.stdout + ended.stderr


# Those of the two longest pages are run in tests of estimates, reports and launches.
@pytest.mark.parametrize("name", [one for one in NAMES if one not in ("faq", "reports") or with_all([one])])
def test_the_commands_of_a_page_end_well_in_their_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: RankHarness
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # tests of reports draw their charts
    page = (PAGES / f"{name}.md").read_text()
    Path("train.py").touch()
    for path, content in FILES.findall(page):
        Path(path).write_text(content)
    commands = SHOWN.findall(page)
    assert commands
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "paraplan"
        status, output = run(words, tmp_path, ranks)
        assert status == 0, f"{command}\n{output}"


@cache
def help_of(subcommand: str) -> str:
    return CliRunner().invoke(app, [*subcommand.split(), "--help"], env={"COLUMNS": "200"}).stdout


@pytest.mark.parametrize("name", TOPICS)
def test_options_that_a_page_names_exist(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    used: dict[str, set[str]] = {}
    for command in MENTIONED.findall(page):
        # Another tool's words are quoted, and those behind a script are its own.
        words = re.split(r"#| [\w/]+\.py| -- ", re.sub(r'"[^"]*"', "", command))[0].split()
        assert words[0] in COMMANDS, command
        subcommand = " ".join(words[: 1 + (words[0] == "profiles")])
        used.setdefault(subcommand, set()).update(word.split("=")[0] for word in words if re.match("--[a-z]", word))
    for subcommand, options in used.items():
        if subcommand == "launch":  # it ends its process; a test of its own holds the table of its page
            text = (PAGES / "launch.md").read_text().split("<!-- options: begin -->")[1]
        else:
            text = help_of(subcommand)
        assert [option for option in options if option not in text] == []


def test_the_page_about_exports_names_every_target() -> None:
    page = (PAGES / "export.md").read_text()
    assert [name for name in TARGETS if f"`{name}`" not in page] == []
