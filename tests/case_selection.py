"""Which cases of a test run: enough to see every pair of choices together, and with `--all` every one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

_Case = TypeVar("_Case")
_RUNS_ALL = "PARAPLAN_TESTS_RUN_ALL"  # which processes of ranks have too


def run_all(wanted: bool) -> None:
    """Say whether every case is to run, here and in the processes that are started."""
    os.environ[_RUNS_ALL] = str(int(wanted))


def _runs_all() -> bool:
    return os.environ.get(_RUNS_ALL) == "1"


def thinned(cases: Sequence[_Case], choices: Callable[[_Case], Sequence[Hashable]]) -> list[_Case]:
    """Return as many of `cases` as it takes to have every pair of choices that there is, or all of them.

    Faults lie in one choice or in how two of them meet (Kuhn, Wallace and Gallo 2004, "Software fault interactions and
    implications for software testing"). Greedy: always the case that brings most pairs.
    """
    if _runs_all():
        return list(cases)
    waiting = {index: set(_pairs(choices(case))) for index, case in enumerate(cases)}
    missing = set().union(*waiting.values())
    chosen = []
    while missing:
        best = max(waiting, key=lambda index: len(waiting[index] & missing))
        chosen.append(best)
        missing -= waiting.pop(best)
    return [cases[index] for index in sorted(chosen)]


def with_all(cases: Sequence[_Case]) -> list[_Case]:
    """Return `cases` with `--all`, else none: those of which a case that always runs would show the same fault."""
    return list(cases) if _runs_all() else []


def _pairs(choices: Sequence[Hashable]) -> Iterator[tuple[tuple[int, Hashable], tuple[int, Hashable]]]:
    return itertools.combinations(enumerate(choices), 2)
