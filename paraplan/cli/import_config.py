"""`paraplan import`: another tool's configuration as a plan, what it costs, and what would be faster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paraplan.api.imported import SCRIPTS, Alternatives, ImportedPlan, Tool, alternatives, import_plan, workloads_of
from paraplan.api.workloads import Workload, training_of
from paraplan.cli.choices import HardwareOptions, TrainingChoices
from paraplan.cli.groups import grouped
from paraplan.cli.inputs import options_given, require_folder, write_beside_and_rename
from paraplan.cli.models import known_model, load_shown
from paraplan.cli.options import PLAN_PANEL, JsonOption, RecomputeName, one_of
from paraplan.cli.outputs import write_estimate_files
from paraplan.cli.plan_choices import plan_count
from paraplan.cli.terminal import show_note
from paraplan.errors import PlanError, UsageError
from paraplan.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from paraplan.cli.ci import LimitOptions
    from paraplan.cli.old_spellings import OldImportOptions
    from paraplan.cli.plan_choices import PlanChoices

app = typer.Typer(add_completion=False)


@app.command(name="import")
@grouped
def import_config(
    ctx: typer.Context,
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|ARGS",
            help="DeepSpeed's JSON, accelerate's YAML or JSON, the YAML or a script with the command of TRL, "
            "LLaMA-Factory or ms-swift, axolotl's YAML, torchtitan's TOML or config_registry.py:NAME, "
            "peft's adapter_config.json, a script with Megatron-LM's command (and the script's own arguments), or "
            "those of Megatron-LM after --.",
        ),
    ],
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="What is trained, as recommend takes it.")
    ] = None,
    *,
    hardware: HardwareOptions,
    training: TrainingChoices,
    micro_batch: Annotated[
        int | None,
        plan_count("micro-batch", "Sequences of one micro-batch, where the script decides."),
    ] = None,
    recompute: Annotated[
        RecomputeName | None,
        typer.Option(
            "--recompute",
            metavar="WHAT",
            help=f"Activation checkpointing, where the script decides: {one_of(RecomputeName)}.",
            rich_help_panel=PLAN_PANEL,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Write the plan to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read another tool's configuration as a plan; with --model also say what it costs and what would be faster.

    Example: paraplan import ds_config.json --model llama-3-8b --profile dgx-h100 -o plan.json
    """
    require_folder(output)
    is_script = len(source) > 1 and Path(source[0]).suffix in SCRIPTS
    text, words = (source[0], source[1:]) if is_script else (" ".join(source), [])
    imported = _read(text, None, hardware, training, micro_batch=micro_batch, recompute=recompute, arguments=words)
    if model is None and _names_machine(hardware):
        model = known_model(imported.setup.model_name)
    if model is None:
        compared = None
        file = imported.plan_file(training.seq_len)
    else:
        compared = _compare(imported, model, hardware, training, options_given(ctx))
        file = compared.plan_file()
    if output is not None:
        write_beside_and_rename(output, file.to_json() + "\n")
    if as_json:
        report = _report(compared) if compared is not None else json.loads(file.to_json())
        typer.echo(json.dumps(report, indent=2))
        return
    _print(imported, compared, has_machine=_names_machine(hardware))
    if output is not None and model is not None:
        typer.echo(f"\nplan: {output}; its memory and time by parts: paraplan estimate {model} --plan {output}")


