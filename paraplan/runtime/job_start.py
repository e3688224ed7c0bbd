"""How a process comes to its job: the plan, the other ranks, and whether they are there at all."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from paraplan.arguments import checked
from paraplan.errors import PlanError, UnsupportedPlanError, UsageError
from paraplan.plan.fake import FAKE_VARIABLE
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import check_supported, compiled_reason
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.connections import Connections
from paraplan.runtime.job import Job, is_compiled
from paraplan.runtime.mesh import Mesh, build_mesh
from paraplan.runtime.world import (
    DEFAULT_TIMEOUT_S,
    World,
    be_alone,
    join_world,
    leave_group,
    read_world,
    silence_known_noise,
)

PLAN_VARIABLE = "PARAPLAN_PLAN"
PLAN_READ_VARIABLE = "PARAPLAN_PLAN_READ"
"""The file to make once the launcher's plan is read."""
MEASURED_VARIABLE = "PARAPLAN_MEASURED"
"""The file into which rank 0 writes what was measured in the end, for the launcher."""
METRICS_VARIABLE = "PARAPLAN_METRICS"
"""The file that `runtime.init` writes metrics to where it is given none."""
METRICS_EVERY_VARIABLE = "PARAPLAN_METRICS_EVERY"
"""Every how many steps it does, where that is not given."""


@checked
def init(
    plan: ParallelPlan | PlanFile | None = None,
    *,
    strategy: Literal["ddp", "dp"] = "ddp",
    precision: TrainingPrecision | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    metrics: str | Path | None = None,
    metrics_every: int | None = None,
    shows_progress: bool | None = None,
) -> Job:
    """Join the other ranks, if a launcher started any, and return the job.

    The plan is `plan`, else the launcher's (the file that PARAPLAN_PLAN names), else one made on the spot: DDP over all
    ranks, or one process; with `strategy` "dp" one process with DataParallel over all GPUs that it sees. `precision` is
    that of the plan file's training, fp32 where nothing says. A collective that takes longer than `timeout_s` fails.
    Rank 0 appends a line of JSON for every step to the file `metrics`, by default the one that PARAPLAN_METRICS names
    (`paraplan launch --metrics`), and draws a bar where its stderr is a terminal, or as `shows_progress` says. A line
    waits for the GPU: `metrics_every`, by default PARAPLAN_METRICS_EVERY, writes one for every so many steps.

    Raises `PlanError` for a plan of another number of ranks or another precision, `UnsupportedPlanError` for one that
    the runtime cannot execute, and `UsageError` for an environment that no launcher makes or GPUs that are not there.
    """
    silence_known_noise()
    is_fake = FAKE_VARIABLE in os.environ
    world = read_world(os.environ)
    file = PlanFile(plan=plan) if isinstance(plan, ParallelPlan) else plan
    if file is None:
        file = _launched_plan()
    chosen = _plan_on_the_spot(world, strategy) if file is None else file.plan
    if chosen.world_size != world.size:
        raise PlanError(
            f"the plan '{chosen.describe()}' is for {chosen.world_size} ranks, and this job has {world.size}",
            hint=f"start {chosen.world_size} ranks, or make a plan for {world.size}",
        )
    precision = _agreed_precision(precision, file)
    check_supported(chosen, precision=precision, training=None if file is None else file.training)
    if is_compiled(file):
        _check_compilable(chosen)
    check_devices(chosen, torch.cuda.device_count())
    if is_fake and chosen.offload == "none":  # nothing is told apart, whatever torch.cuda says there
        world = replace(world, device=torch.device("cpu"))
    mesh, connections = _joined(chosen, world, timeout_s, is_fake=is_fake)
    kind, measured = Job, os.environ.get(MEASURED_VARIABLE)
    if is_fake:
        from paraplan.runtime.fake.job import FakeJob  # a kind of this job, with much that real runs do without

        kind = FakeJob
    return kind(
        file=file,
        precision=precision,
        mesh=mesh,
        connections=connections,
        metrics=_metrics_file(metrics),
        measured=Path(measured) if measured and not is_fake else None,
        metrics_every=_metrics_every(metrics_every),
        shows_progress=sys.stderr.isatty() if shows_progress is None else shows_progress,
    )


def _joined(plan: ParallelPlan, world: World, timeout_s: float, *, is_fake: bool) -> tuple[Mesh, Connections]:
    """Return the mesh of this rank among the others, and the connections that it was made with."""
    connections = Connections(os.environ.get("MASTER_PORT"))
    if not is_fake and not dist.is_initialized() and (world.is_distributed or plan.gathers_alone):
        if world.is_distributed:
            join_world(world, os.environ, connections, timeout_s=timeout_s)
        else:
            be_alone(world, os.environ)
        atexit.register(leave_group)
    with connections.noted():
        return build_mesh(plan, world), connections


def _plan_on_the_spot(world: World, strategy: Literal["ddp", "dp"]) -> ParallelPlan:
    if strategy == "ddp":
        return ParallelPlan(dp=world.size)
    if world.size > 1:
        raise UsageError(
            f"strategy=dp is DataParallel in one process, and this job has {world.size}",
            hint="start the script without a launcher, or use DDP",
        )
    return ParallelPlan(devices_per_process=max(2, torch.cuda.device_count()))


def check_devices(plan: ParallelPlan, num_gpus: int) -> None:
    """Raise `UsageError` where a process has fewer than the GPUs that DataParallel in it is planned for."""
    if 1 < plan.devices_per_process > num_gpus:
        raise UsageError(
            f"DataParallel in one process divides batches over {plan.devices_per_process} CUDA GPUs, and this process "
            f"sees {num_gpus or 'none'}",
            hint="use DDP: paraplan launch --nproc-per-node N",
        )


def _metrics_file(given: str | Path | None) -> Path | None:
    name = given or os.environ.get(METRICS_VARIABLE)
    if not name:
        return None
    path = Path(name).absolute()
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the metrics", hint="make it, or choose another file")
    return path


def _metrics_every(given: int | None) -> int:
    text = os.environ.get(METRICS_EVERY_VARIABLE) if given is None else str(given)
    if not text:
        return 1
    if not text.isdecimal() or not int(text):
        name = METRICS_EVERY_VARIABLE if given is None else "metrics_every"
        raise UsageError(f"{name}={text} is not a number of steps", hint="give a whole number from 1")
    return int(text)


def _check_compilable(plan: ParallelPlan) -> None:
    """Raise `UnsupportedPlanError` for a plan under which no model's blocks can be compiled."""
    reason = compiled_reason(plan, of_any_model=False)
    if reason is not None:
        raise UnsupportedPlanError(
            f"this runtime cannot execute the plan '{plan.describe()}' with compiled blocks: {reason}",
            hint="make the plan without --compile, or with other degrees",
        )


def _launched_plan() -> PlanFile | None:
    name = os.environ.get(PLAN_VARIABLE)
    if not name:
        return None
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read the plan {name}: {error.strerror}", hint="start with --plan FILE") from None
    if PLAN_READ_VARIABLE in os.environ:
        with suppress(OSError):  # the launcher then says that the plan was not read
            Path(os.environ[PLAN_READ_VARIABLE]).touch()
    return PlanFile.from_json(text, source=name)


def _agreed_precision(precision: TrainingPrecision | None, file: PlanFile | None) -> TrainingPrecision:
    planned = file.training.precision if file is not None and file.training is not None else None
    if precision is not None and planned is not None and precision != planned:
        raise PlanError(
            f"the script asks for precision={precision}, but the plan was made for {planned}",
            hint="leave precision out of runtime.init, or make a plan for it",
        )
    return precision or planned or "fp32"
