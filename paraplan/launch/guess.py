"""The ranks per node that a command line will probably lead to, read before torch and its parser are imported."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from paraplan.errors import PlanError, UsageError
from paraplan.launch.request import planned_layout, read_plan_file


class _QuietParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def guess_ranks_per_node(arguments: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Return the probable number of ranks per node, None where the words of the command line do not say.

    torch's libraries fix their number of threads when they are imported, and that number follows from this one. A wrong
    guess, such as an option of the script taken for one of the launcher, is put right in each rank for torch itself;
    only NumPy's own matmuls then run with the guessed number.
    """
    parser = _QuietParser(add_help=False)
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default=environment.get("PET_NPROC_PER_NODE"))
    parser.add_argument("--plan")
    try:
        known, _ = parser.parse_known_args(list(arguments))
        if known.nproc_per_node is not None:
            return int(known.nproc_per_node) if known.nproc_per_node.isdigit() else None
        return planned_layout(read_plan_file(Path(known.plan)))[1] if known.plan else None
    except (UsageError, PlanError):
        return None  # the parser proper reports it
