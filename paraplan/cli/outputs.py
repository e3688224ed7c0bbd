"""The files that `paraplan recommend` and `paraplan estimate` write: report, trace and plan."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paraplan.cli.inputs import require_folder, write_beside_and_rename
from paraplan.progress import doing

if TYPE_CHECKING:  # the search, which an estimate does without
    from paraplan.api.estimates import Estimate
    from paraplan.api.recommendations import Recommendation
    from paraplan.cost.workload import Workload
    from paraplan.search.recommendation import SearchRequest

HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a report with charts, one file that needs no network."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write the predicted step as a trace for Perfetto and paraplan compare (.json, .json.gz).",
    ),
]

MANY_KINDS = 40
"""So many choices of axes and ZeRO stage are ranked for a report."""


def require_files(html: Path | None, *others: Path | None) -> None:
    """Raise `UsageError`, before long work, where a file cannot be written."""
    require_folder(html, *others)


def recommended(workload: Workload, question: SearchRequest, path: Path | None) -> Recommendation:
    """Return the answer to a question; where a report was asked for and nothing fits, write one that says why."""
    from paraplan.api.recommendations import NothingFitsError, answer, nothing_fits_html

    try:
        return answer(workload, question)
    except NothingFitsError as error:
        if path is not None:
            with doing("drawing the report"):
                text = nothing_fits_html(workload, error)
            _write(path, text)
        raise


def write_files(answer: Recommendation, *, plan_path: Path | None, trace: Path | None, html: Path | None) -> None:
    """Write what was asked for: the plan, the predicted step, the report.

    Raises `UsageError` for a path that cannot be written or a library that is not there.
    """
    if plan_path is not None:
        write_beside_and_rename(plan_path, answer.plan_file().to_json() + "\n")
    if trace is not None:
        write_trace(answer.best, trace)
    if html is not None:
        with doing("drawing the report"):
            text = answer.to_html(plan_path=plan_path)
        _write(html, text)


def write_estimate_files(estimate: Estimate, *, trace: Path | None, html: Path | None) -> None:
    """Write what was asked for of one plan: the predicted step, the report. Raises as `write_files` does."""
    if trace is not None:
        write_trace(estimate, trace)
    if html is not None:
        with doing("drawing the report"):
            text = estimate.to_html()
        _write(html, text)


def write_trace(estimate: Estimate, path: Path) -> None:
    """Write the predicted step. Raises `UsageError` for a path that cannot be written."""
    text = json.dumps(estimate.to_trace()).encode() + b"\n"
    write_beside_and_rename(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    typer.echo(f"trace: {path}; open it in https://ui.perfetto.dev, or compare it with a run's", err=True)


def _write(path: Path, text: str) -> None:
    write_beside_and_rename(path, text)
    typer.echo(f"report: {path}", err=True)
