"""Write, as Markdown, how far predictions are from measured runs: the tables of the README's section on trust.

    python scripts/trust_table.py runs.csv [more.csv ...]

Step times come from rows that `paraplan validate` scores (complete, nothing unusual, 16 or 32 bits); memory from every
row that states a peak, since unusual features seldom change it, and those that do are told apart by source.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- trust -->\n", "<!-- /trust -->"


def validate(files: list[str], *options: str) -> dict[str, Any]:
    """Return the summary of `paraplan validate --json`."""
    command = [sys.executable, "-m", "paraplan", "validate", *files, "--json", *options]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(finished.stderr)
    summary: dict[str, Any] = json.loads(finished.stdout)["summary"]
    return summary


def table(title: str, summary: dict[str, Any]) -> str:
    """Return one row a source, then all rows and the mean of the sources."""
    rows = [f"| {source} | {cells(row)} |" for source, row in summary["by_source"].items()]
    return "\n".join(
        [
            f"| {title}: source | rows | mean error | median | worst | bias |",
            "| --- | --: | --: | --: | --: | --: |",
            *rows,
            f"| **all rows** | {cells(summary)} |",
            f"| **mean of the sources** | {len(rows)} | {summary['mean_of_sources']:.1%} | | | |\n",
        ]
    )


def cells(row: dict[str, Any]) -> str:
    """Return the figures of one row as Markdown cells."""
    shares = " | ".join(f"{row[name]:.1%}" for name in ("mape", "median_ape", "max_ape"))
    return f"{row['rows']} | {shares} | {row['bias']:+.1%}"


def main() -> None:
    """Put the table of step times and that of memory between the marks of the README."""
    files = sys.argv[1:]
    if not files:
        sys.exit(__doc__)
    tables = [
        table("step time", validate(files)["step_time"]),
        table("peak memory", validate(files, "--all")["memory"]),
    ]
    before, _, rest = README.read_text().partition(START)
    _, _, after = rest.partition(END)
    README.write_text(before + START + "\n" + "\n".join(tables) + "\n" + END + after)


if __name__ == "__main__":
    main()
