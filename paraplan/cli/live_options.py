"""Options that the commands about live runs share."""

from __future__ import annotations

from typing import Annotated

import typer

from paraplan.cli import completion
from paraplan.errors import UsageError

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run of paraplan ps: its id, its folder, or the process of its launcher; not needed for the only one.",
        autocompletion=completion.runs,
        show_default=False,
    ),
]

JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job of paraplan jobs: its name, or its scheduler's id.",
        autocompletion=completion.jobs,
        show_default=False,
    ),
]


def ranks_of(text: str | None) -> list[int] | None:
    """Return the ranks of `0,4-7`; None for `all` and for nothing. Raises `UsageError` for anything else."""
    if text is None or text == "all":
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > _MAX_LETTERS:
            raise UsageError(f"--ranks {text} is not a list of ranks", hint="use 0,4-7 or all")
        ranks |= set(range(int(first), int(last if dash else first) + 1))
    return sorted(ranks)


_MAX_LETTERS = 13  # of a range of ranks below a million
