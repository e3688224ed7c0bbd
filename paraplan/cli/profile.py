"""`paraplan profile`: start and stop torch.profiler in ranks of a run that was started without it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from paraplan.api.live_runs import Profiles, find_run, profile_run
from paraplan.cli.live_options import JsonOption, RunArgument, ranks_of
from paraplan.units import ranks_in_words

app = typer.Typer(add_completion=False)


@app.command()
def profile(
    run: RunArgument = None,
    ranks: Annotated[str, typer.Option("--ranks", help="Ranks to profile: 0,4-7, or all.")] = "0",
    seconds: Annotated[float, typer.Option("--seconds", help="How long, about: whole steps are profiled.")] = 3.0,
    wait: Annotated[
        float, typer.Option("--wait", min=1.0, help="How long a rank's step may last till it begins.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Profile ranks of a run with torch.profiler for some seconds; each writes a trace in Chrome's format.

    A profile begins and ends between two steps. Traces are in the run's folder, for Perfetto (ui.perfetto.dev) and
    `paraplan compare`. Ranks that note no steps are read by py-spy where it is installed.
    """
    wanted = ranks_of(ranks)
    found = find_run(run)
    try:
        made = profile_run(
            found,
            ranks=wanted,
            seconds=seconds,
            wait_s=wait,
            on_begin=lambda text: typer.echo(f"profiling {text}; Ctrl-C leaves it to them", err=True),
        )
    except KeyboardInterrupt:
        typer.echo("\nnot waited for; ranks that have begun write their traces in the run's folder", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps({"run": found.id} | made.to_json(), indent=2))
    else:
        _print(made)
    if made.failed or made.silent:
        raise typer.Exit(1)


def _print(made: Profiles) -> None:
    is_one_host = len(set(made.hosts.values())) <= 1
    for rank, path in sorted((made.traces | made.sampled).items()):
        where = "" if is_one_host else f" on {made.hosts[rank]}"
        by = ", by py-spy" if rank in made.sampled else ""
        typer.echo(f"rank {rank}{where}: {path}{by}")
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(made.failed.items()):
        by_reason.setdefault(reason, []).append(rank)
    for reason, failed in by_reason.items():
        typer.echo(f"no profile of {ranks_in_words(failed)}: {reason}", err=True)
    if made.silent:
        typer.echo(f"not included: {', '.join(made.silent)} did not answer", err=True)
    if made.traces:
        first = made.traces[min(made.traces)]
        typer.echo(f"beside a prediction: paraplan compare predicted.json {first}", err=True)
