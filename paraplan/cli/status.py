"""`paraplan status`: how a submitted job is."""

from __future__ import annotations

import json

import typer

from paraplan.api.submission import find_job, job_state
from paraplan.cli.live_options import JobArgument, JsonOption
from paraplan.units import one_line

app = typer.Typer(add_completion=False)


@app.command()
def status(job: JobArgument, as_json: JsonOption = False) -> None:
    """Say how a submitted job is, in the words of its scheduler, and where its files are."""
    handle = find_job(job)
    state = job_state(handle)
    if as_json:
        told = {"state": state.name, "words": state.words, "exit_status": state.exit_status}
        typer.echo(json.dumps(json.loads(handle.to_json()) | told, indent=2))
        return
    ended = f" with status {state.exit_status}" if state.exit_status is not None else ""
    lines = {
        handle.name: f"{state.name}{ended} ({state.words})",
        "job": f"{handle.job_id or 'not known'} of {handle.scheduler} {handle.cluster}",
        "script": handle.script,
        "plan": handle.plan,
        "folder": str(handle.folder),
    }
    width = max(map(len, lines))
    for name, text in lines.items():
        typer.echo(f"{name.ljust(width)}  {one_line(text)}")
