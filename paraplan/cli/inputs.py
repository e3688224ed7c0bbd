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
from paraplan.model.reader import read_model
from paraplan.model.spec import ModelSpec
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
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
    """Return `num_nodes` machines, by default as many as a plan needs."""
    cluster = read_cluster(profile, num_nodes=num_nodes or 1, gpus_per_node=gpus_per_node)
    if num_nodes is not None or plan.world_size <= cluster.num_gpus:
        return cluster
    return read_cluster(
        profile, num_nodes=math.ceil(plan.world_size / cluster.gpus_per_node), gpus_per_node=gpus_per_node
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

    Raises `UsageError` where the model has no longest sequence and none is given.
    """
    length = seq_len or model.max_seq_length
    if length is None:
        raise UsageError(f"{model.name} does not say how long its sequences are", hint="give --seq-len")
    return TrainingSpec(
        global_batch_size=global_batch,
        seq_length=length,
        precision=precision,
        optimizer=optimizer,
        attention=attention,
        compiled=compiled,
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
