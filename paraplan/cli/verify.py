"""`paraplan verify`: whether a plan still suits, fits, can be executed and is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paraplan.api.machines import load_cluster
from paraplan.api.models import load_model
from paraplan.api.plans import load_plan
from paraplan.api.workloads import Workload
from paraplan.cli.ci import GithubOption, JunitOption
from paraplan.cli.ci_plan import check_plan_file
from paraplan.cli.inputs import calibrated
from paraplan.cli.options import CalibrationOption, GpusPerNodeOption, JsonOption, ProfileOption
from paraplan.errors import UsageError

app = typer.Typer(add_completion=False)


@app.command()
def verify(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, written by paraplan recommend -o.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The model; by default that of the plan file.")
    ] = None,
    profile: ProfileOption = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Number of machines.")] = None,
    gpus_per_node: GpusPerNodeOption = None,
    tolerance: Annotated[
        str | None,
        typer.Option(
            "--tolerance", metavar="PERCENT", help="How much slower than the best plan is allowed, 5% unless told."
        ),
    ] = None,
    github: GithubOption = False,
    junit: JunitOption = None,
    calibration: CalibrationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Exit with status 1 if a plan no longer suits its model and machines, fits, can be executed or is fast.

    Model, training and machines are those of the plan file; --profile names other machines, for example those of today.

    Example: paraplan verify plan.json
    """
    file = load_plan(plan)
    reference = model or (file.model.source or file.model.name if file.model is not None else None)
    if reference is None:
        raise UsageError(f"{plan} does not name its model", hint="give --model")
    if file.training is None:
        raise UsageError(f"{plan} does not say what it trains", hint="make it again with paraplan recommend -o")
    made = file.cluster
    if profile is None and made is not None:
        profile, nodes = made.name, nodes or made.num_nodes
        gpus_per_node = gpus_per_node or made.gpus_per_node
    cluster = load_cluster(profile, num_nodes=nodes or 1, gpus_per_node=gpus_per_node)
    spec = load_model(reference, seq_length=file.training.seq_length)
    workload = calibrated(Workload.of(spec, file.training, cluster), calibration)
    check_plan_file(workload, plan, tolerance=tolerance, github=github, junit=junit, as_json=as_json)
