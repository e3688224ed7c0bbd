"""The measured runs that stand beside the profiles, and what the documentation says of them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

import paraplan
from paraplan.accuracy.measured_runs import MeasuredRun, read_runs
from paraplan.api.validation import validate
from paraplan.resources import profiles_folder

PAGE = Path(__file__).parent / "sources.md"
RUNS = profiles_folder() / "runs" / "later_sources.csv"
FINE_TUNING = profiles_folder() / "runs" / "later_fine_tuning.csv"
NEWEST = profiles_folder() / "runs" / "newest_sources.csv"
BLIND = profiles_folder() / "runs" / "blind_sources.csv"
SECOND = profiles_folder() / "runs" / "second_blind_sources.csv"
THIRD = profiles_folder() / "runs" / "third_blind_sources.csv"
FOURTH = profiles_folder() / "runs" / "fourth_blind_sources.csv"
FIFTH = profiles_folder() / "runs" / "fifth_blind_sources.csv"
SIXTH = profiles_folder() / "runs" / "sixth_blind_sources.csv"
SEVENTH = profiles_folder() / "runs" / "seventh_blind_sources.csv"
FIRST = profiles_folder() / "first_predictions.csv"
LOCATOR = re.compile(r"[\w.-]+/[\w.-]+(@[0-9a-f]{7})?:\S+\.(md|rst|log|out|json|yaml)$|https://\S+$")


def test_errors_of_later_fine_tuning_are_those_that_the_page_tells() -> None:
    page = (Path(paraplan.__file__).parent / "docs" / "fine-tuning.md").read_text()
    section = page.partition("| later source |")[2]
    scored = validate({FINE_TUNING.name: FINE_TUNING.read_text()}, everything=True).scored.to_dict()
    for column, quantity in ((r"([\d.]+) % \|.*", "memory"), (r"[^|]*\|[^|]*\| ([\d.]+) % \|.*", "step_time")):
        told = re.findall(rf"^\| [^*|]+ \| \d+ \| {column}$", section, re.MULTILINE)
        sources = scored[quantity]["by_source"].values()
        assert sorted(map(float, told)) == sorted(round(source["mape"] * 100, 1) for source in sources)


@pytest.mark.parametrize(
    ("title", "runs"),
    [
        ("Nine sources more", FOURTH),
        ("Six sources of a review", FIFTH),
        ("Five sources more", SIXTH),
        ("Six sources more", SEVENTH),
    ],
)
def test_first_errors_are_those_that_the_page_tells(title: str, runs: Path) -> None:
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    with FIRST.open(newline="") as lines:
        first = {row["id"]: float(row["step_time_s"] or 0) for row in csv.DictReader(lines)}
    errors = dict[str, list[float]]()
    for run in read_runs(runs.read_text(), source=runs.name):
        if isinstance(run, MeasuredRun) and run.measured_step_time_s and first.get(run.id):
            errors.setdefault(run.source, []).append(abs(first[run.id] / run.measured_step_time_s - 1))
    told = re.findall(r"^\| (\S+) \| (\d+) \| ([\d.]+) % \|", section, re.MULTILINE)
    found = {source: (len(each), sum(each) / len(each)) for source, each in errors.items()}
    assert {source: int(rows) for source, rows, _ in told} == {source: rows for source, (rows, _) in found.items()}
    for source, _, error in told:
        assert float(error) == pytest.approx(100 * found[source][1], abs=0.1)


@pytest.mark.parametrize("runs", [RUNS, FINE_TUNING, NEWEST, BLIND, SECOND, THIRD])
def test_every_run_says_where_it_was_published(runs: Path) -> None:
    with runs.open(newline="") as lines:
        for row in csv.DictReader(lines):
            assert LOCATOR.match(row["source_locator"]), row["id"]
