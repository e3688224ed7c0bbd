"""What `paraplan recommend` and `paraplan estimate` write: the report that people look at, and the other files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paraplan.cli.inputs import require_folder, write_beside_and_rename
from paraplan.cli.step_trace import write_trace
from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.workload import Workload
from paraplan.search.nothing_fits import NothingFitsError
from paraplan.search.recommendation import Recommendation, SearchRequest, recommendation

HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a report with charts, one file that needs no network."),
]

MANY_KINDS = 40
"""So many choices of axes and ZeRO stage are ranked for a report."""


def require_files(html: Path | None, *others: Path | None) -> None:
    """Raise `UsageError`, before long work, where a file cannot be written or the charting library is missing."""
    require_folder(html, *others)
    if html is not None:
        from paraplan.report.chart_svg import ChartRenderer

        ChartRenderer()


def recommended(workload: Workload, question: SearchRequest, path: Path | None) -> Recommendation:
    """Return the answer to a question; where a report was asked for and nothing fits, write one that says why."""
    try:
        return recommendation(workload, question)
    except NothingFitsError as error:
        if path is not None:
            from paraplan.report.recommendation_page import nothing_fits_page
            from paraplan.search.facts import tree_facts
            from paraplan.search.tree import decide

            with _drawing():
                text = nothing_fits_page(workload, error, decide(tree_facts(workload)).decisions)
            _write(path, text)
        raise


def write_files(
    answer: Recommendation, question: SearchRequest, *, plan_path: Path | None, trace: Path | None, html: Path | None
) -> None:
    """Write what was asked for: the plan, the predicted step, the report.

    Raises `UsageError` for a path that cannot be written or a library that is not there.
    """
    if plan_path is not None:
        from paraplan.report.recommendation_json import plan_file

        write_beside_and_rename(plan_path, plan_file(answer).to_json() + "\n")
    if trace is not None:
        write_trace(answer.workload, answer.result.best, trace)
    if html is not None:
        _write_recommendation(answer, question, html, plan_path=plan_path)


def _write_recommendation(
    answer: Recommendation, question: SearchRequest, path: Path, *, plan_path: Path | None
) -> None:
    from paraplan.report.recommendation_json import commands
    from paraplan.report.recommendation_page import recommendation_page
    from paraplan.search.scaling import scaling

    with _drawing():
        sizes = scaling(
            answer.workload,
            price_per_gpu_hour=question.price_per_gpu_hour,
            runnable_only=question.framework is None,
            fixed=question.fixed,
        )
        text = recommendation_page(answer, sizes=sizes, commands=commands(answer, plan_path))
    _write(path, text)


def write_estimate(workload: Workload, estimate: PlanEstimate, path: Path) -> None:
    """Write the report of one plan. Raises `UsageError` for a path or a library that is not there."""
    from paraplan.report.estimate_page import estimate_page

    with _drawing():
        text = estimate_page(workload, estimate)
    _write(path, text)


def _write(path: Path, text: str) -> None:
    write_beside_and_rename(path, text)
    typer.echo(f"report: {path}", err=True)


@contextmanager
def _drawing() -> Iterator[None]:
    """Say on a terminal what takes its time."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status("drawing the report"):
        yield
