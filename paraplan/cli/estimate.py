"""`paraplan estimate`: memory and step time of one plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from paraplan.cli.ci import GithubOption, JunitOption, MaxMemoryOption, MinTokensOption
from paraplan.cli.ci_limits import Limits, check_limits
from paraplan.cli.foreign_options import FromAccelerateOption, FromDeepspeedOption, FromMegatronOption
from paraplan.cli.html import HtmlOption, require_files, write_estimate
from paraplan.cli.inputs import (
    calibrated,
    make_plan,
    options_given,
    read_cluster_for_plan,
    read_plan_file,
    read_trained_model,
    read_training,
)
from paraplan.cli.options import (
    HARDWARE_PANEL,
    MOST_RANKS,
    TRAINING_PANEL,
    AttentionName,
    AttentionOption,
    CalibrationOption,
    CompileOption,
    CpOption,
    DevicesOption,
    DpOption,
    EpOption,
    FrameworkName,
    GpusPerNodeOption,
    JsonOption,
    MicroBatchOption,
    ModelArgument,
    OffloadName,
    OffloadOption,
    OptimizerChoice,
    OptimizerOption,
    PlanOption,
    PpOption,
    PrecisionName,
    PrecisionOption,
    PricedFrameworkOption,
    ProfileOption,
    RecomputeName,
    RecomputeOption,
    ScheduleChoice,
    ScheduleOption,
    SeqLenOption,
    SequenceParallelOption,
    TpOption,
    VirtualStagesOption,
    ZeroOption,
    ZeroShardsOption,
)
from paraplan.cli.step_trace import TraceOption, write_trace
from paraplan.cost.estimate import PlanEstimate, estimate_plan
from paraplan.cost.frameworks import habits_of
from paraplan.cost.habits import PARAPLAN
from paraplan.cost.workload import Workload
from paraplan.errors import UsageError
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.plan.compatibility import check_compatible
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan, micro_batches
from paraplan.report.estimate_json import estimate_report

if TYPE_CHECKING:
    from paraplan.plan.training import TrainingSpec
    from paraplan.runtime.fake.run import TracedMemory

_PLAN_OPTIONS = (
    *("dp", "tp", "pp", "cp", "ep", "zero", "micro_batch", "recompute", "schedule", "virtual_stages"),
    *("zero_shards", "devices_per_process"),
    *("sequence_parallel", "offload", "global_batch"),
)

app = typer.Typer(add_completion=False)


class _EstimateCommand(TyperCommand):
    """The command, which reads `--trace` without a file as `--trace-memory`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args[1:], "-"]
        named = [
            "--trace-memory" if word == "--trace" and after.startswith("-") else word
            for word, after in zip(args, following, strict=True)
        ]
        return super().parse_args(ctx, named)


