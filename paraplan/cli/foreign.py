"""`paraplan estimate --from-deepspeed|--from-accelerate|--from-megatron`: what people run today, and what is faster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paraplan.cli.estimate_report import estimate_report
from paraplan.cli.inputs import (
    check_plan_suits_model,
    check_precision,
    read_cluster,
    read_cluster_for_plan,
    read_training,
)
from paraplan.cost.estimate import PlanEstimate, estimate_plan
from paraplan.cost.habits import habits_of
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError, UsageError
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources.accelerate import read_accelerate
from paraplan.interop.sources.deepspeed import read_deepspeed
from paraplan.interop.sources.megatron_lm import read_megatron_lm
from paraplan.model.reader import read_model
from paraplan.search.search import search
from paraplan.units import format_bytes, format_count, format_seconds

FROM_PANEL = "What another tool is configured for"

FromDeepspeedOption = Annotated[
    Path | None,
    typer.Option("--from-deepspeed", metavar="FILE", help="DeepSpeed's JSON.", rich_help_panel=FROM_PANEL),
]
FromAccelerateOption = Annotated[
    Path | None,
    typer.Option("--from-accelerate", metavar="FILE", help="Accelerate's YAML or JSON.", rich_help_panel=FROM_PANEL),
]
FromMegatronOption = Annotated[
    str | None,
    typer.Option("--from-megatron", metavar="ARGS", help="Megatron-LM's arguments.", rich_help_panel=FROM_PANEL),
]
_FIXED_BY_CONFIGURATION = ("dp", "tp", "pp", "cp", "zero", "schedule", "virtual_stages", "sequence_parallel", "offload")


class Foreign:
    """The configuration that the command line names, if any, and the options that were given beside it."""

    def __init__(self, *, deepspeed: Path | None, accelerate: Path | None, megatron: str | None) -> None:
        self.deepspeed, self.accelerate, self.megatron = deepspeed, accelerate, megatron
        names = {"--from-deepspeed": deepspeed, "--from-accelerate": accelerate, "--from-megatron": megatron}
        self.options = [name for name, value in names.items() if value is not None]
        if len(self.options) > 1:
            raise UsageError(f"{' and '.join(self.options)} contradict each other", hint="give one of them")

    def __bool__(self) -> bool:
        return bool(self.options)

    def read(self, given: Given) -> Setup:
        """Return what the configuration says. Raises `PlanError` naming the file and key for what is broken."""
        if self.deepspeed is not None:
            return read_deepspeed(_read(self.deepspeed), source=str(self.deepspeed), given=given)
        if self.accelerate is not None:
            folder = self.accelerate.parent
            return read_accelerate(
                _read(self.accelerate),
                source=str(self.accelerate),
                given=given,
                read_file=lambda name: _read(folder / name if (folder / name).exists() else Path(name)),
            )
        assert self.megatron is not None
        return read_megatron_lm(self.megatron, source="--from-megatron", given=given)


def estimate_foreign(foreign: Foreign, options: dict[str, Any], given: frozenset[str]) -> PlanEstimate:
    """Price a configuration of another tool by that tool's habits, with paraplan's recommendation beside it.

    `options` are the options of `paraplan estimate`, `given` those that the command line has. Prints, and returns the
    estimate.
    """
    beside = [name for name in (*_FIXED_BY_CONFIGURATION, "plan_path", "trace") if name in given]
    if beside:
        named = " and ".join("--" + name.removesuffix("_path").replace("_", "-") for name in beside)
        raise UsageError(f"{named} beside {foreign.options[0]}, which says it already", hint="leave out one of them")
    profile, nodes, per_node = options["profile"], options["nodes"], options["gpus_per_node"]
    setup = foreign.read(_given(foreign, options, given))
    spec = read_model(options["model"], seq_length=options["seq_len"] or setup.seq_length)
    cluster = read_cluster_for_plan(profile, setup.plan, num_nodes=nodes, gpus_per_node=per_node)
    check_plan_suits_model(setup.plan, spec)
    habits = habits_of(setup.framework)
    found = {"precision": setup.precision, "optimizer": setup.optimizer, "attention": setup.attention}
    choices: dict[str, Any] = {
        name: options[name] if name in given or value is None else value for name, value in found.items()
    }
    if setup.attention is None and "attention" not in given:
        choices["attention"] = habits.default_attention
    check_precision(choices["precision"], cluster.gpu)
    training = read_training(
        spec, seq_len=options["seq_len"] or setup.seq_length, global_batch=setup.plan.global_batch_size, **choices
    )
    ours = Workload.of(spec, training, cluster, load_link_speeds())
    theirs = replace(ours, habits=habits)
    now = estimate_plan(theirs, setup.plan)
    _print(setup, theirs, now, _recommended(ours, setup), as_json=options["as_json"])
    return now


def _given(foreign: Foreign, options: dict[str, Any], given: frozenset[str]) -> Given:
    """Return what the command line says of the setup. The machines are counted where the user named their number."""
    num_gpus = None
    has_number = options["nodes"] is not None or options["gpus_per_node"] is not None
    if has_number or foreign.deepspeed is None or options["profile"] is None:
        nodes = options["nodes"] or 1
        num_gpus = read_cluster(options["profile"], num_nodes=nodes, gpus_per_node=options["gpus_per_node"]).num_gpus
    values = Given(
        num_gpus=num_gpus,
        micro_batch_size=options["micro_batch"] if "micro_batch" in given else None,
        global_batch_size=options["global_batch"],
        recompute=options["recompute"].value if "recompute" in given else None,
    )
    if foreign.deepspeed is not None and num_gpus is None:
        return _counted_if_silent(foreign, values, options)
    return values


def _counted_if_silent(foreign: Foreign, values: Given, options: dict[str, Any]) -> Given:
    """Return `values` with one machine's GPUs where DeepSpeed's batch sizes do not tell their number."""
    one_machine = values.replace(num_gpus=read_cluster(options["profile"], num_nodes=1, gpus_per_node=None).num_gpus)
    try:
        foreign.read(values)
    except PlanError:
        return one_machine
    return values


def _recommended(workload: Workload, setup: Setup) -> PlanEstimate | str:
    """Return paraplan's best plan for the same training on the same number of GPUs, or why there is none."""
    used = workload
    if setup.plan.world_size != workload.cluster.num_gpus:
        return f"the configuration uses {setup.plan.world_size} of {workload.cluster.num_gpus} GPUs"
    try:
        return search(used, num_candidates=1).best
    except NoPlanFitsError as error:
        return error.message


