"""`paraplan jobs`: what was submitted, and how it is."""

from __future__ import annotations

import json
import time

import typer

from paraplan.api.submission import Handle, JobState, job_state, submitted_jobs
from paraplan.cli.live_options import JsonOption
from paraplan.errors import ParaplanError
from paraplan.units import format_seconds, one_line

app = typer.Typer(add_completion=False)


@app.command()
def jobs(as_json: JsonOption = False) -> None:
    """List the jobs that paraplan submit has submitted, the newest first: how they are, by their schedulers."""
    found = [(handle, _state(handle)) for handle in reversed(submitted_jobs())]
    if as_json:
        shown = [
            json.loads(handle.to_json()) | {"state": state.name, "words": state.words, "exit_status": state.exit_status}
            for handle, state in found
        ]
        typer.echo(json.dumps({"jobs": shown}, indent=2))
    elif found:
        _print_table(found)
    else:
        typer.echo("no job was submitted from here; paraplan submit submits one", err=True)


def _state(handle: Handle) -> JobState:
    """Return how a job is; of one whose scheduler does not answer that, so that the others are listed."""
    try:
        return job_state(handle)
    except ParaplanError as error:
        return JobState("unknown", error.message)


def _print_table(found: list[tuple[Handle, JobState]]) -> None:
    now = time.time()
    rows = [("job", "state", "scheduler", "id", "submitted", "script")]
    rows += [
        (
            handle.name,
            state.name if state.name != "unknown" else f"unknown ({state.words[:60]})",
            handle.scheduler,
            handle.job_id or "?",
            f"{format_seconds(max(0.0, now - handle.submitted_s))} ago",
            handle.script[:60],
        )
        for handle, state in found
    ]
    shown = [tuple(one_line(text) for text in row) for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(rows[0]))]
    for row in shown:
        typer.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
