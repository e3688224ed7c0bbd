from __future__ import annotations

import importlib.resources
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner
from waiting import PATIENCE_S

from paraplan.cli.explain import TOPICS, find_topic, read_topic
from paraplan.cli.main import app
from paraplan.cli.timeline import rank_line, windows_of
from paraplan.cost.pipeline.simulation import PassSeconds, simulate_pipeline
from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.plan.ranks import RankGrid


def explained(*words: str) -> str:
    result = CliRunner().invoke(app, ["explain", *words])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_the_list_has_every_page_with_a_summary_of_a_line() -> None:
    folder = Path(str(importlib.resources.files("paraplan"))) / "docs"
    assert {path.stem for path in folder.glob("*.md")} == set(TOPICS)
    lines = explained().splitlines()
    assert len(set(lines)) == len(TOPICS) + 2
    for name, line in zip(TOPICS, lines, strict=False):
        assert line.startswith(f"{name} ")
        assert 40 < len(line) <= 120
        assert line.endswith(".")


@pytest.mark.parametrize("name", TOPICS)
def test_a_page_begins_with_its_summary_and_one_title(name: str) -> None:
    page = read_topic(name)
    assert page.summary.endswith(".")
    assert "<!--" not in page.summary
    assert page.text.startswith("# ")
    assert re.findall("^# ", page.text, flags=re.MULTILINE) == ["# "] * 1 or "```" in page.text


def test_without_a_terminal_a_page_is_its_markdown() -> None:
    assert explained("plans-and-ranks").startswith("# Plans and ranks\n")
    assert json.loads(explained("faq", "--json"))["name"] == "faq"
    assert [page["name"] for page in json.loads(explained("--json"))] == list(TOPICS)


def test_a_word_gives_the_sections_that_explain_it_or_the_places_that_use_it() -> None:
    assert explained("mfu").startswith("## MFU (glossary)\nModel FLOPs utilization")
    assert explained("Bubble").startswith("## Bubble (glossary)\n")
    assert all(line.startswith("- paraplan explain ") for line in explained("nccl-tests").splitlines())


def test_a_part_of_a_name_is_enough_where_it_is_one_page() -> None:
    assert find_topic("deepspeed").name == "moving-from-deepspeed"
    assert find_topic("Cost_Model").name == "cost-model"
    assert find_topic("plans").name == "plans-and-ranks"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("moving", "did you mean moving-from-torchrun or moving-from-accelerate"),
        ("memroy", "did you mean memory"),
        ("zzz", "known: "),
    ],
)
def test_an_unknown_topic_names_near_ones(name: str, hint: str) -> None:
    result = CliRunner().invoke(app, ["explain", name])
    assert result.exit_code == 2
    assert f"there is no page {name!r}" in result.stderr
    assert hint in result.stderr


def test_a_terminal_gets_formatted_text() -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-m", "paraplan", "explain", "faq"], stdout=theirs, env=environment)
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 65_536)
        except OSError:  # Linux says so where a terminal's other end is closed
            break
        if not part:
            break
        text += part
    os.close(ours)
    assert process.wait(timeout=PATIENCE_S) == 0
    assert b"\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text.decode())
    assert "Questions and answers" in plain
    assert "## " not in plain


def test_the_groups_that_are_drawn_are_those_of_the_grid() -> None:
    text = read_topic("plans-and-ranks").text
    drawn = re.findall(r"^ +(tp|dp|pp) groups +((?:\d \d(?: \| )?)+)", text, flags=re.MULTILINE)
    orders: tuple[tuple[Axis, ...], ...] = (("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp"))
    expected = []
    for order in orders:
        grid = RankGrid.of_plan(ParallelPlan(dp=2, tp=2, pp=2, pipeline_schedule="1f1b", rank_order=order))
        axes: tuple[Axis, ...] = ("tp", "dp", "pp") if order[0] == "pp" else ("tp", "pp", "dp")
        expected += [(axis, " | ".join(" ".join(map(str, group)) for group in grid.groups(axis))) for axis in axes]
    assert [(axis, groups.strip()) for axis, groups in drawn] == expected


def test_the_pipeline_that_is_drawn_is_that_of_the_simulation() -> None:
    found = simulate_pipeline(
        "1f1b", PassSeconds(*(np.full(4, seconds) for seconds in (1.0, 2.0, 1.0))), num_ranks=4, num_microbatches=8
    )
    text = read_topic("plans-and-ranks").text
    for rank, operations in enumerate(found.ranks):
        assert f"    rank  {rank}  {rank_line(operations, windows_of(found, columns=60)).plain}\n" in text


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("windows", "WSL 2"),
        ("wsl", "--link no-p2p"),
        ("mac", "Apple's GPUs are not planned for"),
        ("hang", "All ranks wait in a collective"),
        ("spot", "--mtbf"),
        ("price", "profiles/prices"),
        ("budget", "2203.15556"),
        ("mixed", "slowest counts"),
        ("p2p", "--link no-p2p"),
    ],
)
def test_words_that_people_ask_for_find_their_section(word: str, said: str) -> None:
    assert said in find_topic(word).text
