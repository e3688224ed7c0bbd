"""`paraplan logs`: what a submitted job writes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paraplan.api.submission import find_job, job_logs, wait_for_end
from paraplan.cli.live_options import JobArgument

app = typer.Typer(add_completion=False)
_PATIENCE_S = 30.0  # for a scheduler to note the end of a job whose log has ended


@app.command()
def logs(
    job: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Print what a submitted job has written. With -f Ctrl-C leaves the job alone; its end is this command's, too.

    The status is then the job's own where the scheduler says it, else 1 for one that failed or was canceled.
    """
    handle = find_job(job)
    try:
        for line in job_logs(handle, follow=follow):
            typer.echo(line)
            sys.stdout.flush()
        if not follow:
            return
        state = wait_for_end(handle, patience_s=_PATIENCE_S)
    except KeyboardInterrupt:
        typer.echo(f"\n{handle.name} goes on; paraplan cancel {handle.name} ends it", err=True)
        return
    typer.echo(f"{handle.name}: {state.name} ({state.words})", err=True)
    raise typer.Exit(state.exit_status if state.exit_status is not None else int(state.name != "done"))