def _print(setup: Setup, workload: Workload, now: PlanEstimate, best: PlanEstimate | str, *, as_json: bool) -> None:
    if as_json:
        report = estimate_report(workload, now)
        report["from"] = setup.model_dump(mode="json", exclude={"plan"})
        report["recommended"] = _figures(best) if isinstance(best, PlanEstimate) else None
        report["speedup"] = now.step.step_time_s / best.step.step_time_s if isinstance(best, PlanEstimate) else None
        typer.echo(json.dumps(report, indent=2))
        return
    from paraplan.cli import estimate_tables  # rich, which --json does without

    typer.echo(f"As {setup.tool} runs it, by its ways of laying out memory and time ({workload.habits.name}):")
    for note in setup.notes:
        typer.echo(f"note: {note}", err=True)
    estimate_tables.print_heading(workload, now)
    estimate_tables.print_estimate(workload, now)
    typer.echo("\nWhat would be faster")
    if isinstance(best, str):
        typer.echo(f"  no plan to compare with: {best}")
        return
    rows = ((f"now, {setup.tool}", now), ("recommended, paraplan", best))
    width = max(len(name) for name, _ in rows)
    for name, estimate in rows:
        rate, peak = estimate.step.tokens_per_s_per_gpu, estimate.peak_memory_bytes
        typer.echo(
            f"  {name:{width}}  {format_seconds(estimate.step.step_time_s):>7}  {format_count(rate):>6} tokens/s/GPU  "
            f"{format_bytes(peak):>8}{'' if estimate.fits else ' (does not fit)'}  {estimate.plan.describe()}"
        )
    typer.echo("  " + _verdict(now, best))


def _verdict(now: PlanEstimate, best: PlanEstimate) -> str:
    ratio = now.step.step_time_s / best.step.step_time_s
    if now.fits and ratio < 1.02:
        return "What runs today is as fast as the recommended plan."
    word = f"{ratio:.2f} times as fast" if now.fits else "fits, which the configuration does not"
    return f"The recommended plan is predicted to be {word}." if now.fits else f"The recommended plan {word}."


def _figures(estimate: PlanEstimate) -> dict[str, Any]:
    return {
        "plan": estimate.plan.model_dump(mode="json"),
        "step_time_s": estimate.step.step_time_s,
        "tokens_per_s_per_gpu": estimate.step.tokens_per_s_per_gpu,
        "peak_memory_bytes": estimate.peak_memory_bytes,
        "fits": estimate.fits,
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlanError(f"cannot read {path}: it is not text", hint="give the configuration file") from None
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
