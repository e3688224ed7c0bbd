"""`paraplan attach`: what all ranks of a run write, in one place."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paraplan.api.live_runs import LogFollower, find_run
from paraplan.cli.live_options import RunArgument, ranks_of

app = typer.Typer(add_completion=False)


@app.command()
def attach(
    run: RunArgument = None,
    ranks: Annotated[str | None, typer.Option("--ranks", help="Only these: 0,4-7.", show_default="all")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=1000, help="Begin so many lines before.")] = 10,
) -> None:
    """Follow the logs of all ranks of a run, of all nodes, each line with its rank.

    Ctrl-C detaches and leaves the run alone. When the run ends, this ends with its exit status.
    """
    wanted = ranks_of(ranks)
    found = find_run(run)
    typer.echo(f"attached to {found.id}; Ctrl-C detaches, the run goes on", err=True)
    follower = LogFollower(found, num_lines=lines, ranks=None if wanted is None else frozenset(wanted))
    silent: tuple[str, ...] = ()
    try:
        for line in follower.follow():
            typer.echo(f"[rank {line.rank}] {line.text}")
            if follower.silent != silent:
                silent = follower.silent
                typer.echo(f"not included: {', '.join(silent) or 'none; all nodes answer again'}", err=True)
        sys.stdout.flush()
    except KeyboardInterrupt:
        typer.echo(f"\ndetached; {found.id} goes on", err=True)
        return
    if follower.exit_status is None:
        typer.echo(f"the launcher of {found.id} is gone; how the run ended is not known", err=True)
        raise typer.Exit(1)
    typer.echo(f"{found.id} has ended with status {follower.exit_status}", err=True)
    raise typer.Exit(follower.exit_status)
