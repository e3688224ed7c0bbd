"""`paraplan submit`: a training to a scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paraplan.api.plans import load_plan
from paraplan.api.submission import Submission, draft_job, excluded_hosts, submit_draft
from paraplan.cli import completion
from paraplan.cli.live_options import JsonOption
from paraplan.errors import UsageError
from paraplan.units import one_line

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_interspersed_args": False})
def submit(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script; it is packed.")],
    to: Annotated[
        str,
        typer.Option("--to", metavar="SCHEDULER", help="slurm, k8s, sky, ray.", autocompletion=completion.schedulers),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan file: plan and size.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Without a plan: so many nodes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", help="Without a plan: so many ranks on each.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="An option of the scheduler's client; several times."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="HOST|RUN|JOB",
            help="Not on these hosts, or not on those that a run's folder, a submitted job or JSON of doctor names as "
            "slow or bad; several times.",
        ),
    ] = None,
    image: Annotated[str | None, typer.Option("--image", metavar="NAME", help="The container image of k8s.")] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Pack nothing: Slurm's nodes see this folder as it will be.")
    ] = False,
    on_cpu: Annotated[bool, typer.Option("--on-cpu", help="Ask for no GPUs.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a training to Slurm, Kubernetes, SkyPilot or Ray, through their own clients.

    Packed is what git knows or does not ignore, as it is now. The job starts in the same folder of its package. Name
    data and checkpoints by whole paths.

    Example: paraplan submit --to slurm --plan plan.json --option partition=gpu train.py --steps 1000
    """
    wanted = Submission(
        to=to,
        script=script,
        arguments=tuple(arguments or ()),
        plan=load_plan(plan) if plan is not None else None,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        image=image,
        options=_options(option or []),
        in_place=in_place,
        on_cpu=on_cpu,
        exclude=excluded_hosts(exclude or []),
    )
    draft = draft_job(wanted, Path.cwd())
    if wanted.exclude:
        typer.echo(f"left out: {one_line(', '.join(wanted.exclude))}", err=True)
    if draft.package is not None:
        typer.echo(f"package: {one_line(draft.package.describe())}", err=True)
    if dry_run:
        if as_json:
            shown = {"document": draft.exported.text, "command": draft.command, "notes": draft.exported.notes}
            typer.echo(json.dumps(shown, indent=2))
        else:
            typer.echo(draft.exported.text, nl=False)
            typer.echo(f"would run: {draft.command}", err=True)
        return
    handle = submit_draft(draft)
    if as_json:
        typer.echo(handle.to_json())
        return
    typer.echo(f"{handle.name}: job {handle.job_id} of {draft.scheduler.title} {one_line(handle.cluster)}")
    typer.echo(f"paraplan logs -f {handle.name} follows it, paraplan cancel {handle.name} ends it", err=True)


def _options(words: list[str]) -> dict[str, str]:
    """Return options by name. Raises `UsageError` for what is none, before a client reads it as another word."""
    options = dict[str, str]()
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        if not name or not name.replace("-", "").replace("_", "").isalnum():
            raise UsageError(f"--option {word!r} is not NAME=VALUE", hint="write --option partition=gpu")
        options[name] = value
    return options
