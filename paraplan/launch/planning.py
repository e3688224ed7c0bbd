"""Plans made for the machines that a launch finds, and made again when their number changes.

The planner is the public API in a process of its own: ranks are forked from the launcher, and must not find the
planner's modules and threads in themselves. Question and answer are JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paraplan
from paraplan.errors import NoGpuError, PlanError

if TYPE_CHECKING:  # pydantic: a tenth of a second for launches without a plan
    from paraplan.hardware.topology import Gpu
    from paraplan.plan.files import PlanFile

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
"""`subprocess.run` for commands of Python, or what does the same."""

CPU_PROFILE = "cpu"
"""The hardware profile that plans are made for where there is no GPU."""

_PATIENCE_S = 600.0  # a model given as code imports torch and is traced


@dataclass(frozen=True)
class PlannerRequest:
    """The training that a plan is asked for: MODEL, and fields of its `TrainingSpec`.

    `profile` is a hardware profile in place of this machine's GPUs, None for these.
    """

    model: str
    training: Mapping[str, object]
    profile: str | None = None


def planner_of(file: PlanFile, *, profile: str | None) -> PlannerRequest:
    """Return what to ask for where the training of a plan file is to be planned again. Raises `PlanError`."""
    training, model = file.training, file.model
    if training is None or model is None:
        hint = "make one with paraplan recommend -o"
        raise PlanError("the plan does not say which model it trains, and how", hint=hint)
    fields = ("global_batch_size", "seq_length", "precision", "optimizer")
    chosen = {name: getattr(training, name) for name in fields}
    return PlannerRequest(model.source or model.name, chosen, profile=profile)


def search_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a Python that is started with `environment` finds this package too."""
    package_folder = str(Path(paraplan.__file__).parent.parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [package_folder, environment.get("PYTHONPATH", "")]))}


def make_plan(
    request: PlannerRequest,
    *,
    num_nodes: int,
    ranks_per_node: int,
    environment: dict[str, str],
    run: RunPython = subprocess.run,
) -> str:
    """Return the text of a plan file for `num_nodes` machines like this one with `ranks_per_node` GPUs each.

    Raises `PlanError` with the planner's own words and its exit status where it finds none.
    """
    machines = {"profile": request.profile, "num_nodes": num_nodes, "gpus_per_node": ranks_per_node}
    try:
        question = json.dumps({**request.training, "model": request.model, **machines})
        done = run_python("paraplan.api", environment=environment, question=question, run=run)
    except subprocess.TimeoutExpired:
        raise PlanError(f"no plan was found within {_PATIENCE_S:.0f} s", hint="give a plan file") from None
    num_ranks = num_nodes * ranks_per_node
    try:
        # What a model's own code prints stands before the answer, which is one line.
        answer = json.loads(done.stdout.rpartition("\n")[2])
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2] or f"the planner ended with status {done.returncode}"
        raise _no_plan(num_ranks, last, status=done.returncode) from None
    if "error" in answer:
        fault = answer["error"]
        raise _no_plan(num_ranks, fault["message"], hint=fault["hint"], status=fault["exit_status"])
    return json.dumps(answer["plan_file"], indent=2) + "\n"


def run_python(
    module: str,
    *words: str,
    environment: Mapping[str, str],
    question: str = "",
    patience_s: float | None = _PATIENCE_S,
    run: RunPython = subprocess.run,
) -> subprocess.CompletedProcess[str]:
    """Run a module of this package in a Python of its own, with `question` as its input. Raises TimeoutExpired."""
    command, env = [sys.executable, "-P", "-m", module, *words], {**environment, **search_path(environment)}
    how: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "check": False}
    return run(command, env=env, input=question, timeout=patience_s, **how)


def planned_layout(file: PlanFile) -> tuple[int, int]:
    """Return nodes and ranks per node that the plan was made for; one node where it does not say."""
    world_size = file.plan.world_size
    cluster = file.cluster
    if cluster is not None and cluster.num_nodes * cluster.gpus_per_node == world_size:
        return cluster.num_nodes, cluster.gpus_per_node
    return 1, world_size


def planned_gpus(
    file: PlanFile, *, read_gpus: Callable[[], Sequence[Gpu]] | None, environment: Mapping[str, str]
) -> tuple[str, ...] | None:
    """Return the devices of a plan for some kinds of a machine's GPUs, as CUDA_VISIBLE_DEVICES names them.

    None for a plan of the first GPUs, and where this machine does not show those of the plan.
    """
    if file.placement is None or not file.placement.skips_gpus:
        return None
    from paraplan.hardware.probe.cuda_devices import cuda_view
    from paraplan.hardware.probe.nvml import read_this_machine

    try:
        gpus = read_this_machine().gpus if read_gpus is None else read_gpus()
        devices = {device.nvml_index: device for device in cuda_view(gpus, environment).devices}
    except NoGpuError:  # no driver lists them
        return None
    if not all(index in devices for index in file.placement.local_gpus):
        return None
    chosen = [devices[index] for index in file.placement.local_gpus]
    return tuple(device.mig_uuid or device.uuid or str(device.nvml_index) for device in chosen)


def why_planned_again(file: PlanFile, *, nodes: int, ranks: int, gpu: str | None) -> str | None:
    """Return in what the machines here differ from those of a plan, None where they do not."""
    planned_nodes, planned_ranks = planned_layout(file)
    plain = file.estimate.plain if file.estimate is not None else None
    other = None if gpu is None or plain is None or plain.gpu == gpu else plain.gpu
    if nodes * ranks == file.plan.world_size and other is None:
        return None
    there = f"{planned_nodes} x {planned_ranks} {other or 'ranks'}"
    return f"the plan is for {there}, and here are {nodes} x {ranks} {gpu if other else 'ranks'}: planning again"


def kind_of_gpu() -> str | None:
    """Return the kind of this node's first GPU as profiles have it."""
    import torch  # only where there is one

    from paraplan.hardware.catalogue.profile_files import profile_name

    return profile_name(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def _no_plan(num_ranks: int, message: str, *, status: int, hint: str | None = None) -> PlanError:
    error = PlanError(f"no plan for {num_ranks} ranks: {message}", hint=hint)
    error.exit_status = status or 1
    return error
