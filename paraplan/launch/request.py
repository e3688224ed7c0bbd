"""The request of a launch: the arguments checked and completed by the plan, before anything starts."""

from __future__ import annotations

import importlib.machinery
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paraplan.errors import NoGpuError, PlanError, UnsupportedPlanError
from paraplan.launch.planning import (
    CPU_PROFILE,
    PlannerRequest,
    kind_of_gpu,
    planned_gpus,
    planned_layout,
    planner_of,
    why_planned_again,
)
from paraplan.launch.spec import ONE_NODE, ArgumentError, LaunchSpec, NodeRange

if TYPE_CHECKING:  # pydantic costs a tenth of a second, which a launch without a plan need not pay
    from paraplan.hardware.topology import Gpu
    from paraplan.plan.files import PlanFile
    from paraplan.plan.parallel import ParallelPlan

PLAN_VARIABLE = "PARAPLAN_PLAN"
"""Environment variable that gives each rank the absolute path of the plan file."""

METRICS_VARIABLE = "PARAPLAN_METRICS"
"""Environment variable that gives rank 0 the absolute path of the file for its metrics."""

_MOST_WINDOW_S = 86_400.0


@dataclass(frozen=True)
class LaunchRequest:
    """A checked launch: the spec as it was given, and what follows from it, the plan and the machine.

    `nodes` and `nproc_per_node` are the spec's, or else the plan's or the machine's. `gpus` are the devices asked for,
    as CUDA_VISIBLE_DEVICES names them; None for all. `planner` says what to make a plan for
    after the rendezvous; None where there is a plan, or the script makes one.
    """

    spec: LaunchSpec
    nodes: NodeRange
    nproc_per_node: str
    file: PlanFile | None = None
    plan_path: str | None = None
    gpus: tuple[str, ...] | None = None
    planner: PlannerRequest | None = None
    planned_again: str | None = None
    """Why the plan that was given is not the one of this launch."""

    @property
    def plan(self) -> ParallelPlan | None:
        """The plan of the file, None without one."""
        return self.file.plan if self.file is not None else None

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The plan file's estimate for one GPU, None where it has none."""
        return self.file.estimate.peak_memory_bytes if self.file is not None and self.file.estimate else None


