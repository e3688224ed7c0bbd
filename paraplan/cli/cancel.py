"""`paraplan cancel`: end a submitted job."""

from __future__ import annotations

import json

import typer

from paraplan.api.submission import cancel_job, find_job
from paraplan.cli.live_options import JobArgument, JsonOption

app = typer.Typer(add_completion=False)


@app.command()
def cancel(job: JobArgument, as_json: JsonOption = False) -> None:
    """Have a scheduler end a submitted job; ranks that can save in time do. Its log and files stay."""
    handle = find_job(job)
    before = cancel_job(handle)
    if as_json:
        typer.echo(json.dumps({"name": handle.name, "was": before.name, "canceled": not before.has_ended}))
    elif before.has_ended:
        typer.echo(f"{handle.name} has ended before: {before.name} ({before.words})")
    else:
        typer.echo(f"{handle.name} is told to end; it was {before.name}")
