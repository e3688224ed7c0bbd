"""What people read in a terminal: widths, ends of lines, colours, and messages that break between words."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from case_selection import with_all
from typer.testing import CliRunner
from waiting import PATIENCE_S

from paraplan.cli.main import app
from paraplan.cost.framework_files import FrameworkCatalog
from paraplan.units import broken_between_words

GPT2 = ["gpt2", "--seq-len", "1024", "--global-batch", "64"]
COMMANDS = {
    "pipeline": ["estimate", *GPT2, "--profile", "dgx-h100", "--dp", "2", "--pp", "4", "-v"],
    "too-large": ["estimate", "gpt2-xl", *GPT2[1:], "--profile", "rtx-3090-x2", "--dp", "2"],
    "recommend": ["recommend", *GPT2, "--profile", "rtx-3090-x2", "--explain", "--pareto", "--tp", "1"],
    "topo": ["topo", "--profile", "dgx-h100"],
    "tree": ["topo", "--profile", "dgx-h100", "--tree"],
}


def on_terminal(words: list[str], *, columns: int, **environment: str) -> str:
    """Return what a command writes to a terminal of `columns`, standard output and messages together."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "paraplan", *words],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=variables | {"TERM": "xterm-256color"} | environment,
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 65_536)
        except OSError:  # Linux says so once the other end of a terminal is closed
            break
        if not part:
            break
        text += part
    os.close(ours)
    process.wait(timeout=PATIENCE_S)
    return text.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("name", "width"),
    [(name, 80) for name in COMMANDS] + [("pipeline", 120), *with_all([(name, 120) for name in COMMANDS])],
)
def test_lines_fit_and_end_without_spaces(name: str, width: int) -> None:
    result = CliRunner().invoke(app, COMMANDS[name], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    printed_by_typer = ("  paraplan launch", "  paraplan recommend", "  torchrun", "Write the plan")
    assert [line for line in lines if len(line) > width and not line.startswith(printed_by_typer)] == []
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("width", [80, 120])
def test_bars_and_the_pipeline_use_the_width_that_there_is(width: int) -> None:
    text = CliRunner().invoke(app, COMMANDS["pipeline"], env={"COLUMNS": str(width)}).stdout
    bars = [line for line in text.splitlines() if line.startswith("stage ") and line.endswith("% of usable")]
    ranks = [line for line in text.splitlines() if re.match(r"rank +\d", line)]
    assert len(bars) == len(ranks) == 4
    limits = {line.index("|") for line in bars}
    assert limits == {9 + min(60, width - 28)}
    assert all(width * 0.6 < len(line) <= width for line in ranks)


def test_colours_are_for_terminals_that_want_them() -> None:
    words = COMMANDS["pipeline"]
    coloured = on_terminal(words, columns=100)
    plain = on_terminal(words, columns=100, NO_COLOR="1")
    assert "\x1b[36m" in coloured
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", plain)
    escapes = re.compile(r"\x1b\[[0-9;]*m")
    assert escapes.sub("", coloured) == escapes.sub("", plain)
    assert [line for line in escapes.sub("", plain).splitlines() if line != line.rstrip()] == []


def test_names_in_a_hint_are_never_broken() -> None:
    text = on_terminal(["recommend", "gpt2", "--profile", "8xh100", "--framework", "zzzz"], columns=100, NO_COLOR="1")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert all(len(line) <= 100 for line in plain.splitlines())
    assert set(FrameworkCatalog().names()) <= set(re.split(r"[\s,]+", plain))


def test_an_error_of_a_launch_is_broken_between_words_on_a_terminal() -> None:
    text = on_terminal(["launch", "--nproc-per-node", "two-of-them", "--plan", "auto", "no-such-script.py"], columns=50)
    lines = text.splitlines()
    assert len(lines) > 2
    assert all(len(line) <= 50 for line in lines)
    assert " ".join(lines).startswith("error: there is no script no-such-script.py")


def test_a_message_in_a_pipe_is_one_line() -> None:
    result = CliRunner().invoke(app, ["estimate", "zzzz", "--profile", "dgx-h100"], env={"COLUMNS": "40"})
    assert result.stderr.count("\n") == 2


@pytest.mark.parametrize("width", [20, 40, 100])
def test_broken_lines_hold_the_same_words(width: int) -> None:
    text = "known: gpt2-large, qwen2.5-7b, a-name-that-is-longer-than-any-of-the-lines-here, x"
    lines = broken_between_words(text, width=width, indent=6).splitlines()
    assert " ".join(lines).split() == text.split()
    assert len(lines[0]) <= max(width - 6, len("known:"))


@pytest.mark.parametrize(
    "words", [["recommend", "--help"], *with_all([["profiles", "list", "--help"], ["help", "topo"]]), ["--help"]]
)
def test_help_is_drawn_on_a_terminal(words: list[str]) -> None:
    text = on_terminal(words, columns=100)
    assert "\x1b[" in text
    assert "?[" not in text.replace("[TOPIC", "")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert all(len(line) <= 100 for line in plain.splitlines())
