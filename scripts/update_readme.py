"""Run the commands that the README shows and put their output below them, up to the line that says `...`; draw one.

`scripts/pages.py` writes them. The picture is a terminal with the output of its first command, as rich draws it.
A block starts with `    $ paraplan ...`; if it ends with `    ...`, only its lines before that are kept.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from marked import TextOf

README = Path(__file__).parent.parent / "README.md"
PROMPT = "    $ paraplan "
WIDTH = 120
PICTURE = README.parent / "paraplan" / "docs" / "recommend.svg"
PICTURE_WIDTH, PICTURE_LINES = 100, 22
DRAWN = "    paraplan recommend "
"""How the line begins whose output is the picture."""
SEARCHED = re.compile(r"(?<=plans in )[\d.]+(?= s\b)")
DRAWN_SECONDS = re.compile(r"(?<=plans&#160;in&#160;)[\d.]+(?=&#160;s\b)")
"""The seconds of a search, which are those of a machine and a moment."""


def output(command: str, *, width: int = WIDTH, **environment: str) -> list[str]:
    """Return the lines that `paraplan command` prints, without trailing blanks; end this script if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        finished = subprocess.run(
            [sys.executable, "-m", "paraplan", *shlex.split(command)],
            cwd=folder,
            env=os.environ | {"COLUMNS": str(width)} | (environment or {"NO_COLOR": "1"}),
            capture_output=True,
            text=True,
            check=False,
        )
    if finished.returncode:
        sys.exit(f"paraplan {command} ended with {finished.returncode}: {finished.stderr}")
    return [line.rstrip() for line in finished.stdout.splitlines()]


def updated(text: str) -> str:
    """Return the README's text with the output of every shown command renewed, each as many lines as it had."""
    lines = text.splitlines()
    result: list[str] = []
    number = 0
    while number < len(lines):
        result.append(lines[number])
        number += 1
        if not result[-1].startswith(PROMPT):
            continue
        end = number
        while end < len(lines) and (lines[end].startswith("    ") or not lines[end]):
            end += 1
        while not lines[end - 1]:
            end -= 1
        shown = lines[number:end]
        new = output(result[-1].removeprefix(PROMPT))
        if shown[-1].strip() == "...":
            new = [*new[: len(shown) - 1], "..."]
        result += [f"    {line}".rstrip() for line in new]
        number = end
    return "\n".join(result) + "\n"


def picture(command: str, searched: str | None) -> str:
    """Return an SVG of a terminal in which a command was run; a search took so many seconds where that is known."""
    from rich.console import Console
    from rich.text import Text

    colored = output(command, width=PICTURE_WIDTH, FORCE_COLOR="1", COLORTERM="truecolor")
    console = Console(record=True, width=PICTURE_WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ paraplan {command}", style="bold"))
    for line in colored[:PICTURE_LINES]:
        console.print(Text.from_ansi(SEARCHED.sub(searched or r"\g<0>", line)))
    return console.export_svg(title="paraplan", unique_id="paraplan")


def pages(text_of: TextOf) -> dict[Path, str]:
    """Return the README with the output of today, and the picture."""
    text = updated(text_of(README))
    first = next(line for line in text.splitlines() if line.startswith(DRAWN))
    drawn = DRAWN_SECONDS.search(text_of(PICTURE))
    searched = None if drawn is None else drawn.group(0)
    return {README: text, PICTURE: picture(first.removeprefix("    paraplan "), searched)}
