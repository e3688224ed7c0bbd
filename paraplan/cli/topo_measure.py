"""`paraplan topo --measure`: what the links of this machine reach, beside what their data sheets say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paraplan.api.measurement import measure_links
from paraplan.cli.terminal import make_console
from paraplan.units import format_bandwidth, format_bytes, format_seconds

if TYPE_CHECKING:
    from paraplan.hardware.measurement.links import LinkReport, MeasuredLink, RankEvent
    from paraplan.hardware.survey import MachineSurvey

_COLUMNS = {"collective": 14, "latency": 7, "busbw": 10, "at": 8, "reached": 10, "expected": 10}


def survey_measured(
    read: Callable[[], MachineSurvey], *, num_ranks: int | None, max_seconds: float
) -> tuple[MachineSurvey, LinkReport]:
    """Return the machine that `read` finds, with what was measured on its links in its profile.

    With `num_ranks`, and where there is no GPU, so many CPU processes of this machine are measured instead.
    """
    progress = measuring_progress()
    with progress:
        return measure_links(
            read,
            num_ranks=num_ranks,
            max_seconds=max_seconds,
            watch=lambda request: advance(progress, request.num_timings),
        )


def print_links(report: LinkReport, console: Console | None = None) -> None:
    """Print latency and bandwidth of each group and collective, measured and expected."""
    console = console or make_console()
    console.print(f"Links, {report.source}", soft_wrap=True)
    for group in dict.fromkeys(link.group for link in report.links):
        links = [link for link in report.links if link.group == group]
        console.print()
        console.print(_group_words(links[0]))
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, width in _COLUMNS.items():
            table.add_column(name, no_wrap=True, min_width=width, justify="right" if table.columns else "left")
        for link in links:
            table.add_row(*_row(link))
        console.print(table)
    console.print()
    console.print(
        "busbw: the bandwidth on the bus as nccl-tests defines it, fitted; at: the largest message, and what it "
        "reached; expected: of that message, by the data sheet and published measurements",
        style="dim",
    )
    for note in report.notes:
        console.print(f"Left out: {note}", soft_wrap=True)


def _group_words(link: MeasuredLink) -> str:
    if link.expected is None:
        return link.group.title
    payload = format_bandwidth(link.expected.payload_bytes_per_s)
    return f"{link.group.title}: {link.expected.kind}, {payload} per GPU and direction by the data sheet"


def _row(link: MeasuredLink) -> list[str]:
    largest = link.times[-1]
    share = link.share_of_expected
    return [
        str(link.collective),
        format_seconds(link.fit.latency_s),
        format_bandwidth(link.fit.bus_bandwidth_bytes_per_s),
        format_bytes(largest.num_bytes),
        format_bandwidth(largest.bus_bandwidth_bytes_per_s),
        "?" if share is None else format_bandwidth(largest.bus_bandwidth_bytes_per_s / share),
    ]


def measuring_progress() -> Progress:
    """Return the bar of a measurement: on a terminal's stderr, nothing in a pipe."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=make_console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


def advance(progress: Progress, num_timings: int) -> Callable[[RankEvent], None]:
    """Return what moves a bar of `num_timings` on with each report of the ranks that measure links."""
    task = progress.add_task("starting ranks", total=num_timings)

    def step(event: RankEvent) -> None:
        progress.update(task, advance=1, description=event.collective)

    return step
