"""`paraplan estimate --from-deepspeed|--from-accelerate|--from-megatron`: what people run today, and what is faster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from paraplan.api.estimates import Estimate
from paraplan.api.imported import Alternatives, ImportedPlan, alternatives, import_plan, modelled_for
from paraplan.api.machines import load_cluster, load_cluster_for
from paraplan.api.models import load_model
from paraplan.api.workloads import Workload, training_of
from paraplan.cli.html import write_estimate
from paraplan.cli.inputs import calibrated
from paraplan.cli.step_trace import write_trace
from paraplan.errors import PlanError, UsageError
from paraplan.units import format_bytes, format_count, format_seconds

_FIXED_BY_CONFIGURATION = (
    *("dp", "tp", "pp", "cp", "ep", "zero", "schedule", "virtual_stages", "sequence_parallel", "offload", "framework"),
)


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

    def read(self, **given: Any) -> ImportedPlan:
        """Return what the configuration says. Raises `PlanError` naming the file and key for what is broken."""
        if self.deepspeed is not None:
            return import_plan(self.deepspeed, "deepspeed", **given)
        if self.accelerate is not None:
            return import_plan(self.accelerate, "accelerate", **given)
        assert self.megatron is not None
        return import_plan(self.megatron, "megatron-lm", **given)


def estimate_foreign(foreign: Foreign, options: dict[str, Any], given: frozenset[str]) -> Estimate:
    """Estimate a configuration of another tool for that tool's framework, with paraplan's recommendation beside it.

    `options` are the options of `paraplan estimate`, `given` those that the command line has. Prints, and returns the
    estimate.
    """
    beside = [name for name in (*_FIXED_BY_CONFIGURATION, "plan_path", "trace_memory") if name in given]
    if beside:
        named = " and ".join("--" + name.removesuffix("_path").replace("_", "-") for name in beside)
        raise UsageError(f"{named} beside {foreign.options[0]}, which says it already", hint="leave out one of them")
    imported = foreign.read(**_given(foreign, options, given))
    setup, length = imported.setup, options["seq_len"] or imported.setup.seq_length
    spec = load_model(options["model"], seq_length=length)
    cluster = load_cluster_for(
        imported.plan.world_size,
        options["profile"],
        num_nodes=options["nodes"],
        gpus_per_node=options["gpus_per_node"],
    )
    found = {"precision": setup.precision, "optimizer": setup.optimizer, "attention": setup.attention}
    choices: dict[str, Any] = {
        name: options[name] if name in given or value is None else value for name, value in found.items()
    }
    batch = imported.plan.global_batch_size
    training = training_of(spec, seq_length=length, global_batch_size=batch, compiled=options["compiled"], **choices)
    plain = Workload.of(spec, training, cluster)
    theirs = modelled_for(plain, imported.framework)
    if setup.attention is None and "attention" not in given:
        usual = training.replace(attention=theirs.framework.kernels.default_attention)
        plain, theirs = replace(plain, training=usual), replace(theirs, training=usual)
    path = options["calibration"]
    compared = alternatives(imported, calibrated(theirs, path), calibrated(plain, path))
    if options["as_json"]:
        typer.echo(json.dumps(_report(compared), indent=2))
    else:
        _print(compared)
    if options["trace"] is not None:
        write_trace(compared.now, options["trace"])
    if options["html"] is not None:
        write_estimate(compared.now, options["html"])
    return compared.now


def _given(foreign: Foreign, options: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """Return what the command line says of the setup. The machines are counted where the user named their number."""
    num_gpus = None
    has_number = options["nodes"] is not None or options["gpus_per_node"] is not None
    if has_number or foreign.deepspeed is None or options["profile"] is None:
        nodes = options["nodes"] or 1
        num_gpus = load_cluster(options["profile"], num_nodes=nodes, gpus_per_node=options["gpus_per_node"]).num_gpus
    values = {
        "num_gpus": num_gpus,
        "micro_batch_size": options["micro_batch"] if "micro_batch" in given else None,
        "global_batch_size": options["global_batch"],
        "recompute": options["recompute"].value if "recompute" in given else None,
    }
    if foreign.deepspeed is not None and num_gpus is None:
        return _counted_if_silent(foreign, values, options)
    return values


def _counted_if_silent(foreign: Foreign, values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with one machine's GPUs where DeepSpeed's batch sizes do not tell their number."""
    try:
        foreign.read(**values)
    except PlanError:
        return values | {"num_gpus": load_cluster(options["profile"]).num_gpus}
    return values


def _print(compared: Alternatives) -> None:
    from paraplan.cli import estimate_tables  # rich, which --json does without

    setup, now = compared.setup, compared.now
    for note in setup.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"As {setup.tool} runs it, modelled for {now.workload.framework.title}:")
    estimate_tables.print_heading(now)
    estimate_tables.print_estimate(now)
    typer.echo("\nWhat would be faster")
    if compared.reason is not None:
        typer.echo(f"  no plan to compare with: {compared.reason}")
        return
    rows = {f"now, {setup.tool}": now} | compared.others
    width = max(map(len, rows))
    for name, estimate in rows.items():
        rate = format_count(float(f"{estimate.step.tokens_per_s_per_gpu:.3g}"))
        typer.echo(
            f"  {name:{width}}  {format_seconds(estimate.step.step_time_s):>7}  {rate:>6} tokens/s/GPU  "
            f"{format_bytes(estimate.peak_memory_bytes):>8}{'' if estimate.fits else ' (does not fit)'}\n"
            f"  {'':{width}}    {estimate.plan.describe()}"
        )
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
