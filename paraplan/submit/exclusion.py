"""Hosts that a job is to leave out: by their names, or those that a run or a report has named as bad or slow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paraplan.errors import UsageError
from paraplan.launch.spec import RUNS_FOLDER
from paraplan.submit.handle import handles

_FILES = ("run.json", "health.json")
_OF_THE_MACHINE = ("compute", "swap", "pause", None)
"""Parts of a step in which a machine makes a rank slow; its data loader and what its script waits for are its own."""


def excluded_hosts(words: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts that words name: hosts, folders of runs, JSON of `paraplan doctor`, and submitted jobs.

    Raises `UsageError` for a file that is no report.
    """
    jobs = {handle.name: handle for handle in handles()}
    hosts: list[str] = []
    for word in (part.strip() for one in words for part in one.split(",")):
        if word in jobs:
            folders = sorted((jobs[word].work_folder / RUNS_FOLDER).glob("*"))
            hosts += [host for folder in folders for host in _named_in(folder)]
        elif Path(word).exists():
            hosts += _named_in(Path(word))
        elif word:
            hosts.append(word)
    return tuple(dict.fromkeys(hosts))


def _named_in(path: Path) -> Iterator[str]:
    """Yield the hosts that a report, or the reports in the folder of a run, have named."""
    for file in [path / name for name in _FILES if (path / name).exists()] if path.is_dir() else [path]:
        try:
            values: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            for finding in values.get("findings", ()):
                yield from map(str, finding["hosts"])
            for case in values.get("late", ()):
                is_over = case["over_at_step"] is not None
                if case["host"] and case["part"] in _OF_THE_MACHINE and not is_over:
                    yield str(case["host"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--exclude {file} is no report of a run or of paraplan doctor: {error}", hint="name hosts, or a run"
            ) from None
