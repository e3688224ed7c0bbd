"""What is predicted of every eighth measured run: as long as it is as it was, so are the tables of all runs.

`scripts/pages.py` writes `profiles/some_runs.json` beside the tables; its `--check` predicts these runs alone.
"""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

from marked import TextOf

from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.api.validation import validate

ROOT = Path(__file__).parent.parent
FILE = ROOT / "profiles" / "some_runs.json"
EVERY = 8
DIGITS = 9  # of a sum of logarithms: another processor's rounding moves the twelfth


def pages(_: TextOf) -> dict[Path, str]:
    """Return the file with the sums of today."""
    return {FILE: json.dumps(sums(), indent=2) + "\n"}


def sums() -> dict[str, dict[str, float]]:
    """Return for each table of runs the sums of the logarithms of what is predicted of every eighth one."""
    tables = sorted((ROOT / "profiles" / "runs").rglob("*.csv"))
    return {str(path.relative_to(ROOT)): _sums(some_rows(path.read_text()), path.name) for path in tables}


def some_rows(table: str) -> str:
    """Return a table with every eighth of its rows, from the first."""
    head, *rows = csv.reader(io.StringIO(table, newline=""))
    chosen = io.StringIO()
    csv.writer(chosen).writerows([head, *rows[::EVERY]])
    return chosen.getvalue()


def _sums(table: str, name: str) -> dict[str, float]:
    rows = [row for _, row in validate({name: table}, everything=True).rows]
    values: dict[str, list[float | None]] = {
        "step time": [row.predicted_step_time_s for row in rows],
        "peak memory": [row.predicted_peak_memory_bytes for row in rows],
        "ends": [end for row in rows for end in _ends(row)],
    }
    return {what: round(sum(math.log(one) for one in each if one), DIGITS) for what, each in values.items()} | {
        "rows": len(rows),
        "skipped": sum(row.skipped is not None for row in rows),
    }


def _ends(row: RunPrediction) -> tuple[float | None, ...]:
    """Return the ends of a row's ranges, and its risk of running out of memory."""
    times = row.predicted_step_time_low_s, row.predicted_step_time_high_s
    return (*times, row.predicted_peak_memory_low_bytes, row.out_of_memory_risk)
