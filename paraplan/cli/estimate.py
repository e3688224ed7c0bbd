"""`paraplan estimate`: memory and step time of one plan."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paraplan.api.estimates import Estimate
from paraplan.api.estimates import estimate as estimate_plan
from paraplan.api.plans import load_plan
from paraplan.api.workloads import OWN_RUNTIME, Workload, training_of
from paraplan.cli import completion
from paraplan.cli.choices import HardwareOptions, TrainingChoices
from paraplan.cli.ci import LimitOptions
from paraplan.cli.groups import grouped
from paraplan.cli.inputs import options_given
from paraplan.cli.models import load_shown
from paraplan.cli.old_spellings import OldImportOptions
from paraplan.cli.options import PLAN_PANEL, JsonOption, ModelArgument
from paraplan.cli.outputs import HtmlOption, TraceOption, require_files, write_estimate_files
from paraplan.cli.plan_choices import PlanChoices, plan_count
from paraplan.cli.terminal import show_note
from paraplan.cli.usual_precision import with_precision
from paraplan.errors import UsageError

if TYPE_CHECKING:
    from paraplan.plan.files import PlanFile
    from paraplan.plan.parallel import ParallelPlan
    from paraplan.plan.training import TrainingSpec
    from paraplan.runtime.fake.run import TracedMemory

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class OnePlanOptions:
    """Options of one plan, which a search has not: fields that the search chooses by itself, or a plan file."""

    zero_shards: Annotated[
        int | None,
        plan_count(
            "zero-shards",
            "ZeRO over groups of so many data-parallel ranks, with replicas between them (hybrid sharding).",
            least=2,
        ),
    ] = None
    virtual_stages: Annotated[int, plan_count("virtual-stages", "Stages per pipeline rank.")] = 1
    devices_per_process: Annotated[
        int,
        plan_count("devices-per-process", "GPUs over which one process divides its micro-batches (DataParallel)."),
    ] = 1
    framework: Annotated[
        str,
        typer.Option(
            "--framework",
            metavar="NAME|FILE",
            help="Framework whose memory layout and overlap are assumed: a profile's name or a JSON file; by default "
            "that of the plan file.",
            autocompletion=completion.frameworks,
            rich_help_panel=PLAN_PANEL,
        ),
    ] = OWN_RUNTIME
    plan_path: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            rich_help_panel=PLAN_PANEL,
            help="A plan file in place of the degrees; it also brings the training that it was made for.",
        ),
    ] = None

    measured: Annotated[
        str | None,
        typer.Option(
            "--measured",
            metavar="LOG|SECONDS",
            rich_help_panel=PLAN_PANEL,
            help="What a run of this plan measured, which is kept and corrects later estimates: the log of torchtitan, "
            "Megatron-LM or DeepSpeed, a trainer_state.json, or seconds of a step.",
        ),
    ] = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a plan that no search fixes."""
        return {
            "zero_shards": self.zero_shards,
            "devices_per_process": self.devices_per_process,
            "virtual_pipeline_size": self.virtual_stages,
        }


_PLAN_OPTIONS = (
    *(each.name for each in fields(PlanChoices)),
    *("zero_shards", "virtual_stages", "devices_per_process", "global_batch"),
)


