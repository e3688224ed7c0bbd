"""`paraplan calibrate`: this machine's own kernels and links as a profile, or constants fitted to measured runs."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paraplan.api.calibrations import fit_to_runs
from paraplan.api.measurement import machine_content, measure_this_machine, save_machine
from paraplan.cli.calibrate_tables import print_calibration, print_fit
from paraplan.cli.inputs import write_beside_and_rename
from paraplan.cli.options import JsonOption
from paraplan.cli.terminal import make_console
from paraplan.cli.topo_measure import advance, measuring_progress, print_links
from paraplan.errors import UsageError

if TYPE_CHECKING:
    from paraplan.hardware.measurement.kernels import KernelEvent, KernelRequest
    from paraplan.hardware.measurement.links import LinkReport
    from paraplan.hardware.profiles import MachineProfile


class CalibratedPrecision(StrEnum):
    """Values of --precision."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the profile, or what was fitted, to this file."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=64, help="Measure N CPU processes (2 where there is no GPU) in place of the GPUs."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=1, max=3600, help="Time that measuring may take after its ranks started.")
    ] = 75.0,
    runs: Annotated[
        Path | None,
        typer.Option(metavar="RUNS.csv", help="Measure nothing: fit constants to these runs (see paraplan validate)."),
    ] = None,
    precision: Annotated[
        CalibratedPrecision | None,
        typer.Option(help="Measure this precision alone, which leaves it the time of the others."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine (matmuls, memory, attention, collectives), or fit to measured runs.

    Every GPU is measured at once, as training uses them. `--profile FILE` of the other commands takes what -o writes,
    and predicts with what was measured in place of data sheets.

    Example: paraplan calibrate -o machine.json
    """
    if output is not None and (output.is_dir() or not os.access(output.parent, os.W_OK)):
        raise UsageError(f"cannot write {output}", hint="choose a file in a folder that exists and is yours")
    if runs is not None:
        if ranks is not None:
            raise UsageError("--runs fits to runs, and --ranks measures", hint="give one of them")
        _fit_to_runs(runs, output, as_json=as_json)
        return
    name = output.stem if output else platform.node() or "this-machine"
    machine, links, events = _measure(ranks, seconds, name=name, precision=precision)
    if output is not None:  # before anything is printed, which a pipe may cut off
        save_machine(machine, output)
        typer.echo(f"saved: {output}; use it with --profile {output}", err=True)
    else:
        typer.echo("nothing was saved: give -o FILE, and --profile FILE predicts with it", err=True)
    if as_json:
        content: dict[str, Any] = {
            "machine": machine_content(machine),
            "timings": events,
            "links": links.model_dump(mode="json") if links else None,
        }
        typer.echo(json.dumps(content, indent=2))
        return
    print_calibration(machine)
    if links is not None:
        typer.echo("")
        print_links(links, make_console())


def _measure(
    num_ranks: int | None, seconds: float, *, name: str, precision: CalibratedPrecision | None
) -> tuple[MachineProfile, LinkReport | None, list[dict[str, Any]]]:
    with measuring_progress() as progress:

        def watch_kernels(request: KernelRequest) -> Callable[[KernelEvent], None]:
            task = progress.add_task("starting ranks", total=request.num_timings)

            def step(event: KernelEvent) -> None:
                case = request.cases[event.case]
                progress.update(task, advance=1, description=f"{case.kind} {case.precision}")

            return step

        return measure_this_machine(
            num_ranks,
            seconds,
            name=name,
            precision=precision.value if precision else None,
            watch_kernels=watch_kernels,
            watch_links=lambda request: advance(progress, request.num_timings),
        )


def _fit_to_runs(path: Path, output: Path | None, *, as_json: bool) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read {path}: {reason}", hint="give a CSV file as paraplan validate takes") from None
    fitted = fit_to_runs(text, source=str(path), title=f"{path.name}, {dt.date.today()}")
    if as_json:
        typer.echo(fitted.model_dump_json(indent=2))
    else:
        print_fit(fitted)
    if output is not None:
        write_beside_and_rename(output, fitted.model_dump_json(indent=2) + "\n")
        typer.echo(f"saved: {output}; use it with paraplan validate --calibration {output}", err=True)
