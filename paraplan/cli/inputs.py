"""From the values of options to the records that the planner takes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import typer
from pydantic import ValidationError

from paraplan.cost.workload import Workload
from paraplan.errors import PlanError, UsageError
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.profiles import GpuProfile
from paraplan.model.reader import read_model
from paraplan.model.spec import ModelSpec
from paraplan.plan.context_heads import context_reason
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import experts_reason
from paraplan.plan.training import TrainingSpec


def read_cluster(profile: str | None, *, num_nodes: int, gpus_per_node: int | None) -> Cluster:
    """Return the machines that a profile names, or this machine's GPUs where none is named."""
    from paraplan.hardware.profile_files import cluster_from_profile

    if profile is not None:
        return cluster_from_profile(profile, num_nodes=num_nodes, gpus_per_node=gpus_per_node)
    from paraplan.hardware.this_machine import cluster_of_this_machine

    return cluster_of_this_machine(num_nodes=num_nodes, gpus_per_node=gpus_per_node)


def read_cluster_for_plan(
    profile: str | None, plan: ParallelPlan, *, num_nodes: int | None, gpus_per_node: int | None
) -> Cluster:
    """Return the machines of a plan: `num_nodes` of them, by default as many as it needs.

    Raises `PlanError` where the plan has more ranks than the machines have GPUs.
    """
    cluster = read_cluster(profile, num_nodes=num_nodes or 1, gpus_per_node=gpus_per_node)
    if plan.devices_per_process > cluster.gpus_per_node:
        raise PlanError(
            f"one process divides its micro-batches over {plan.devices_per_process} GPUs, and {cluster.name} has "
            f"{cluster.gpus_per_node}",
            hint=f"use --devices-per-process {cluster.gpus_per_node}",
        )
    if plan.world_size <= cluster.num_gpus:
        return cluster
    needed = math.ceil(plan.world_size / cluster.gpus_per_node)
    if num_nodes is None:
        return read_cluster(profile, num_nodes=needed, gpus_per_node=gpus_per_node)
    raise PlanError(
        f"the plan has dp {plan.dp} x tp {plan.tp} x pp {plan.pp} x cp {plan.cp} = {plan.world_size} ranks, and "
        f"{num_nodes} x {cluster.name} has {cluster.num_gpus} GPUs",
        hint=f"use --nodes {needed}, or a plan of at most {cluster.num_gpus} ranks",
    )


def calibrated(workload: Workload, path: Path | None) -> Workload:
    """Return a workload with the constants of a calibration file, as it is without one; raise `PlanError` for no file.

    Raises `PlanError` also for a file that holds no calibration.
    """
    if path is None:
        return workload
    from paraplan.cost.calibration import read_calibration  # readers of runs, which most calls do without

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanError(f"cannot read {path}: {reason}", hint="write one with paraplan calibrate --runs -o") from None
    return read_calibration(text, source=str(path)).applied_to(workload)


