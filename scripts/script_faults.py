"""Check scripts with faults that were reported in public, and show which are found and named.

    python scripts/script_faults.py [--only WORDS ...] [--write]

Each is a few lines of a script in tests/script_check/faults, on gloo ranks that are forked with torch imported; the
same script without its fault is checked too. `--write` puts the table into the page on checking.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

from marked import between

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "paraplan" / "docs" / "checking.md"
START, END = "<!-- faults -->\n", "<!-- /faults -->"


def main() -> None:
    """Check them, print the table and its count, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of faults")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "script_check")]
    tests: Any = importlib.import_module("test_public_faults")
    ranks = importlib.import_module("rank_harness").RankHarness()
    rows, num_found, num_named, num_alarms = [], 0, 0, 0
    for fault in tests.FAULTS.values():
        if given.only and not any(word in fault.name for word in given.only):
            continue
        began = time.monotonic()
        report = tests.checked(ranks, fault.path, fault.name, num_ranks=fault.num_ranks)
        seconds = time.monotonic() - began
        is_named = tests.is_named(fault, report)
        is_found = not report.is_equal or is_named
        mended = tests.checked(ranks, fault.path, fault.name, "mended", num_ranks=fault.num_ranks)
        found = "a note" if report.is_equal and is_named else "yes" if is_found else "no"
        thread = "#".join(fault.thread.replace("/issues/", "/pull/").split("/pull/"))
        rows.append(
            f"| {fault.what} | {fault.framework} | [{thread}]({fault.source}) | {found} | "
            f"{_told(report) if is_named else 'no'} | {seconds:.0f} |"
        )
        print(rows[-1], "ALARM without it" if not mended.is_equal else "", flush=True)
        num_found += is_found
        num_named += is_named
        num_alarms += not mended.is_equal
    head = (
        f"{len(rows)} faults: {num_found} found, {num_named} named rightly; without their faults {num_alarms} "
        "of the scripts give an alarm.\n\n| Fault | Framework | Reported | Found | Named | Seconds |\n"
        "|---|---|---|---|---|---|\n"
    )
    print(head)
    if given.write:
        table = head + "\n".join(rows) + "\n"
        PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), START, END, table), encoding="utf-8")


def _told(report: Any) -> str:
    """Return in a few words what was told."""
    found = report.difference
    if found is None:
        return "yes"
    where = f"`{found.name}`" if found.name else found.quantity
    factor = f" x {found.factor:.3g}" if found.factor and abs(found.factor - 1) > 1e-3 else ""
    return f"{found.kind}{factor}: {where}, step {found.step}"


if __name__ == "__main__":
    main()
