"""`paraplan stacks`: where the ranks of a run wait."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from paraplan.api.live_runs import WaitingRanks, ask_where_ranks_wait, find_run
from paraplan.cli.live_options import JsonOption, RunArgument
from paraplan.units import ranks_in_words

_IMPORTS = "<frozen importlib"
"""Python's own frames of an import: five for each module that imports another."""

app = typer.Typer(add_completion=False)


@app.command()
def stacks(
    run: RunArgument = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="The whole stack of each place.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show where the ranks of a run stand, on all nodes, grouped by what they wait for. The run goes on.

    With --hang-timeout the run also knows the collectives by number, and who never came to one.
    """
    found = find_run(run)
    waiting = ask_where_ranks_wait(found)
    if as_json:
        typer.echo(json.dumps({"run": found.id} | waiting.to_json(), indent=2))
        return
    for line in waiting.lines():
        typer.echo(line)
    if verbose:
        _print_stacks(waiting)


def _print_stacks(waiting: WaitingRanks) -> None:
    for place in waiting.places:
        typer.echo(f"\nstack of {ranks_in_words(place.ranks[:1])}, innermost call first")
        for frame in (frame for frame in place.stack if not frame.path.startswith(_IMPORTS)):
            typer.echo(f"  {frame.path}:{frame.line} in {frame.name}")
