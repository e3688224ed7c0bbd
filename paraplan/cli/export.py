"""`paraplan export`: a plan in the words of another tool."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paraplan.api.exporting import EXPORT_TARGETS
from paraplan.api.exporting import export as export_plan
from paraplan.api.plans import load_plan
from paraplan.cli import completion
from paraplan.cli.inputs import write_beside_and_rename
from paraplan.cli.options import JsonOption
from paraplan.cli.terminal import in_lines

if TYPE_CHECKING:
    from paraplan.interop.exported import Exported

app = typer.Typer(add_completion=False)


@app.command(epilog="Targets: " + "; ".join(f"{name}: {title}" for name, title in EXPORT_TARGETS.items()) + ".")
def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, written by paraplan recommend -o.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="TARGET", help=f"One of {', '.join(EXPORT_TARGETS)}.", autocompletion=completion.targets
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file and not to stdout.")
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Leave out an order of ranks or machines that the target has no words for."),
    ] = False,
    script: Annotated[
        str, typer.Option("--script", metavar="FILE", help="The training script that commands start.")
    ] = "train.py",
    image: Annotated[
        str | None, typer.Option("--image", metavar="NAME", help="The container image of Kubernetes targets.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as the configuration of another tool: a launcher, a trainer, a scheduler.

    What the target cannot express is an error; what is left to the script is said on stderr.

    Example: paraplan export plan.json --to accelerate -o accelerate.yaml
    """
    exported = export_plan(load_plan(plan), to, partial=partial, path=str(plan), script=script, image=image)
    if output is not None:
        write_beside_and_rename(output, exported.text)
    if as_json:
        typer.echo(json.dumps(exported.model_dump(mode="json"), indent=2))
    elif output is None:
        typer.echo(exported.text, nl=False)
    _print_remarks(exported)
    if output is not None and not as_json:
        typer.echo(f"{to} configuration written to {output}.")


def _print_remarks(exported: Exported) -> None:
    for gap in exported.gaps:
        typer.secho("not expressed: ", fg="yellow", bold=True, nl=False, err=True)
        typer.echo(in_lines(str(gap), sys.stderr, indent=len("not expressed: ")), err=True)
    for note in exported.notes:
        typer.secho("left to you: ", fg="cyan", nl=False, err=True)
        typer.echo(in_lines(note, sys.stderr, indent=len("left to you: ")), err=True)
