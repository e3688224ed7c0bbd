"""`paraplan recommend`: the decision tree and the search, as a ranked table and a plan file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paraplan.cli.ci import CheckOption, GithubOption, JunitOption, ToleranceOption, require_checks
from paraplan.cli.ci_plan import check_plan_file
from paraplan.cli.estimate_report import estimate_report
from paraplan.cli.inputs import check_precision, read_cluster, read_training, write_beside_and_rename
from paraplan.cli.options import (
    TRAINING_PANEL,
    AttentionName,
    AttentionOption,
    GpusPerNodeOption,
    JsonOption,
    ModelArgument,
    NodesOption,
    ObjectiveName,
    OptimizerChoice,
    OptimizerOption,
    PrecisionName,
    PrecisionOption,
    ProfileOption,
    SeqLenOption,
)
from paraplan.cost.workload import Workload
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.interop.commands import launch_command, torchrun_command
from paraplan.model.reader import read_model
from paraplan.plan.files import ClusterReference, ModelReference, PlanFile
from paraplan.search.planned import planned_estimate
from paraplan.search.results import SearchResult
from paraplan.search.search import search

app = typer.Typer(add_completion=False)


@app.command()
def recommend(
    model: ModelArgument,
    global_batch: Annotated[
        int,
        typer.Option(
            "--global-batch", min=1, help="Sequences of one step over all GPUs.", rich_help_panel=TRAINING_PANEL
        ),
    ],
    profile: ProfileOption = None,
    nodes: NodesOption = 1,
    gpus_per_node: GpusPerNodeOption = None,
    seq_len: SeqLenOption = None,
    precision: PrecisionOption = PrecisionName.bf16,
    optimizer: OptimizerOption = OptimizerChoice.adamw,
    attention: AttentionOption = AttentionName.sdpa,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Write the recommended plan to this file.")
    ] = None,
    objective: Annotated[
        ObjectiveName,
        typer.Option(
            "--objective", help="What makes a plan better; simplicity takes the fewest axes within 2 % of the fastest."
        ),
    ] = ObjectiveName.throughput,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows of the table of plans.")] = 10,
    check: CheckOption = None,
    tolerance: ToleranceOption = "5%",
    github: GithubOption = False,
    junit: JunitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose how to train MODEL on these GPUs: memory by parts, the decision tree, and ranked plans.

    Example: paraplan recommend llama-3-8b --profile dgx-h100 --seq-len 4096 --global-batch 64 -o plan.json
    """
    require_checks(check is not None, github=github, junit=junit, needs="--check PLAN")
    started = time.perf_counter()
    spec = read_model(model, seq_length=seq_len)
    cluster = read_cluster(profile, num_nodes=nodes, gpus_per_node=gpus_per_node)
    check_precision(precision, cluster.gpu)
    training = read_training(
        spec, seq_len=seq_len, global_batch=global_batch, precision=precision, optimizer=optimizer, attention=attention
    )
    workload = Workload.of(spec, training, cluster, load_link_speeds())
    if check is not None:
        check_plan_file(workload, check, tolerance=tolerance, github=github, junit=junit, as_json=as_json)
        return
    result = search(workload, objective=objective.value, num_candidates=top)
    seconds = time.perf_counter() - started
    plan_file = _plan_file(workload, result)
    if output is not None:
        write_beside_and_rename(output, plan_file.to_json() + "\n")
    reference = ClusterReference(name=cluster.name, num_nodes=cluster.num_nodes, gpus_per_node=cluster.gpus_per_node)
    commands = {
        "launch": launch_command(str(output or "plan.json"), reference),
        "torchrun": torchrun_command(reference),
    }
    if as_json:
        typer.echo(json.dumps(_report(workload, result, commands, seconds), indent=2))
        return
    from paraplan.cli.estimate_tables import print_estimate  # rich, which --json does without
    from paraplan.cli.recommend_tables import print_recommendation

    print_recommendation(workload, result)
    print_estimate(workload, result.best)
    typer.echo(f"\n{result.plans_considered:,} plans in {seconds:.2f} s.")
    if output is not None:
        typer.echo(f"Plan written to {output}. Run it:\n  {commands['launch']}")
    else:
        typer.echo("Write the plan with -o plan.json, then run it:\n  " + commands["launch"])


def _plan_file(workload: Workload, result: SearchResult) -> PlanFile:
    model, cluster, best = workload.model, workload.cluster, result.best
    return PlanFile(
        plan=best.plan,
        model=ModelReference(
            name=model.name,
            source=model.source,
            num_parameters=model.parameters.total,
            num_blocks=model.num_blocks,
        ),
        training=workload.training,
        cluster=ClusterReference(name=cluster.name, num_nodes=cluster.num_nodes, gpus_per_node=cluster.gpus_per_node),
        estimate=planned_estimate(result),
    )


def _report(workload: Workload, result: SearchResult, commands: dict[str, str], seconds: float) -> dict[str, Any]:
    best = estimate_report(workload, result.best)
    return {
        "decisions": [decision.model_dump() for decision in result.decisions],
        "plan": best.pop("plan"),
        "estimate": best,
        "fastest": estimate_report(workload, result.fastest) if result.fastest else None,
        "candidates": [candidate.model_dump(mode="json") for candidate in result.candidates],
        "rejections": [rejection.model_dump() for rejection in result.rejections],
        "search": {"plans_considered": result.plans_considered, "seconds": round(seconds, 4)},
        "commands": commands,
    }
