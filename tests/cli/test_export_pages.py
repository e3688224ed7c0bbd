"""The pages about other tools and continuous integration: every command that they show is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paraplan.interop.export import TARGETS

PAGES = Path(__file__).parent.parent.parent / "paraplan" / "docs"
NAMES = (
    "export",
    "ci",
    "moving-from-torchrun",
    "moving-from-accelerate",
    "moving-from-deepspeed",
    "moving-from-megatron-lm",
)
SHOWN = re.compile(r"^ {4}\$ (paraplan .+)$", flags=re.MULTILINE)
FILES = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_page_end_well_in_their_order(name: str, tmp_path: Path) -> None:
    page = (PAGES / f"{name}.md").read_text()
    (tmp_path / "train.py").touch()
    for path, content in FILES.findall(page):
        (tmp_path / path).write_text(content)
    commands = SHOWN.findall(page)
    assert commands
    environment = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    for command in commands:
        words = [sys.executable, "-m", *shlex.split(command)]
        finished = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment, timeout=240
        )
        assert finished.returncode == 0, f"{command}\n{finished.stdout}\n{finished.stderr}"


def test_the_page_about_exports_names_every_target() -> None:
    page = (PAGES / "export.md").read_text()
    assert [name for name in TARGETS if f"`{name}`" not in page] == []
