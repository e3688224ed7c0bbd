"""`paraplan ps`: the runs of this user on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paraplan.api.live_runs import RUNS_FOLDER, Run, ended_runs, live_runs
from paraplan.cli.live_options import JsonOption
from paraplan.units import format_seconds

app = typer.Typer(add_completion=False)


@app.command()
def ps(
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help=f"Those that have ended too, of ./{RUNS_FOLDER}.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the runs of paraplan launch on this machine: script, plan, ranks, step, time and state.

    Of a run on several nodes these are the ranks of this one; paraplan stacks and profile ask all of them.
    """
    runs = [*(ended_runs(Path(RUNS_FOLDER)) if show_all else ()), *live_runs()]
    if as_json:
        typer.echo(json.dumps({"runs": [_report(run) for run in runs]}, indent=2))
    elif runs:
        _print_table(runs)
    else:
        typer.echo("nothing runs here" if show_all else "nothing runs here; --all lists runs that have ended", err=True)


def _report(run: Run) -> dict[str, Any]:
    values = asdict(run) | {"folder": str(run.folder) if run.folder is not None else None, "step": run.step}
    del values["name"]
    return values | {"live": bool(run.name)}


def _print_table(runs: Sequence[Run]) -> None:
    from rich.table import Table

    from paraplan.cli.terminal import make_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("run", "process", "state", "script", "plan", "nodes", "ranks", "step", "elapsed"):
        table.add_column(title, overflow="fold", justify="right" if title in ("nodes", "ranks", "step") else "left")
    for run in runs:
        table.add_row(
            run.id,
            str(run.pid) if run.name else "",
            _state(run),
            Path(run.script).name,
            run.plan or "",
            "" if run.num_nodes is None else str(run.num_nodes),
            "" if run.world_size is None else str(run.world_size),
            _step(run),
            "" if run.elapsed_s is None else format_seconds(run.elapsed_s),
        )
    make_console().print(table)


def _state(run: Run) -> str:
    others = [f"rank {rank.rank} {rank.state}" for rank in run.ranks if rank.state != "running"]
    again = f", attempt {run.attempt}" if run.name and run.attempt > 1 else ""
    return ", ".join([run.state, *others[:2]]) + again


def _step(run: Run) -> str:
    if run.step is None:
        return ""
    return f"{run.step:,}" + (f", {format_seconds(run.since_step_s)} ago" if run.since_step_s is not None else "")