@app.command(cls=_EstimateCommand)
def estimate(
    ctx: typer.Context,
    model: ModelArgument,
    profile: ProfileOption = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            min=1,
            max=MOST_RANKS,
            help="Number of such machines; by default as many as the plan needs.",
            rich_help_panel=HARDWARE_PANEL,
        ),
    ] = None,
    gpus_per_node: GpusPerNodeOption = None,
    seq_len: SeqLenOption = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            min=1,
            max=MOST_RANKS**2,
            help="Sequences of one step over all GPUs; by default one micro-batch each.",
            rich_help_panel=TRAINING_PANEL,
        ),
    ] = None,
    precision: PrecisionOption = PrecisionName.bf16,
    optimizer: OptimizerOption = OptimizerChoice.adamw,
    attention: AttentionOption = AttentionName.sdpa,
    compiled: CompileOption = False,
    dp: DpOption = 1,
    tp: TpOption = 1,
    pp: PpOption = 1,
    cp: CpOption = 1,
    ep: EpOption = 1,
    zero: ZeroOption = 0,
    zero_shards: ZeroShardsOption = None,
    devices_per_process: DevicesOption = 1,
    micro_batch: MicroBatchOption = 1,
    recompute: RecomputeOption = RecomputeName.none,
    schedule: ScheduleOption = None,
    virtual_stages: VirtualStagesOption = 1,
    sequence_parallel: SequenceParallelOption = False,
    offload: OffloadOption = OffloadName.none,
    framework: PricedFrameworkOption = FrameworkName.paraplan,
    plan_path: PlanOption = None,
    html: HtmlOption = None,
    trace: TraceOption = None,
    trace_memory: Annotated[
        bool,
        typer.Option(
            "--trace-memory",
            help="Also run the plan's own engine on this model, without a GPU or values, and compare its memory; slow. "
            "--trace without a file means the same.",
        ),
    ] = False,
    from_deepspeed: FromDeepspeedOption = None,
    from_accelerate: FromAccelerateOption = None,
    from_megatron: FromMegatronOption = None,
    max_memory: MaxMemoryOption = None,
    min_tokens_per_s: MinTokensOption = None,
    github: GithubOption = False,
    junit: JunitOption = None,
    calibration: CalibrationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the memory and step time of one plan, part by part.

    Example: paraplan estimate llama-3-8b --profile dgx-h100 --seq-len 4096 --dp 8 --zero 3 --micro-batch 2
    """
    require_files(html, trace)
    limits = Limits.of(max_memory=max_memory, min_tokens_per_s=min_tokens_per_s, github=github, junit=junit)
    if any(given is not None for given in (from_deepspeed, from_accelerate, from_megatron)):
        from paraplan.cli.foreign import Foreign, estimate_foreign  # readers and the search, which others do without

        foreign = Foreign(deepspeed=from_deepspeed, accelerate=from_accelerate, megatron=from_megatron)
        result = estimate_foreign(foreign, ctx.params, options_given(ctx))
        check_limits(result, limits, model=model, file=from_deepspeed or from_accelerate, as_json=as_json)
        return
    choices: dict[str, Any] = {
        "precision": precision,
        "optimizer": optimizer,
        "attention": attention,
        "compiled": compiled,
    }
    habits = habits_of(framework.value)
    if plan_path is not None:
        file = read_plan_file(plan_path)
        plan, seq_len, choices = _from_file(plan_path, file, options_given(ctx), seq_len, choices)
        habits = habits_of(file.framework or habits.name) if "framework" not in options_given(ctx) else habits
    else:
        plan = make_plan(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep,
            zero_stage=zero,
            zero_shards=zero_shards,
            devices_per_process=devices_per_process,
            micro_batch_size=micro_batch,
            num_microbatches=micro_batches(global_batch or dp * micro_batch, dp=dp, micro_batch_size=micro_batch),
            pipeline_schedule=(schedule or ScheduleChoice.one_forward_one_backward) if pp > 1 else schedule,
            virtual_pipeline_size=virtual_stages,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
            offload=offload,
        )
    spec = read_trained_model(model, seq_len=seq_len, micro_batch_size=plan.micro_batch_size)
    cluster = read_cluster_for_plan(profile, plan, num_nodes=nodes, gpus_per_node=gpus_per_node)
    training = read_training(spec, seq_len=seq_len, global_batch=plan.global_batch_size, **choices)
    made = replace(Workload.of(spec, training, cluster, load_link_speeds()), habits=habits)
    check_compatible(plan, spec, training, cluster, rings_context=habits.rings_context)
    workload = calibrated(made, calibration)
    traced = _trace(model, plan, training) if trace_memory else None
    result = _estimate_and_print(workload, plan, traced, as_json=as_json)
    if trace is not None:
        write_trace(workload, result, trace)
    if html is not None:
        write_estimate(workload, result, html)
    check_limits(result, limits, model=spec.name, file=plan_path, as_json=as_json)


def _from_file(
    path: Path, file: PlanFile, given: frozenset[str], seq_len: int | None, choices: dict[str, Any]
) -> tuple[ParallelPlan, int | None, dict[str, Any]]:
    """Return a plan file's plan and training; of the training, options that were given come first."""
    contradicting = [f"--{name.replace('_', '-')}" for name in _PLAN_OPTIONS if name in given]
    if contradicting:
        raise UsageError(
            f"{' and '.join(contradicting)} beside --plan {path}, which says it already",
            hint="leave out --plan, or the options; the file can be edited",
        )
    if file.training is None:
        return file.plan, seq_len, choices
    stored = {name: getattr(file.training, name) for name in choices if name not in given}
    return file.plan, seq_len or file.training.seq_length, choices | stored


def _trace(model: str, plan: ParallelPlan, training: TrainingSpec) -> list[TracedMemory]:
    from paraplan.cli.estimate_trace import trace_stages  # torch, which an estimate does without

    return trace_stages(model, plan, training)


def _estimate_and_print(
    workload: Workload, plan: ParallelPlan, traced: list[TracedMemory] | None, *, as_json: bool
) -> PlanEstimate:
    result = estimate_plan(workload, plan)
    # No library runs in a trace, so what cuBLAS keeps is left out of what a trace is compared with.
    constants = workload.constants.replace(counts_matmul_workspaces=False)
    compared = estimate_plan(replace(workload, constants=constants), plan).memory if traced is not None else ()
    if as_json:
        report = estimate_report(workload, result)
        if traced is not None:
            report["traced_memory"] = [memory.model_dump() for memory in traced]
            report["predicted_for_trace"] = [compared[memory.pipeline_stage].model_dump() for memory in traced]
        typer.echo(json.dumps(report, indent=2))
        return result
    from paraplan.cli import estimate_tables  # rich, which --json does without

    if workload.habits.name != PARAPLAN.name:
        typer.echo(f"By the habits of {workload.habits.name}, which paraplan does not launch:")
    estimate_tables.print_heading(workload, result)
    estimate_tables.print_estimate(workload, result)
    if traced is not None:
        estimate_tables.print_traced(compared, traced)
    return result
