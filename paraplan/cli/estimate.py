"""`paraplan estimate`: memory and step time of one plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from paraplan.api.estimates import Estimate
from paraplan.api.estimates import estimate as estimate_plan
from paraplan.api.machines import load_cluster_for
from paraplan.api.models import load_model
from paraplan.api.plans import load_plan, make_plan, micro_batches
from paraplan.api.workloads import OWN_RUNTIME, Workload, training_of
from paraplan.cli.ci import GithubOption, JunitOption, MaxMemoryOption, MinTokensOption
from paraplan.cli.ci_limits import Limits, check_limits
from paraplan.cli.foreign_options import FromAccelerateOption, FromDeepspeedOption, FromMegatronOption
from paraplan.cli.html import HtmlOption, require_files, write_estimate
from paraplan.cli.inputs import calibrated, options_given
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
from paraplan.errors import UsageError

if TYPE_CHECKING:
    from paraplan.plan.files import PlanFile
    from paraplan.plan.parallel import ParallelPlan
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
    framework: PricedFrameworkOption = OWN_RUNTIME,
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
    modelled = framework
    if plan_path is not None:
        file = load_plan(plan_path)
        plan, seq_len, choices = _from_file(plan_path, file, options_given(ctx), seq_len, choices)
        modelled = file.framework or modelled if "framework" not in options_given(ctx) else modelled
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
    spec = load_model(model, seq_length=seq_len, micro_batch_size=plan.micro_batch_size)
    cluster = load_cluster_for(plan.world_size, profile, num_nodes=nodes, gpus_per_node=gpus_per_node)
    training = training_of(spec, seq_length=seq_len, global_batch_size=plan.global_batch_size, **choices)
    workload = calibrated(Workload.of(spec, training, cluster, framework=modelled), calibration)
    result = estimate_plan(workload, plan)
    _print(result, _trace(model, plan, training) if trace_memory else None, as_json=as_json)
    if trace is not None:
        write_trace(result, trace)
    if html is not None:
        write_estimate(result, html)
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
    from paraplan.api.traced_memory import trace_stages  # torch, which an estimate does without

    def say(stage: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"running pipeline stage {stage} of {plan.pp} without values ...", err=True)

    return trace_stages(model, plan, training, on_stage=say)


def _print(result: Estimate, traced: list[TracedMemory] | None, *, as_json: bool) -> None:
    compared = result.without_library_workspaces() if traced is not None else ()
    if as_json:
        report = result.to_dict()
        if traced is not None:
            report["traced_memory"] = [memory.model_dump() for memory in traced]
            report["predicted_for_trace"] = [compared[memory.pipeline_stage].model_dump() for memory in traced]
        typer.echo(json.dumps(report, indent=2))
        return
    from paraplan.cli import estimate_tables  # rich, which --json does without

    if not result.is_runnable_framework:
        typer.echo(f"Predicted for {result.workload.framework.title}, which paraplan does not launch:")
    estimate_tables.print_heading(result)
    estimate_tables.print_estimate(result)
    if traced is not None:
        estimate_tables.print_traced(compared, traced)
