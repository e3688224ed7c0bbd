"""`paraplan recommend --profile a,b,c`: machines side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paraplan.api.profiles import load_prices
from paraplan.api.recommendations import SearchRequest, compare_machines
from paraplan.api.workloads import Workload
from paraplan.cli.inputs import write_beside_and_rename
from paraplan.errors import NoPlanFitsError
from paraplan.report.machines_page import machine_rows, machines_page, machines_title

if TYPE_CHECKING:
    from paraplan.search.machine_comparison import MachineComparison


def compare(
    workloads: Sequence[Workload],
    request: SearchRequest,
    *,
    prices: Path | None,
    is_spot: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Compare the machines of some workloads and print the table. Raises `NoPlanFitsError` where no plan fits any."""
    found = compare_machines(workloads, request, prices=load_prices(prices), is_spot=is_spot)
    if html is not None:
        write_beside_and_rename(html, machines_page(found, workloads[0]))
        typer.echo(f"report: {html}", err=True)
    if as_json:
        typer.echo(json.dumps(found.model_dump(mode="json"), indent=2))
    else:
        _print(found, workloads[0])
    if not any(offer.fits for offer in found.machines):
        raise NoPlanFitsError(
            f"no plan fits {workloads[0].model.name} on any of these machines",
            hint="name one of them to see what would help",
        )


def _print(found: MachineComparison, workload: Workload) -> None:
    """Print each machine with its plan on a line, and its figures in columns under it: they fit 80 columns."""
    from rich.padding import Padding
    from rich.text import Text

    from paraplan.cli.estimate_tables import print_lines
    from paraplan.cli.terminal import make_console
    from paraplan.report.short_text import workload_lines

    console = make_console()
    print_lines(console, list(workload_lines(workload)[:2]))
    console.print(f"\n[bold]Machines[/bold], {machines_title(found)}", markup=True)
    columns, rows, notes = machine_rows(found, with_links=False)
    titles = [column.title for column in columns[2:]]
    widths = [max(map(len, cells)) for cells in zip(titles, *(row.cells[2:] for row in rows), strict=True)]

    def figures(cells: Sequence[str], style: str) -> Padding:
        return Padding(Text("  ".join(map(str.rjust, cells, widths)), style), (0, 0, 0, 2))

    console.print(figures(titles, "bold"))
    for row in rows:
        machine, plan, *cells = row.cells
        style = "bold green" if row.is_chosen else ""
        console.print(Text.assemble((machine, style), (f": {plan}", style or "dim")))
        if any(cells):
            console.print(figures(cells, style))
    console.print()
    for note in notes:
        console.print(note, style="dim")
