"""`paraplan ps`: the runs of this user on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paraplan.api.live_runs import RUNS_FOLDER, Run, ended_runs, live_runs
from paraplan.cli.live_options import JsonOption
from paraplan.units import format_seconds, one_line

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


_LONG_STEP_S = 5.0
"""From here on it is said how long ago the last step ended."""


def _report(run: Run) -> dict[str, Any]:
    values = asdict(run) | {"folder": str(run.folder) if run.folder is not None else None, "step": run.step}
    del values["name"]
    return values | {"live": bool(run.name)}


def _print_table(runs: Sequence[Run]) -> None:
    columns: dict[str, Callable[[Run], str]] = {
        "run": lambda run: run.id,
        "state": _state,
        "script": lambda run: Path(run.script).name,
        "plan": lambda run: run.plan or "",
        "nodes": lambda run: "" if run.num_nodes is None else str(run.num_nodes),
        "ranks": lambda run: "" if run.world_size is None else str(run.world_size),
        "step": _step,
        "elapsed": lambda run: "" if run.elapsed_s is None else format_seconds(run.elapsed_s),
    }
    rows = {title: [one_line(text_of(run)) for run in runs] for title, text_of in columns.items()}
    shown = {title: [title, *texts] for title, texts in rows.items() if any(texts)}
    widths = [max(map(len, texts)) for texts in shown.values()]
    for line in zip(*shown.values(), strict=True):  # a line a run, also where that is wider than the terminal
        typer.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _state(run: Run) -> str:
    others = [f"rank {rank.rank} {rank.state}" for rank in run.ranks if rank.state != "running"]
    again = f", attempt {run.attempt}" if run.name and run.attempt > 1 else ""
    return ", ".join([run.state, *others[:2]]) + again


def _step(run: Run) -> str:
    if run.step is None:
        return ""
    return f"{run.step:,}" + (f", {run.since_step_s:.0f} s ago" if (run.since_step_s or 0.0) >= _LONG_STEP_S else "")