def count_gpus() -> int:
    """Return the number of CUDA devices that this process may use; 0 without any. It may start CUDA's driver."""
    import torch  # a launch of processes without it needs none

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_request(
    spec: LaunchSpec,
    *,
    num_gpus: int,
    current_folder: Path,
    read_gpus: Callable[[], Sequence[Gpu]] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> LaunchRequest:
    """Return the launch that `spec` asks for.

    `num_gpus` is the number of GPUs of this node, for the default number of ranks, `read_gpus` lists others than its.
    Raises `ArgumentError` and `PlanError`; nothing has been started then.
    """
    planner = planner_request(spec, num_gpus=num_gpus)
    plan_path = spec.plan_path
    file = read_plan_file(current_folder / plan_path) if plan_path else None
    gpus = _chosen_gpus(spec.gpus, read_gpus=read_gpus, environment=environment)
    if gpus is None and num_gpus and file is not None and not spec.plans_again:
        gpus = planned_gpus(file, read_gpus=read_gpus, environment=environment)
    num_gpus = num_gpus if gpus is None else len(gpus)
    if spec.nproc_per_node is not None:
        _check_local_world(spec.nproc_per_node, num_gpus=num_gpus)
    _check_numbers(spec)
    _check_endpoint(spec)
    _check_preemption(spec, environment)
    check_script(spec, current_folder)
    nodes, nproc_per_node = spec.nodes or ONE_NODE, spec.nproc_per_node or str(max(1, num_gpus))
    why_again = None
    if file is not None and plan_path is not None and spec.plans_again:
        planner = planner_of(file, profile=None if num_gpus else CPU_PROFILE)
        planned_nodes, planned_ranks = planned_layout(file)
        ranks = given_ranks(spec.nproc_per_node, num_gpus) or num_gpus or planned_ranks
        nodes, nproc_per_node = spec.nodes or NodeRange(planned_nodes, planned_nodes), str(ranks)
        why_again = why_planned_again(file, nodes=nodes.max, ranks=ranks, gpu=kind_of_gpu() if num_gpus else None)
        if why_again is not None:
            file = plan_path = None
    elif file is not None and plan_path is not None:
        nodes, nproc_per_node = _layout_of_plan(spec, file, num_gpus=num_gpus, plan_path=plan_path)
    _check_watches_and_spares(spec, nodes)
    return LaunchRequest(
        spec=spec,
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        file=file,
        gpus=gpus,
        planner=planner,
        planned_again=why_again,
        plan_path=str((current_folder / plan_path).resolve()) if plan_path else None,
    )


def planner_request(spec: LaunchSpec, *, num_gpus: int) -> PlannerRequest | None:
    """Return what to make a plan for, None without --model. Raises `ArgumentError` for what contradicts it."""
    options = {
        "--global-batch": ("global_batch_size", spec.global_batch),
        "--seq-len": ("seq_length", spec.seq_len),
        "--precision": ("precision", spec.precision),
        "--optimizer": ("optimizer", spec.optimizer),
        "--attention": ("attention", spec.attention),
    }
    given = {option: pair for option, pair in options.items() if pair[1] is not None}
    if spec.model is None:
        if given:
            raise ArgumentError(
                f"{next(iter(given))} describes the training of a model, and there is no --model",
                hint="name the model; options of the script come after the script",
            )
        return None
    if spec.plan_path is not None:
        contradiction = f"--plan {spec.plan} and --model {spec.model} contradict each other"
        raise ArgumentError(contradiction, hint="give one of them")
    if spec.global_batch is None:
        raise ArgumentError("--model needs --global-batch, the sequences of one step over all GPUs", hint="give both")
    return PlannerRequest(spec.model, dict(given.values()), spec.profile or (None if num_gpus else CPU_PROFILE))


def _chosen_gpus(
    words: str | None, *, read_gpus: Callable[[], Sequence[Gpu]] | None, environment: Mapping[str, str]
) -> tuple[str, ...] | None:
    """Return the devices of `--gpus` as CUDA_VISIBLE_DEVICES names them, chosen as `paraplan topo --gpus` chooses."""
    if words is None:
        return None
    from paraplan.hardware.probe.cuda_devices import cuda_view, select_gpus, visible_devices
    from paraplan.hardware.probe.nvml import read_this_machine  # only --gpus needs the driver's list

    try:
        gpus = read_this_machine().gpus if read_gpus is None else read_gpus()
    except NoGpuError as error:
        raise ArgumentError(f"--gpus {words}: {error.message}", hint="leave it out to train on the CPU") from None
    devices = select_gpus(gpus, words, environment)
    return tuple(visible_devices(devices, cuda_view(gpus, environment)).split(","))


def read_plan_file(path: Path) -> PlanFile:
    """Return the plan file at `path`. Raises `PlanError` where it is missing, unreadable or no plan."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or type(error).__name__) if isinstance(error, OSError) else "it is not text"
        hint = "write one with paraplan recommend -o"
        raise PlanError(f"the plan {path} cannot be read: {reason}", hint=hint) from None
    from paraplan.plan.files import PlanFile

    file = PlanFile.from_json(text, source=str(path))
    if file.framework is not None:
        raise UnsupportedPlanError(
            f"{path} was made for {file.framework}, which paraplan does not launch",
            hint="write it in that framework's words with paraplan export, or make one with paraplan recommend",
        )
    return file


def _check_numbers(spec: LaunchSpec) -> None:
    """Raise `ArgumentError` for numbers below the least, times that are none, and streams that there are not."""
    for option, value, least in (
        ("--max-restarts", spec.max_restarts, 0),
        ("--spare-ranks", spec.spare_ranks, 0),
        ("--guard", spec.guard, 1),
        ("--memory-checkpoint", spec.memory_checkpoint, 1),
    ):
        if value is not None and value < least:
            raise ArgumentError(f"{option} {value} is below the least, {least}", hint=f"use {least} or more")
    for option, time_s, most_s in (
        ("--hang-timeout", spec.hang_timeout, math.inf),
        ("--preempt-window", spec.preempt_window, _MOST_WINDOW_S),
    ):
        if time_s is not None and not 0 < time_s < most_s:
            raise ArgumentError(f"{option} {time_s:g} is not a time to wait", hint="use a number of seconds above 0")
    for option, streams in (("--redirects", spec.redirects), ("--tee", spec.tee)):
        if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", streams):
            ways = "use 1 for stdout, 2 for stderr, 3 for both, 0 for none; or one for each local rank, such as 0:3,1:2"
            raise ArgumentError(f"{option} {streams} is not a set of streams", hint=ways)


def _check_watches_and_spares(spec: LaunchSpec, nodes: NodeRange) -> None:
    """Raise `ArgumentError` where ranks are not such as --hang-timeout and --spare-ranks need."""
    asked = f"--spare-ranks {spec.spare_ranks}"
    if spec.spare_ranks and spec.max_restarts < 1 and nodes.min == nodes.max:
        raise ArgumentError(f"{asked} without --max-restarts: ranks never start again", hint="add --max-restarts 3")
    if spec.hang_timeout is not None and sys.platform != "linux":
        raise ArgumentError("--hang-timeout watches ranks through /proc, which only Linux has", hint="leave it out")
    not_python = {"--no-python": spec.no_python, "--run-path": spec.run_path}
    for option in (option for option, is_given in not_python.items() if is_given and spec.hang_timeout is not None):
        reason = f"--hang-timeout looks at the Python stacks of ranks, which {option} does not give"
        raise ArgumentError(reason, hint="leave one of them out")
    not_ours = {**not_python, "--numa-binding": spec.numa_binding}
    for option in (option for option, is_given in not_ours.items() if is_given and spec.spare_ranks):
        reason = f"{asked} and {option}: a process that stands by runs scripts of Python, on CPUs of the launcher's"
        raise ArgumentError(reason, hint="leave one of them out")


def _check_endpoint(spec: LaunchSpec) -> None:
    taken = {"min_nodes": "--nnodes", "max_nodes": "--nnodes", "run_id": "--rdzv-id", "local_addr": "--local-addr"}
    taken |= {"backend": "--rdzv-backend", "endpoint": "--rdzv-endpoint"}
    for name in (pair.partition("=")[0].strip() for pair in spec.rdzv_conf.split(",")):
        if name in taken:
            raise ArgumentError(f"--rdzv-conf {name} is what {taken[name]} says", hint=f"use {taken[name]} alone")
    if spec.rdzv_backend in ("static", "c10d") and "," in spec.rdzv_endpoint:
        raise ArgumentError(
            f"--rdzv-endpoint {spec.rdzv_endpoint} names several hosts, and the nodes of a job meet at one",
            hint="name the first alone: where it is lost, the job ends with status 75, to be started again",
        )


def _check_preemption(spec: LaunchSpec, environment: Mapping[str, str]) -> None:
    if spec.preempt_notice is None and not spec.requeue:
        return
    from paraplan.launch.preemption import check_requeue, notice_reader  # torch, which a dry run does without

    if spec.preempt_notice is not None:
        notice_reader(spec.preempt_notice)
    if spec.requeue:
        check_requeue(environment)


def _check_local_world(nproc_per_node: str, *, num_gpus: int) -> None:
    if nproc_per_node == "gpu" and num_gpus == 0:
        hint = "give a number to train on the CPU"
        raise ArgumentError("--nproc-per-node gpu, but no GPU is visible here", hint=hint)
    # a name is that of a device type; torch knows which there are
    if not nproc_per_node.isidentifier() and not re.fullmatch("0*[1-9][0-9]*", nproc_per_node):
        what = "starts no rank" if re.fullmatch("-?[0-9]+", nproc_per_node) else "is not a number of ranks"
        hint = "use a number above 0, auto, cpu, gpu or xpu"
        raise ArgumentError(f"--nproc-per-node {nproc_per_node} {what}", hint=hint)


def forks_ranks(spec: LaunchSpec) -> bool:
    """Return whether ranks may be forked under this spec; else they get interpreters of their own."""
    needs_interpreters = spec.start_method == "exec" or spec.no_python or spec.run_path or spec.numa_binding
    return not needs_interpreters and "PYTHON_EXEC" not in os.environ


def check_script(spec: LaunchSpec, current_folder: Path) -> None:
    """Raise `ArgumentError` where there is no such script, module or program."""
    script = spec.training_script
    if spec.module:
        if spec.no_python and not spec.run_path:
            raise ArgumentError("--no-python and --module contradict each other", hint="give one of them")
        if not _has_module(script.partition(".")[0], current_folder):
            raise ArgumentError(f"there is no module {script}", hint="install it, or run from the folder that holds it")
        return
    if spec.no_python and not spec.run_path:
        if shutil.which(script) is None and shutil.which(str(current_folder / script)) is None:
            raise ArgumentError(f"there is no program {script}", hint="give its path, and see that it is executable")
        return
    path = current_folder / script
    if not path.exists():
        near = sorted(file.name for file in path.parent.glob("*.py"))[:5]
        words = f"{path.parent} holds {', '.join(near)}" if near else "check the path"
        raise ArgumentError(f"there is no script {script}", hint=f"options come before the script; {words}")
    if path.is_file() and not os.access(path, os.R_OK):
        raise ArgumentError(f"the script {script} cannot be read", hint="check its permissions")


def _has_module(name: str, folder: Path) -> bool:
    """Whether an interpreter in `folder` finds the module: by its path, or by a hook as editable installations have."""
    if "PYTHON_EXEC" in os.environ:  # the ranks', which may have other packages
        return True
    here = importlib.machinery.PathFinder.find_spec(name, [str(folder)])
    return here is not None or any(finder.find_spec(name, None) is not None for finder in sys.meta_path)


def _layout_of_plan(spec: LaunchSpec, file: PlanFile, *, num_gpus: int, plan_path: str) -> tuple[NodeRange, str]:
    """Return nodes and ranks per node: the given ones, else the plan's. Raises `PlanError` for another world size."""
    world_size = file.plan.world_size
    given = given_ranks(spec.nproc_per_node, num_gpus)
    nodes, ranks = planned_layout(file)
    if spec.nodes is not None or given == world_size:
        nodes = spec.nodes.max if spec.nodes is not None else 1
    if given is not None or world_size % nodes == 0:
        ranks = given or world_size // nodes
    if nodes * ranks != world_size:
        raise PlanError(
            f"the plan {plan_path} ({file.plan.describe()}) is for {world_size} ranks, "
            f"but {nodes} {'node' if nodes == 1 else 'nodes'} with {ranks} ranks each make {nodes * ranks}",
            hint=f"leave out --nproc-per-node and --nnodes, or let --plan auto make one for {nodes * ranks} ranks",
        )
    return spec.nodes or NodeRange(nodes, nodes), str(ranks)


def likely_ranks_per_node(spec: LaunchSpec) -> int | None:
    """Return the ranks per node that `spec` or its plan names, None where only the machine can say.

    torch's libraries fix their number of threads when they are imported, and that number follows from this one.
    """
    if spec.nproc_per_node is not None:
        return int(spec.nproc_per_node) if spec.nproc_per_node.isdigit() else None
    if spec.plan_path is None:
        return None
    try:
        return planned_layout(read_plan_file(Path(spec.plan_path)))[1]
    except PlanError:  # `check_request` reports it
        return None


def given_ranks(nproc_per_node: str | None, num_gpus: int) -> int | None:
    """Return the ranks per node that --nproc-per-node says; None without it, and for a device that only torch knows."""
    if nproc_per_node is None or nproc_per_node.isdigit():
        return None if nproc_per_node is None else int(nproc_per_node)
    if nproc_per_node in ("gpu", "auto") and num_gpus > 0:
        return num_gpus
    return os.cpu_count() or 1 if nproc_per_node in ("cpu", "auto") else None