def options_given(ctx: typer.Context) -> frozenset[str]:
    """Return the names of the parameters that the command line gave, those left at their defaults not."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def check_precision(precision: str, gpu: GpuProfile) -> None:
    """Raise `UsageError` where a GPU has no arithmetic of a precision, with those that it has."""
    known = {name: name in gpu.peak_flops_per_s for name in ("bf16", "fp16", "fp32")}
    if not known[precision]:
        others = " or ".join(f"--precision {name}" for name, is_there in known.items() if is_there)
        raise UsageError(f"{gpu.title} has no {precision} arithmetic", hint=f"use {others}")


def require_batch(global_batch: int | None, cluster: Cluster) -> int:
    """Return the global batch; raise `UsageError` where none is given."""
    if global_batch is None:
        raise UsageError(
            "--global-batch is missing: the sequences of one step over all GPUs",
            hint=f"for example --global-batch {8 * cluster.num_gpus}",
        )
    return global_batch


def read_trained_model(
    reference: str, *, seq_len: int | None, micro_batch_size: int = 1, finds_length: bool = False
) -> ModelSpec:
    """Return the model as it is trained on sequences of `seq_len` tokens, by default its longest.

    What layers with a sliding window keep depends on the length, so that a default is read as if it were given. Where
    the length is searched for (`finds_length`), they keep the masks of sequences longer than the window.
    """
    model = read_model(reference, seq_length=seq_len, micro_batch_size=micro_batch_size)
    longest = model.max_seq_length
    has_windows = any(run.block.attention is not None and run.block.attention.window for run in model.runs)
    is_final = (seq_len is not None and not finds_length) or longest is None or longest <= (seq_len or 0)
    if is_final or not has_windows:
        return model
    return read_model(reference, seq_length=longest, micro_batch_size=micro_batch_size)


def read_training(
    model: ModelSpec,
    *,
    seq_len: int | None,
    global_batch: int,
    precision: str,
    optimizer: str,
    attention: str,
    compiled: bool,
) -> TrainingSpec:
    """Return the training spec; the sequence length defaults to the model's longest.

    Raises `UsageError` where the model has no longest sequence and none is given, and for a sequence that is longer
    than a table of learned positions; rotary and other computed positions have no end.
    """
    length = seq_len or model.max_seq_length
    if length is None:
        raise UsageError(f"{model.name} does not say how long its sequences are", hint="give --seq-len")
    longest = model.max_seq_length
    if longest is not None and length > longest and model.has_learned_positions:
        raise UsageError(
            f"--seq-len {length} is beyond the {longest} learned positions of {model.name}",
            hint=f"use at most --seq-len {longest}",
        )
    return TrainingSpec(
        global_batch_size=global_batch,
        seq_length=length,
        precision=precision,
        optimizer=optimizer,
        attention=attention,
        compiled=compiled,
    )


def check_plan_suits_model(plan: ParallelPlan, model: ModelSpec) -> None:
    """Raise `PlanError` where a plan cannot cut a model: heads that tp does not divide, more stages than blocks."""
    limit = math.gcd(*model.tp_limits)
    if limit and limit % plan.tp:
        fitting = [str(tp) for tp in range(1, limit + 1) if limit % tp == 0]
        raise PlanError(f"tp={plan.tp}: {model.tensor_split_reason(plan.tp)}", hint=f"use {', '.join(fitting)}")
    if plan.num_stages > model.num_blocks:
        raise PlanError(
            f"{plan.num_stages} pipeline stages for the {model.num_blocks} blocks of {model.name}",
            hint=f"use at most {model.num_blocks} stages",
        )
    if plan.stage_blocks is not None and sum(plan.stage_blocks) != model.num_blocks:
        raise PlanError(
            f"stage_blocks sum to {sum(plan.stage_blocks)}, and {model.name} has {model.num_blocks} blocks",
            hint="make the plan again for this model with paraplan recommend",
        )


def check_experts(plan: ParallelPlan, model: ModelSpec) -> None:
    """Raise `PlanError` where expert parallelism does not divide the experts of a model, or it has none."""
    reason, count = experts_reason(model, plan.ep), model.num_experts
    if reason is not None:
        fitting = [str(ep) for ep in range(1, count + 1) if count % ep == 0]
        raise PlanError(f"ep={plan.ep}: {reason}", hint=f"use --ep {' or '.join(fitting)}")


def check_context(plan: ParallelPlan, model: ModelSpec) -> None:
    """Raise `PlanError` where context parallelism cannot exchange tokens for the heads of a model."""
    reason = context_reason(model, tp=plan.tp, cp=plan.cp)
    if reason is not None:
        fitting = [str(cp) for cp in range(1, 65) if context_reason(model, tp=plan.tp, cp=cp) is None]
        raise PlanError(reason, hint=f"use --cp {', '.join(fitting)}")


def check_plan_suits_sequence(plan: ParallelPlan, training: TrainingSpec) -> None:
    """Raise `PlanError` where context or sequence parallelism does not divide the sequence."""
    if training.seq_length % plan.cp:
        fitting = [str(cp) for cp in range(1, min(training.seq_length, 64) + 1) if training.seq_length % cp == 0]
        raise PlanError(
            f"cp={plan.cp} does not divide the {training.seq_length} tokens of a sequence",
            hint=f"use {', '.join(fitting)}, or another --seq-len",
        )
    tokens = training.seq_length // plan.cp
    if plan.sequence_parallel and tokens % plan.tp:
        raise PlanError(
            f"sequence parallelism: tp={plan.tp} does not divide the {tokens} tokens of a rank",
            hint="leave out --sequence-parallel, or use another --seq-len",
        )


def read_plan_file(path: Path) -> PlanFile:
    """Read a plan file; raise `PlanError` where there is none or it cannot be read."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanError(f"cannot read the plan {path}: {reason}", hint="write one with paraplan recommend -o") from None
    return PlanFile.from_json(text, source=str(path))


def make_plan(**values: object) -> ParallelPlan:
    """Return a plan from the values of options; raise `PlanError` in words where they contradict each other."""
    try:
        return ParallelPlan.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        hint = "paraplan explain plans-and-ranks says what goes together"
        raise PlanError(first["msg"].removeprefix("Value error, "), hint=hint) from None


def require_folder(*paths: Path | None) -> None:
    """Raise `UsageError` where a path that is to be written later is in no folder, or is one: before long work."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            reason = "it is a folder" if path.is_dir() else "there is no such folder"
            raise UsageError(f"cannot write {path}: {reason}", hint="choose a folder that exists and is yours")


def write_beside_and_rename(path: Path, text: str | bytes) -> None:
    """Write a whole file or nothing; raise `UsageError` where the path cannot be written."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(text.encode(errors="replace") if isinstance(text, str) else text)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="choose a folder that exists and is yours"
        ) from None
