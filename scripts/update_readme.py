"""Run the commands that the README shows and put their output below them, up to the line that says `...`.

    python scripts/update_readme.py

A block starts with `    $ paraplan ...`; if it ends with `    ...`, only its lines before that are kept.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
PROMPT = "    $ paraplan "
WIDTH = 120


def output(command: str) -> list[str]:
    """Return the lines that `paraplan command` prints, without trailing blanks; end this script if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        finished = subprocess.run(
            [sys.executable, "-m", "paraplan", *shlex.split(command)],
            cwd=folder,
            env=os.environ | {"COLUMNS": str(WIDTH), "NO_COLOR": "1"},
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


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
