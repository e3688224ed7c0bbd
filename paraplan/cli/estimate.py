"""`paraplan estimate`: memory and step time of one plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paraplan.cli.estimate_report import estimate_report
from paraplan.cli.inputs import (
    check_plan_suits_model,
    check_precision,
    make_plan,
    read_cluster,
    read_plan_file,
    read_training,
)
from paraplan.cli.options import (
    PLAN_PANEL,
    TRAINING_PANEL,
    AttentionName,
    AttentionOption,
    GpusPerNodeOption,
    JsonOption,
    ModelArgument,
    NodesOption,
    OffloadName,
    OptimizerChoice,
    OptimizerOption,
    PrecisionName,
    PrecisionOption,
    ProfileOption,
    RecomputeName,
    ScheduleChoice,
    SeqLenOption,
)
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.workload import Workload
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan, micro_batches

if TYPE_CHECKING:
    from paraplan.plan.training import TrainingSpec
    from paraplan.runtime.fake_run import TracedMemory

app = typer.Typer(add_completion=False)


@app.command()
def estimate(
    model: ModelArgument,
    profile: ProfileOption = None,
    nodes: NodesOption = 1,
    gpus_per_node: GpusPerNodeOption = None,
    seq_len: SeqLenOption = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            min=1,
            help="Sequences of one step over all GPUs; by default one micro-batch each.",
            rich_help_panel=TRAINING_PANEL,
        ),
    ] = None,
    precision: PrecisionOption = PrecisionName.bf16,
    optimizer: OptimizerOption = OptimizerChoice.adamw,
    attention: AttentionOption = AttentionName.sdpa,
    dp: Annotated[int, typer.Option("--dp", min=1, rich_help_panel=PLAN_PANEL, help="Data-parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option("--tp", min=1, rich_help_panel=PLAN_PANEL, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, rich_help_panel=PLAN_PANEL, help="Pipeline stages.")] = 1,
    cp: Annotated[int, typer.Option("--cp", min=1, rich_help_panel=PLAN_PANEL, help="Context-parallel ranks.")] = 1,
    zero: Annotated[
        int, typer.Option("--zero", min=0, max=3, rich_help_panel=PLAN_PANEL, help="ZeRO stage; 0 is DDP.")
    ] = 0,
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", min=1, rich_help_panel=PLAN_PANEL, help="Sequences of one micro-batch.")
    ] = 1,
    recompute: Annotated[
        RecomputeName, typer.Option("--recompute", rich_help_panel=PLAN_PANEL, help="Activation checkpointing.")
    ] = RecomputeName.none,
    schedule: Annotated[
        ScheduleChoice | None,
        typer.Option("--schedule", rich_help_panel=PLAN_PANEL, help="Pipeline schedule; 1f1b by default."),
    ] = None,
    virtual_stages: Annotated[
        int, typer.Option("--virtual-stages", min=1, rich_help_panel=PLAN_PANEL, help="Stages per pipeline rank.")
    ] = 1,
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            rich_help_panel=PLAN_PANEL,
            help="Split norms and dropout over tp.",
        ),
    ] = False,
    offload: Annotated[
        OffloadName, typer.Option("--offload", rich_help_panel=PLAN_PANEL, help="What lives in host memory.")
    ] = OffloadName.none,
    plan_path: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", rich_help_panel=PLAN_PANEL, help="A plan file in place of the degrees."),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Also run the plan's own engine on this model, without a GPU or values, and compare; slow."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict the memory and step time of one plan, part by part.

    Example: paraplan estimate llama-3-8b --profile dgx-h100 --seq-len 4096 --dp 8 --zero 3 --micro-batch 2
    """
    spec = read_model(model, seq_length=seq_len)
    cluster = read_cluster(profile, num_nodes=nodes, gpus_per_node=gpus_per_node)
    check_precision(precision, cluster.gpu)
    if plan_path is not None:
        plan = read_plan_file(plan_path).plan
    else:
        plan = make_plan(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            zero_stage=zero,
            micro_batch_size=micro_batch,
            num_microbatches=micro_batches(global_batch or dp * micro_batch, dp=dp, micro_batch_size=micro_batch),
            pipeline_schedule=(schedule or ScheduleChoice.one_forward_one_backward) if pp > 1 else schedule,
            virtual_pipeline_size=virtual_stages,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            offload=offload,
        )
    check_plan_suits_model(plan, spec)
    training = read_training(
        spec,
        seq_len=seq_len,
        global_batch=plan.global_batch_size,
        precision=precision,
        optimizer=optimizer,
        attention=attention,
    )
    workload = Workload.of(spec, training, cluster, load_link_speeds())
    traced = _trace(model, plan, training) if trace else None
    _estimate_and_print(workload, plan, traced, as_json=as_json)


def _trace(model: str, plan: ParallelPlan, training: TrainingSpec) -> list[TracedMemory]:
    from paraplan.cli.estimate_trace import trace_stages  # torch, which an estimate does without

    return trace_stages(model, plan, training)


def _estimate_and_print(
    workload: Workload, plan: ParallelPlan, traced: list[TracedMemory] | None, *, as_json: bool
) -> None:
    result = estimate_plan(workload, plan)
    if as_json:
        report = estimate_report(workload, result)
        if traced is not None:
            report["traced_memory"] = [memory.model_dump() for memory in traced]
        typer.echo(json.dumps(report, indent=2))
        return
    from paraplan.cli.estimate_tables import print_estimate, print_traced  # rich, which --json does without

    verdict = "fits" if result.fits else "does not fit"
    typer.echo(f"{workload.model.name}: {plan.describe()} {verdict} {workload.cluster.gpu.title}")
    print_estimate(workload, result)
    if traced is not None:
        print_traced(result, traced)
