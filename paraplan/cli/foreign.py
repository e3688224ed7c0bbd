"""`paraplan estimate --from-deepspeed|--from-accelerate|--from-megatron`: what people run today, and what is faster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from paraplan.cli.html import write_estimate
from paraplan.cli.inputs import (
    calibrated,
    read_cluster,
    read_cluster_for_plan,
    read_trained_model,
    read_training,
)
from paraplan.cli.step_trace import write_trace
from paraplan.cost.estimate import PlanEstimate, estimate_plan
from paraplan.cost.frameworks import habits_of
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError, UsageError
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.interop.export import TARGETS
from paraplan.interop.exported import Subject
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources.accelerate import read_accelerate
from paraplan.interop.sources.deepspeed import read_deepspeed
from paraplan.interop.sources.megatron_lm import read_megatron_lm
from paraplan.plan.files import PlanFile
from paraplan.report.estimate_json import estimate_report
from paraplan.search.search import search
from paraplan.units import format_bytes, format_count, format_seconds

_MOST_CANDIDATES = 50
_WORTH_CHANGING = 1.02

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
    beside = [name for name in (*_FIXED_BY_CONFIGURATION, "plan_path", "trace_memory") if name in given]
    if beside:
        named = " and ".join("--" + name.removesuffix("_path").replace("_", "-") for name in beside)
        raise UsageError(f"{named} beside {foreign.options[0]}, which says it already", hint="leave out one of them")
    profile, nodes, per_node = options["profile"], options["nodes"], options["gpus_per_node"]
    setup = foreign.read(_given(foreign, options, given))
    spec = read_trained_model(options["model"], seq_len=options["seq_len"] or setup.seq_length)
    cluster = read_cluster_for_plan(profile, setup.plan, num_nodes=nodes, gpus_per_node=per_node)
    habits = habits_of(setup.framework)
    found = {"precision": setup.precision, "optimizer": setup.optimizer, "attention": setup.attention}
    choices: dict[str, Any] = {
        name: options[name] if name in given or value is None else value for name, value in found.items()
    }
    if setup.attention is None and "attention" not in given:
        choices["attention"] = habits.default_attention
    choices["compiled"] = options["compiled"]
    training = read_training(
        spec, seq_len=options["seq_len"] or setup.seq_length, global_batch=setup.plan.global_batch_size, **choices
    )
    plain = Workload.of(spec, training, cluster, load_link_speeds())
    ours, theirs = (calibrated(one, options["calibration"]) for one in (plain, replace(plain, habits=habits)))
    now = estimate_plan(theirs, setup.plan)
    others, reason = _alternatives(ours, theirs, setup, now)
    if options["as_json"]:
        typer.echo(json.dumps(_report(setup, theirs, now, others, reason), indent=2))
    else:
        _print(setup, theirs, now, others, reason)
    if options["trace"] is not None:
        write_trace(theirs, now, options["trace"])
    if options["html"] is not None:
        write_estimate(theirs, now, options["html"])
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


def _alternatives(
    workload: Workload, theirs: Workload, setup: Setup, now: PlanEstimate
) -> tuple[dict[str, PlanEstimate], str | None]:
    """Return the plans to compare with, by a name for each, or why there are none.

    One is the tool's own best: the fastest plan, by the tool's habits, that its configuration can express; it is left
    out where it is no faster than what runs. The other is what paraplan recommends for its own runtime.
    """
    if setup.plan.world_size != workload.cluster.num_gpus:
        return {}, f"the configuration uses {setup.plan.world_size} of {workload.cluster.num_gpus} GPUs"
    found = {}
    try:
        for candidate in search(theirs, num_candidates=_MOST_CANDIDATES, explains_failure=False).candidates:
            subject = Subject(file=PlanFile(plan=candidate.plan, training=workload.training))
            if not TARGETS[setup.target].write(subject).gaps:
                best = estimate_plan(theirs, candidate.plan)
                if not now.fits or best.step.step_time_s < now.step.step_time_s:
                    found[f"best of {setup.tool}"] = best
                break
    except NoPlanFitsError as error:
        reason = error.message
    try:
        found["recommended, paraplan"] = search(workload, num_candidates=1).best
    except NoPlanFitsError as error:
        reason = error.message
    return found, None if found else reason


def _print(
    setup: Setup, workload: Workload, now: PlanEstimate, others: dict[str, PlanEstimate], reason: str | None
) -> None:
    from paraplan.cli import estimate_tables  # rich, which --json does without

    for note in setup.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"As {setup.tool} runs it, by its ways of laying out memory and time ({workload.habits.name}):")
    estimate_tables.print_heading(workload, now)
    estimate_tables.print_estimate(workload, now)
    typer.echo("\nWhat would be faster")
    if reason is not None:
        typer.echo(f"  no plan to compare with: {reason}")
        return
    rows = {f"now, {setup.tool}": now} | others
    width = max(map(len, rows))
    for name, estimate in rows.items():
        rate = format_count(float(f"{estimate.step.tokens_per_s_per_gpu:.3g}"))
        typer.echo(
            f"  {name:{width}}  {format_seconds(estimate.step.step_time_s):>7}  {rate:>6} tokens/s/GPU  "
            f"{format_bytes(estimate.peak_memory_bytes):>8}{'' if estimate.fits else ' (does not fit)'}\n"
            f"  {'':{width}}    {estimate.plan.describe()}"
        )
    typer.echo("  " + _verdict(now, others))


def _verdict(now: PlanEstimate, others: dict[str, PlanEstimate]) -> str:
    name, best = min(others.items(), key=lambda pair: pair[1].step.step_time_s)
    ratio = now.step.step_time_s / best.step.step_time_s
    if not now.fits:
        return f"The configuration does not fit; '{name}' does."
    if ratio < _WORTH_CHANGING:
        return "Nothing that was searched is predicted to be over 2 % faster than what runs today."
    return f"'{name}' is predicted to be {ratio:.2f} times as fast as what runs today."


def _report(
    setup: Setup, workload: Workload, now: PlanEstimate, others: dict[str, PlanEstimate], reason: str | None
) -> dict[str, Any]:
    figures = {
        name: {
            "plan": estimate.plan.model_dump(mode="json"),
            "step_time_s": estimate.step.step_time_s,
            "tokens_per_s_per_gpu": estimate.step.tokens_per_s_per_gpu,
            "peak_memory_bytes": estimate.peak_memory_bytes,
            "speedup": now.step.step_time_s / estimate.step.step_time_s,
        }
        for name, estimate in others.items()
    }
    compared = {"from": setup.model_dump(mode="json", exclude={"plan"}), "faster": figures, "not_compared": reason}
    return estimate_report(workload, now) | compared


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlanError(f"cannot read {path}: it is not text", hint="give the configuration file") from None
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
