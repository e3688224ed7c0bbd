"""`paraplan calibrate`: this machine's own kernels and links as a profile, or constants fitted to measured runs."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from paraplan.cli.calibrate_tables import print_calibration, print_fit
from paraplan.cli.inputs import write_beside_and_rename
from paraplan.cli.options import JsonOption
from paraplan.cli.terminal import make_console
from paraplan.cli.topo_measure import advance, measuring_progress, print_links, survey_to_measure
from paraplan.errors import UsageError
from paraplan.hardware.calibrated_machine import calibrated_machine, precisions_of
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.kernel_measurement import KernelEvent, KernelRequest, kernel_cases
from paraplan.hardware.link_measurement import LinkReport
from paraplan.hardware.profile_files import machine_content, save_machine
from paraplan.hardware.profiles import MachineProfile
from paraplan.hardware.survey import MachineSurvey, survey_node
from paraplan.launch.measuring import measure_kernels, measure_machine
from paraplan.launch.ranks.cores import threads_per_rank, usable_cores

_LINKS_SHARE = 1 / 3

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
        float, typer.Option(metavar="S", min=5, max=3600, help="Time that measuring may take after its ranks started.")
    ] = 75.0,
    runs: Annotated[
        Path | None,
        typer.Option(metavar="RUNS.csv", help="Measure nothing: fit constants to these runs (see paraplan validate)."),
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
    machine, links, events = _measure(ranks, seconds, name=output.stem if output else platform.node() or "this-machine")
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
    num_ranks: int | None, seconds: float, *, name: str
) -> tuple[MachineProfile, LinkReport | None, list[dict[str, Any]]]:
    """Return the machine as measured, what its links do, and each timing of a kernel."""
    survey, environment = survey_to_measure(_this_machine, num_ranks=num_ranks)
    gpu = survey.machine.gpu if survey.machine is not None else None
    on_gpus = gpu is None or gpu.vendor != "cpu"
    count = len(survey.node.gpus)
    threads = None if on_gpus else _threads(count)
    links_s = seconds * _LINKS_SHARE if count > 1 else 0.0
    request = KernelRequest(
        device="cuda" if on_gpus else "cpu",
        cases=kernel_cases(precisions_of(gpu), on_gpus=on_gpus, num_ranks=count),
        max_seconds=seconds - links_s,
        num_threads=threads,
    )
    links = None
    with measuring_progress() as progress:
        task = progress.add_task("starting ranks", total=request.num_timings)

        def step(event: KernelEvent) -> None:
            case = request.cases[event.case]
            progress.update(task, advance=1, description=f"{case.kind} {case.precision}")

        events = measure_kernels(request, num_ranks=count, environment=environment, on_event=step)
        if count > 1:
            links = measure_machine(
                survey.node,
                cluster=_cluster(survey),
                on_gpus=on_gpus,
                max_seconds=links_s,
                environment=environment,
                watch=lambda request: advance(progress, request.num_timings),
            )
    machine = calibrated_machine(
        survey.machine,
        survey.node,
        request.cases,
        events,
        links=links,
        name=name,
        source=_source(count, threads),
    )
    return machine, links, [request.cases[event.case].model_dump() | event.model_dump() for event in events]


def _this_machine() -> MachineSurvey:
    from paraplan.hardware.nvml import read_this_machine

    return survey_node(read_this_machine(), environment=os.environ)


def _cluster(survey: MachineSurvey) -> Cluster | None:
    machine = survey.machine
    if machine is None:
        return None
    return Cluster(name=machine.name, gpu=machine.gpu, node=survey.node, network=machine.network)


def _threads(num_ranks: int) -> int:
    """Return the threads of a rank: OMP_NUM_THREADS where it is set, else as the launcher shares out the cores."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return (
        int(given)
        if given.isdecimal() and int(given) > 0
        else threads_per_rank(num_cores=usable_cores(), ranks_per_node=num_ranks)
    )


def _source(num_ranks: int, threads: int | None) -> str:
    each = "GPU" if threads is None else "CPU process"
    many = f"{num_ranks} {each}{'es' if threads is not None else 's'}" if num_ranks > 1 else f"1 {each}"
    of = f" of {threads} thread{'s' if threads != 1 else ''}" if threads is not None else ""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "paraplan"))
    return f"paraplan calibrate on {many}{of}, {dt.date.today()}, {versions}, Python {platform.python_version()}"


def _fit_to_runs(path: Path, output: Path | None, *, as_json: bool) -> None:
    from paraplan.cost.calibration import calibrate_to_runs
    from paraplan.hardware.link_speed import load_link_speeds
    from paraplan.hardware.profile_files import list_gpus
    from paraplan.model.named import known_configs
    from paraplan.plan.runs import MeasuredRun, UnusableRow, read_runs

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read {path}: {reason}", hint="give a CSV file as paraplan validate takes") from None
    rows = read_runs(text, source=str(path))
    measured = [row for row in rows if isinstance(row, MeasuredRun)]
    unusable = tuple(f"{row.id}: {row.reason}" for row in rows if isinstance(row, UnusableRow))
    fitted = calibrate_to_runs(
        measured,
        list_gpus(),
        load_link_speeds(),
        source=f"{path.name}, {dt.date.today()}",
        known=known_configs(),
    )
    fitted = fitted.replace(skipped=unusable + fitted.skipped)
    if as_json:
        typer.echo(fitted.model_dump_json(indent=2))
    else:
        print_fit(fitted)
    if output is not None:
        write_beside_and_rename(output, fitted.model_dump_json(indent=2) + "\n")
        typer.echo(f"saved: {output}; use it with paraplan validate --calibration {output}", err=True)
