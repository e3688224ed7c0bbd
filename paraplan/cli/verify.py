"""`paraplan verify`: whether a plan still suits, fits, can be executed and is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paraplan.api.plans import load_plan
from paraplan.api.workloads import OWN_RUNTIME, Workload
from paraplan.cli.choices import HardwareOptions, TrainingChoices
from paraplan.cli.ci import GithubOption, JunitOption, ToleranceOption, check_plan_file
from paraplan.cli.groups import grouped
from paraplan.cli.inputs import options_given
from paraplan.cli.models import load_shown
from paraplan.cli.options import JsonOption
from paraplan.errors import UsageError

app = typer.Typer(add_completion=False)


@app.command()
@grouped
def verify(
    ctx: typer.Context,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, written by paraplan recommend -o.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The model; by default that of the plan file.")
    ] = None,
    *,
    hardware: HardwareOptions,
    training: TrainingChoices,
    tolerance: ToleranceOption = None,
    github: GithubOption = False,
    junit: JunitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Exit with status 1 if a plan no longer suits its model and machines, fits, can be executed or is fast.

    Model, training and machines are those of the plan file where no option names others, for example those of today. A
    plan of another framework is judged as that one runs it.

    Example: paraplan verify plan.json
    """
    file = load_plan(plan)
    reference = model or (file.model.source or file.model.name if file.model is not None else None)
    if reference is None:
        raise UsageError(f"{plan} does not name its model", hint="give --model")
    cluster = hardware.or_of(file).cluster()
    spec = load_shown(reference, seq_length=training.seq_len or (file.training.seq_length if file.training else None))
    asked = training.or_of(file, spec, plan, options_given(ctx))
    workload = hardware.calibrated(Workload.of(spec, asked, cluster, framework=file.framework or OWN_RUNTIME))
    check_plan_file(workload, plan, tolerance=tolerance, github=github, junit=junit, as_json=as_json)
