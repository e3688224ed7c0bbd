"""Renew every figure that a page shows: tables of accuracy, ranges, recommended plans, outputs of commands.

    python scripts/pages.py [--check [--all]]

With --check nothing is written: exit status 1 says which files are not what this package gives, with the lines. The
tables of all runs are then made again only with --all, which takes minutes; else every eighth run is predicted.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import recommend_pairs
import shared_errors
import some_runs
import trust_table
import update_readme

ROOT = Path(__file__).parent.parent
MOST_LINES = 20


OF_ALL_RUNS: tuple[ModuleType, ...] = (trust_table, shared_errors)
OTHERS: tuple[ModuleType, ...] = (some_runs, recommend_pairs, update_readme)


def renewed(parts: Sequence[ModuleType], *, writes: bool) -> dict[Path, str]:
    """Return the files with figures that are not as this package makes them, of `parts`, which have `pages`.

    Those of ranges are written first: the commands whose outputs are shown read them.
    """
    texts, changed = dict[Path, str](), dict[Path, str]()

    def text_of(path: Path) -> str:
        return texts.get(path) or path.read_text()

    for part in parts:
        found = part.pages(text_of)
        texts |= found
        for path, text in found.items():
            if not path.exists() or path.read_text() != text:
                changed[path] = text
                if writes:
                    path.write_text(text)
    return changed


def main() -> int:
    """Write the files, or say which differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a file differs")
    parser.add_argument("--all", action="store_true", help="check the tables of all runs, too")
    arguments = parser.parse_args()
    parts = OTHERS if arguments.check and not arguments.all else (*OF_ALL_RUNS, *OTHERS)
    changed = renewed(parts, writes=not arguments.check)
    for path, text in changed.items():
        name = str(path.relative_to(ROOT))
        if not arguments.check:
            print(f"wrote {name}")
            continue
        print(f"{name} is not what python scripts/pages.py writes:")
        lines = difflib.unified_diff(path.read_text().splitlines(), text.splitlines(), "there", "now", lineterm="", n=0)
        print("\n".join(f"    {line}" for line in list(lines)[:MOST_LINES]))
    return int(arguments.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