def estimate_as_before(
    old: OldImportOptions,
    model: str,
    hardware: HardwareOptions,
    training: TrainingChoices,
    given: frozenset[str],
    *,
    plan: PlanChoices,
    limits: LimitOptions,
    html: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Answer `paraplan estimate --from-deepspeed|--from-accelerate|--from-megatron`, and say how it is spelled now."""
    named: dict[Tool, str | Path | None] = {
        "deepspeed": old.from_deepspeed,
        "accelerate": old.from_accelerate,
        "megatron-lm": old.from_megatron,
    }
    found = [(tool, value) for tool, value in named.items() if value is not None]
    options = [f"--from-{tool.removesuffix('-lm')}" for tool, _ in found]
    if len(found) > 1:
        raise UsageError(f"{' and '.join(options)} contradict each other", hint="give one of them")
    filled_in = {"micro_batch", "recompute"}
    beside = [name for name in vars(plan) if name in given - filled_in] + sorted({"plan_path", "framework"} & given)
    if beside:
        words = " and ".join("--" + name.removesuffix("_path").replace("_", "-") for name in beside)
        raise UsageError(f"{words} beside {options[0]}, which says it already", hint="leave out one of them")
    ((tool, source),) = found
    show_note(f"estimate {options[0]} is now: paraplan import FILE --model {model}")
    imported = _read(str(source), tool, hardware, training, micro_batch=plan.micro_batch, recompute=plan.recompute)
    compared = _compare(imported, model, hardware, training, given)
    if as_json:
        typer.echo(json.dumps(_report(compared), indent=2))
    else:
        _print(imported, compared)
    write_estimate_files(compared.now, trace=trace, html=html)
    limits.check(compared.now, model=model, file=old.from_deepspeed or old.from_accelerate, as_json=as_json)


def _read(
    source: str,
    tool: Tool | None,
    hardware: HardwareOptions,
    training: TrainingChoices,
    *,
    micro_batch: int | None,
    recompute: RecomputeName | None,
    arguments: Sequence[str] = (),
) -> ImportedPlan:
    """Return what a configuration says. Machines are counted where the user named them, or where it does not say."""
    values: dict[str, Any] = {
        "micro_batch_size": micro_batch,
        "global_batch_size": training.global_batch,
        "recompute": recompute.value if recompute else None,
        "task": training.task,
        "arguments": arguments,
    }
    if hardware.nodes is not None or hardware.gpus_per_node is not None:
        return import_plan(source, tool, num_gpus=hardware.cluster().num_gpus, **values)
    names_machine = _names_machine(hardware)
    try:
        imported = import_plan(source, tool, **values)
        if imported.setup.says_gpus or not names_machine:
            return imported
    except PlanError:
        if not names_machine:
            raise
    return import_plan(source, tool, num_gpus=hardware.cluster().num_gpus, **values)


def _names_machine(hardware: HardwareOptions) -> bool:
    return hardware.profile is not None or hardware.gpu is not None


def _compare(
    imported: ImportedPlan, model: str, hardware: HardwareOptions, training: TrainingChoices, given: frozenset[str]
) -> Alternatives:
    """Return what a configuration costs and what would be faster. Options that are given come first."""
    length = training.seq_len or imported.setup.seq_length
    spec = load_shown(model, seq_length=length)
    imported = imported.for_model(spec)
    setup = imported.setup
    said = training.fields | setup.training | training.asked(given)
    said["packs_samples"] |= setup.packs_samples and training.sample_len is not None
    asked = training_of(spec, seq_length=length, global_batch_size=imported.plan.global_batch_size, **said)
    workload = Workload.of(spec, asked, hardware.cluster_for(imported.plan.world_size))
    has_attention = setup.attention is not None or "attention" in given
    theirs, ours = workloads_of(imported, workload, has_attention=has_attention)
    return alternatives(imported, hardware.calibrated(theirs), hardware.calibrated(ours))


def _print(imported: ImportedPlan, compared: Alternatives | None, *, has_machine: bool = True) -> None:
    for note in (imported if compared is None else compared).setup.notes:
        show_note(note)
    if compared is None:
        trained = f", {imported.setup.train}" if imported.setup.train else ""
        typer.echo(f"{imported.setup.tool}: {imported.plan.describe()}{trained}")
        if imported.setup.model_name is not None:
            typer.echo(
                f"it trains {imported.setup.model_name}: --model says which model is priced, and --profile on what"
            )
        elif has_machine:
            typer.echo("it names no model: --model says which one is priced")
        return
    now = compared.now
    typer.echo(f"As {imported.setup.tool} runs it, predicted for {imported.framework}:")
    from paraplan.cli.estimate_tables import print_heading  # rich, which --json does without

    print_heading(now)
    typer.echo("\nBeside other plans, fastest first")
    if compared.reason is not None:
        typer.echo(f"  no plan to compare with: {compared.reason}")
        return
    unsorted = {f"now, {imported.setup.tool}": now} | compared.others
    rows = dict(sorted(unsorted.items(), key=lambda row: (not row[1].fits, row[1].step.step_time_s)))
    width = max(map(len, rows))
    for name, estimate in rows.items():
        rate = format_count(estimate.step.tokens_per_s_per_gpu)
        typer.echo(
            f"  {name:{width}}  {format_seconds(estimate.step.step_time_s):>7}{' +'[estimate.is_lower_bound]} "
            f"{rate:>6} tokens/s/GPU  "
            f"{format_bytes(estimate.peak_memory_bytes):>8}{'' if estimate.fits else ' (does not fit)'}\n"
            f"  {'':{width}}    {estimate.plan.describe()}"
        )
    if any(estimate.is_lower_bound for estimate in rows.values()):
        typer.echo("  + at least so long, at most so fast")
    typer.echo("  " + compared.verdict)


def _report(compared: Alternatives) -> dict[str, Any]:
    now = compared.now
    figures = {
        name: {
            "plan": estimate.plan.model_dump(mode="json"),
            "step_time_s": estimate.step.step_time_s,
            "tokens_per_s_per_gpu": estimate.step.tokens_per_s_per_gpu,
            "peak_memory_bytes": estimate.peak_memory_bytes,
            "speedup": now.step.step_time_s / estimate.step.step_time_s,
        }
        for name, estimate in compared.others.items()
    }
    setup = compared.setup.model_dump(mode="json", exclude={"plan"})
    return now.to_dict() | {"from": setup, "faster": figures, "not_compared": compared.reason}
