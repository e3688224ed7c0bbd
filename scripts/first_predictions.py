"""Write the first predictions of runs beside those of other runs, once: later ones are no longer blind.

    python scripts/first_predictions.py

A table of a new source is written down and committed, then this is run, then its errors are looked at. What
`profiles/first_predictions.csv` has of a run stays as it is, whatever is predicted of it later: ranges of
predictions are made of these (`scripts/trust_table.py`).
"""

from __future__ import annotations

import csv
from pathlib import Path

from paraplan.api.validation import validate

ROOT = Path(__file__).parent.parent
FIRST = ROOT / "profiles" / "first_predictions.csv"


def main() -> None:
    """Append the predictions of the tables of `profiles/runs` that have none yet."""
    tables = {path.name: path.read_text() for path in sorted((ROOT / "profiles" / "runs").glob("*.csv"))}
    with FIRST.open(newline="") as file:
        known = {row["id"] for row in csv.DictReader(file)}
    new = {name: text for name, text in tables.items() if known.isdisjoint(ids_of(text))}
    rows = [row for _, row in validate(new, everything=True).rows if row.skipped is None]
    with FIRST.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for row in rows:
            writer.writerow((row.id, f"{row.predicted_step_time_s:.6g}", row.predicted_peak_memory_bytes))
    print(f"{len(rows)} runs added to {FIRST.relative_to(ROOT)}")


def ids_of(text: str) -> set[str]:
    """Return the names of a table's rows."""
    return {row["id"] for row in csv.DictReader(text.splitlines())}


if __name__ == "__main__":
    main()