@app.command()
@grouped
def estimate(
    ctx: typer.Context,
    model: ModelArgument,
    *,
    hardware: HardwareOptions,
    training: TrainingChoices,
    plan: PlanChoices,
    one: OnePlanOptions,
    html: HtmlOption = None,
    trace: TraceOption = None,
    trace_memory: Annotated[
        bool,
        typer.Option(
            "--trace-memory",
            help="Also run the plan's own engine on this model, without a GPU or values, and compare its memory; slow.",
        ),
    ] = False,
    limits: LimitOptions,
    old: OldImportOptions,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what else would fit, and the timeline of a pipeline.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict the memory and step time of one plan, part by part.

    Machines are as many as the plan needs, and a rank trains one micro-batch a step, unless told otherwise.

    Example: paraplan estimate llama-3-8b --profile dgx-h100 --seq-len 4096 --dp 8 --zero 3 --micro-batch 2
    """
    require_files(html, trace)
    limits.require()
    given = options_given(ctx)
    if old.is_given:
        from paraplan.cli.import_config import estimate_as_before  # readers and the search, which others do without

        estimate_as_before(
            old, model, hardware, training, given, limits=limits, html=html, trace=trace, as_json=as_json, plan=plan
        )
        return
    seq_len, choices, framework = training.seq_len, training.fields, one.framework
    if one.plan_path is not None:
        file = load_plan(one.plan_path)
        chosen, seq_len, choices = _from_file(one.plan_path, file, given, training)
        framework = framework if "framework" in given else file.framework or framework
    else:
        chosen = plan.plan(training.global_batch, framework, training.task, **one.fields)
    spec = load_shown(model, seq_length=seq_len, micro_batch_size=chosen.micro_batch_size)
    cluster = hardware.cluster_for(chosen.world_size)
    if one.plan_path is None:
        choices = with_precision(training, cluster).fields
    asked = training_of(spec, seq_length=seq_len, global_batch_size=chosen.global_batch_size, **choices)
    if one.plan_path is None:
        training.say_length(spec, asked.seq_length)
    workload = hardware.calibrated(Workload.of(spec, asked, cluster, framework=framework))
    result = estimate_plan(workload, chosen)
    if one.measured is not None:
        from paraplan.api.history import keep_measured  # readers of logs, which others do without

        show_note(keep_measured(result, one.measured))
    traced = _trace(model, chosen, asked) if trace_memory else None
    _print(result, traced, verbose=verbose, next_step=_next_step(ctx), as_json=as_json)
    write_estimate_files(result, trace=trace, html=html)
    limits.check(result, model=spec.name, file=one.plan_path, as_json=as_json)


def _from_file(
    path: Path, file: PlanFile, given: frozenset[str], training: TrainingChoices
) -> tuple[ParallelPlan, int | None, dict[str, Any]]:
    """Return a plan file's plan and training; of the training, options that were given come first."""
    contradicting = [f"--{name.replace('_', '-')}" for name in _PLAN_OPTIONS if name in given]
    if contradicting:
        raise UsageError(
            f"{' and '.join(contradicting)} beside --plan {path}, which says it already",
            hint="leave out --plan, or the options; the file can be edited",
        )
    if file.training is None:
        return file.plan, training.seq_len, training.fields
    stored = {name: getattr(file.training, name) for name in training.fields}
    return file.plan, training.seq_len or file.training.seq_length, stored | training.asked(given)


def _trace(model: str, plan: ParallelPlan, training: TrainingSpec) -> list[TracedMemory]:
    from paraplan.api.checking import trace_stages  # torch, which an estimate does without

    def say(stage: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"running pipeline stage {stage} of {plan.pp} without values ...", err=True)

    return trace_stages(model, plan, training, on_stage=say)


_SAME_JOB = (
    *("profile", "nodes", "gpus_per_node", "gpu", "num_gpus", "link", "network", "calibration", "seq_len"),
    *("global_batch", "sample_len", "packed", "precision", "optimizer", "train", "task", "base_weights"),
    *("quantizer", "loss", "image_tokens", "audio_tokens", "stack", "offload_activations", "attention"),
    *("linear_precision", "fp8_recipe", "fp8_gather", "expert_load", "compiled"),
    "framework",
)
"""Options of a model's machines, training and framework, which `recommend` has too."""


def _next_step(ctx: typer.Context) -> str:
    """Return the command that searches for a better plan with the same model, machines, training and framework."""
    options = {option.name: option for option in ctx.command.params}
    words: list[str] = []
    for name in (name for name in _SAME_JOB if name in options_given(ctx) and ctx.params[name]):
        value = ctx.params[name]
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [max(options[name].opts, key=len), *([] if one is True else [str(getattr(one, "value", one))])]
    if not ctx.params["global_batch"]:
        words += ["--global-batch", "64"]
    return shlex.join(["paraplan", "recommend", ctx.params["model"], *words])


def _print(
    result: Estimate, traced: list[TracedMemory] | None, *, verbose: bool, next_step: str, as_json: bool
) -> None:
    why = result.unplanned_because
    if why is not None:
        show_note(f"recommend would not plan this for {result.workload.framework.told_as}: {why}")
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
        typer.echo(f"Predicted for {result.workload.framework.told_as}, which paraplan does not launch:")
    estimate_tables.print_heading(result)
    estimate_tables.print_estimate(result, with_details=verbose)
    if traced is not None:
        estimate_tables.print_traced(compared, traced)
    typer.echo(f"\nSearch for a better plan:\n  {next_step}")
