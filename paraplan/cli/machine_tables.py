"""`paraplan recommend --profile a,b,c` and `--anywhere`: machines side by side."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paraplan.api.profiles import load_prices
from paraplan.api.recommendations import SearchRequest, answer, compare_machines
from paraplan.api.workloads import Workload
from paraplan.cli.inputs import write_beside_and_rename
from paraplan.errors import NoPlanFitsError
from paraplan.report.machines_page import machine_rows, machines_page, machines_title
from paraplan.units import format_days

if TYPE_CHECKING:
    from paraplan.search.machine_comparison import MachineComparison, MachineOffer


_CLOUDS = {"AWS": "aws", "Azure": "azure", "Google Cloud": "gcp", "Lambda": "lambda", "RunPod": "runpod"}
"""SkyPilot's name of each provider (`sky jobs launch --infra`)."""


@dataclass(frozen=True)
class Anywhere:
    """Whether the training has to end in so many days, the folder that gets the plans, and how many are shown."""

    days: float | None
    folder: Path | None
    most: int


def compare(
    workloads: Sequence[Workload],
    request: SearchRequest,
    *,
    prices: Path | None,
    is_spot: bool,
    html: Path | None,
    as_json: bool,
    choice: Anywhere | None = None,
) -> None:
    """Compare the machines of some workloads and print the table. Raises `NoPlanFitsError` where no plan fits any.

    With a choice the cheapest size of each, in time, and how each is submitted.
    """
    asked = request if choice is None else replace(request, days=None)
    found = compare_machines(workloads, asked, prices=load_prices(prices), is_spot=is_spot)
    if choice is not None:
        found = found.cheapest_in_time(days=choice.days, most=choice.most)
        if choice.folder is not None:
            _write_plans(found, workloads, asked, choice.folder)
    if html is not None:
        write_beside_and_rename(html, machines_page(found, workloads[0]))
        typer.echo(f"report: {html}", err=True)
    if as_json:
        typer.echo(json.dumps(found.model_dump(mode="json"), indent=2))
    else:
        _print(found, workloads[0], choice)
    if not any(offer.fits for offer in found.machines):
        raise NoPlanFitsError(
            f"no plan fits {workloads[0].model.name} on any of these machines",
            hint="name one of them to see what would help",
        )


def _print(found: MachineComparison, workload: Workload, choice: Anywhere | None) -> None:
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
    if choice is not None:
        fastest = min(found.machines, key=lambda offer: offer.seconds or 0.0).machine
        in_time = "" if choice.days is None else f" of those that end in {format_days(choice.days)}"
        console.print(f"cheapest{in_time}: {found.machines[0].machine}; fastest: {fastest}", highlight=False)
        for offer in found.machines:
            typer.echo(submit_line(offer, choice.folder or Path()))
        if choice.folder is None:
            console.print("-o FOLDER writes these plans", style="dim")
    for note in notes:
        console.print(note, style="dim")


def submit_line(offer: MachineOffer, folder: Path) -> str:
    """Return the command that submits a script with the plan of a machine, to SkyPilot where it knows the provider."""
    words = ["paraplan", "submit", "--to"]
    rented = offer.rented
    cloud = _CLOUDS.get(rented.provider) if rented is not None else None
    words += ["slurm" if cloud is None else "sky", "--plan", str(folder / _plan_name(offer))]
    if rented is not None and cloud is not None:
        region = f"/{rented.offer.region}" if rented.offer.region else ""
        words += ["--option", f"infra={cloud}{region}"]
        if rented.offer.machine is not None:
            words += ["--option", f"instance-type={rented.offer.instance}"]
        words += ["--option", "use-spot="] if rented.is_spot else []
    return shlex.join([*words, "train.py"])


def _plan_name(offer: MachineOffer) -> str:
    return f"{offer.num_nodes}x-{offer.profile}.json"


def _write_plans(found: MachineComparison, workloads: Sequence[Workload], request: SearchRequest, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    by_machine = {(one.cluster.name, one.cluster.num_nodes): one for one in workloads}
    for offer in found.machines:
        plan = answer(by_machine[offer.profile, offer.num_nodes], replace(request, num_candidates=1)).plan_file()
        write_beside_and_rename(folder / _plan_name(offer), plan.to_json() + "\n")
