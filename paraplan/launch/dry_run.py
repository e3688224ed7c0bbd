"""`paraplan launch --dry-run`: every rank as it would start, with its host, GPU, place in the plan, and environment."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paraplan.errors import CheckFailedError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.launch.accelerate import accelerate_variables, drives_accelerate
from paraplan.launch.nodes.hosts import Host, carried_variables, read_host_file
from paraplan.launch.planning import make_plan
from paraplan.launch.ranks.limits import threads_per_rank, usable_cores
from paraplan.launch.request import PLAN_VARIABLE, LaunchRequest, check_request, count_gpus, given_ranks
from paraplan.launch.spec import DEFAULT_MASTER_PORT, ArgumentError, LaunchSpec, NodeRange
from paraplan.plan.allocators import segment_variables
from paraplan.plan.files import PlanFile
from paraplan.plan.ranks import RankGrid
from paraplan.plan.support import training_reason, unsupported_reason
from paraplan.units import format_bytes, printable

CHOSEN_AT_START = "<chosen at start>"


@dataclass(frozen=True)
class PlannedRank:
    """One rank as it would start. `gpu` is None on a CPU; axes of one rank are left out of its place and its groups."""

    rank: int
    host: str
    local_rank: int
    gpu: str | None
    coordinates: dict[str, int]
    groups: dict[str, list[int]]
    environment: dict[str, str]
    command: list[str]


@dataclass(frozen=True)
class LaunchTarget:
    """The machines of a dry run. `gpu_memory_bytes` is None where unknown, `num_cores` where they are not at hand.

    `hosts` are the names of the nodes, in their order, where they are known.
    """

    host: str
    num_gpus: int
    gpu_memory_bytes: int | None = None
    num_cores: int | None = field(default_factory=usable_cores)
    hosts: tuple[str, ...] = ()

    def name_of(self, node: int, *, num_nodes: int) -> str:
        """Return the name of a node in what is shown."""
        if node < len(self.hosts):
            return self.hosts[node]
        return self.host if num_nodes == 1 else f"{self.host} {node}"


@dataclass(frozen=True)
class DryRun:
    """The ranks of a launch, and the reasons why it would fail; none if it would not."""

    ranks: list[PlannedRank]
    problems: list[str]
    plan: str | None = None
    carried: list[str] = field(default_factory=list)
    """Names of the variables that the launchers on other hosts get; their values may be secrets."""

    def to_json(self) -> str:
        """Return the dry run as JSON text."""
        ranks = [asdict(rank) for rank in self.ranks]
        carried = {"carried_variables": self.carried} if self.carried else {}
        return json.dumps({"plan": self.plan, "ranks": ranks, "problems": self.problems} | carried, indent=2)

    def render(self) -> str:
        """Return the dry run as text: the environment that all ranks share once, then what differs."""
        shared = set.intersection(*(set(rank.environment.items()) for rank in self.ranks))
        lines = [f"plan: {self.plan}"] if self.plan is not None else []
        lines += [f"{len(self.ranks)} ranks; each runs: {shlex.join(self.ranks[0].command)}", "in every rank:"]
        lines += [f"  {name}={value}" for name, value in sorted(shared)]
        if self.carried:
            lines.append(f"to every host, through standard input, values not shown: {', '.join(self.carried)}")
        for rank in self.ranks:
            where = [f"rank {rank.rank}: host {rank.host}, local rank {rank.local_rank}"]
            where.append(f"GPU {rank.gpu}" if rank.gpu is not None else "CPU")
            if rank.coordinates:
                where.append(" ".join(f"{axis} {position}" for axis, position in rank.coordinates.items()))
            lines.append(", ".join(where))
            lines += [f"  {axis} group: {' '.join(map(str, group))}" for axis, group in rank.groups.items()]
            own = sorted(set(rank.environment.items()) - shared)
            lines.append("  " + " ".join(f"{name}={value}" for name, value in own))
        return "\n".join(lines) + "\n"

    def require_runnable(self) -> None:
        """Raise `CheckFailedError` with the first reason why the launch would fail."""
        if self.problems:
            raise CheckFailedError(self.problems[0], hint="make a plan for these machines: paraplan recommend MODEL")


def plan_launch(request: LaunchRequest, *, ranks_per_node: int, target: LaunchTarget) -> DryRun:
    """Return what the launch of `request` would start with `ranks_per_node` ranks on each node of `target`.

    For an elastic launch (MIN:MAX nodes) it is the start with all nodes.
    """
    num_nodes = request.nodes.max
    grid = RankGrid.of_plan(request.plan) if request.plan else None
    gpus = _gpu_names(request, target)
    axes = [axis for axis in grid.axes if grid.size(axis) > 1] if grid else []
    ranks = []
    for rank in range(num_nodes * ranks_per_node):
        node, local_rank = divmod(rank, ranks_per_node)
        ranks.append(
            PlannedRank(
                rank=rank,
                host=target.name_of(node, num_nodes=num_nodes),
                local_rank=local_rank,
                gpu=gpus[local_rank] if local_rank < len(gpus) else None,
                coordinates={axis: grid.coordinates(rank)[axis] for axis in axes} if grid else {},
                groups={axis: grid.group(axis, rank) for axis in axes} if grid else {},
                environment=_environment(request, rank, ranks_per_node=ranks_per_node, target=target),
                command=_command(request.spec),
            )
        )
    problems = _problems(request, ranks_per_node=ranks_per_node, target=target)
    return DryRun(ranks, problems, plan=request.plan.describe() if request.plan else None)


def _gpu_names(request: LaunchRequest, target: LaunchTarget) -> Sequence[str]:
    return request.gpus if request.gpus is not None else [str(index) for index in range(target.num_gpus)]


def _environment(request: LaunchRequest, rank: int, *, ranks_per_node: int, target: LaunchTarget) -> dict[str, str]:
    """Return what the launcher adds to the environment of a rank, where it is known before the start."""
    spec, num_nodes = request.spec, request.nodes.max
    world_size = str(num_nodes * ranks_per_node)
    default_port = CHOSEN_AT_START if target.hosts else DEFAULT_MASTER_PORT
    is_static = spec.rdzv_backend == "static" and (spec.master_port is not None or num_nodes > 1 or bool(target.hosts))
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "GROUP_RANK": str(rank // ranks_per_node),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": spec.role,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": spec.master_addr if is_static else CHOSEN_AT_START,
        "MASTER_PORT": str(spec.master_port or default_port) if is_static else CHOSEN_AT_START,
    }
    if request.plan_path:
        environment[PLAN_VARIABLE] = request.plan_path
    if request.file is not None and drives_accelerate(request):
        environment |= accelerate_variables(request.file, os.environ)
    if request.file is not None and request.file.training is not None:
        environment |= segment_variables(request.file.training.stack, os.environ)
    if request.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(request.gpus)
    if "OMP_NUM_THREADS" not in os.environ and target.num_cores is not None and ranks_per_node > 1:
        threads = threads_per_rank(num_cores=target.num_cores, ranks_per_node=ranks_per_node)
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def _command(spec: LaunchSpec) -> list[str]:
    words = [spec.training_script, *spec.training_script_args]
    if spec.no_python:
        return words
    return [os.environ.get("PYTHON_EXEC", sys.executable), "-u", *(["-m"] if spec.module else []), *words]


def _problems(request: LaunchRequest, *, ranks_per_node: int, target: LaunchTarget) -> list[str]:
    file, problems = request.file, []
    reason = None if file is None else training_reason(file.training, file.plan) or unsupported_reason(file.plan)
    if reason is not None:
        problems.append(f"paraplan.runtime cannot execute this plan: {reason}")
    num_gpus = len(_gpu_names(request, target))
    if 0 < num_gpus < ranks_per_node:
        problems.append(f"{ranks_per_node} ranks per node, but {target.host} has {num_gpus} GPUs for them")
    predicted, memory = request.predicted_peak_bytes, target.gpu_memory_bytes
    if predicted is not None and memory is not None and predicted > memory:
        problems.append(
            f"the plan needs {format_bytes(predicted)} on a GPU, and one of {target.host} has {format_bytes(memory)}"
        )
    return problems


def show_dry_run(spec: LaunchSpec) -> int:
    """Print what would be started, on stdout; return the exit status. Raises `CheckFailedError` if it could not run."""
    cluster = None if spec.profile is None else cluster_from_profile(spec.profile)
    if cluster is None:
        import torch

        num_gpus = count_gpus()
        memory = min((torch.cuda.get_device_properties(index).total_memory for index in range(num_gpus)), default=None)
        target = LaunchTarget(socket.gethostname(), num_gpus, memory)
    elif cluster.gpu.vendor == "cpu":
        target = LaunchTarget(cluster.name, 0, num_cores=None)
    else:
        target = LaunchTarget(cluster.name, cluster.gpus_per_node, cluster.gpu_memory_bytes, num_cores=None)
    if spec.hostfile is not None:
        hosts = read_host_file(Path(spec.hostfile))
        target = replace(target, hosts=tuple(host.name for host in hosts))
        spec = _with_hosts(spec, hosts)
    of_profile: dict[str, Any] = {}
    if cluster is not None:  # a profile's GPUs have no UUIDs, only their numbers
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        of_profile = {"read_gpus": lambda: cluster.node.gpus, "environment": order}
    request = check_request(spec, num_gpus=target.num_gpus, current_folder=Path.cwd(), **of_profile)
    ranks = given_ranks(request.nproc_per_node, target.num_gpus if request.gpus is None else len(request.gpus))
    if ranks is None:  # the name of another type of device
        from torch.distributed.run import determine_local_world_size

        ranks = determine_local_world_size(request.nproc_per_node)
    if request.planner is not None:  # as the start of the job would
        num_nodes, environment = request.nodes.max, dict(os.environ)
        text = make_plan(request.planner, num_nodes=num_nodes, ranks_per_node=ranks, environment=environment)
        request = replace(request, file=PlanFile.from_json(text, source="plan"), plan_path=CHOSEN_AT_START)
    plan = plan_launch(request, ranks_per_node=ranks, target=target)
    if spec.hostfile is not None:
        plan = replace(plan, carried=carried_variables(os.environ))
    sys.stdout.write(plan.to_json() + "\n" if spec.json else printable(plan.render()))
    plan.require_runnable()
    return 0


def _with_hosts(spec: LaunchSpec, hosts: Sequence[Host]) -> LaunchSpec:
    """Return `spec` with what the launchers on the hosts of its host file would get."""
    slots = list(dict.fromkeys("unknown" if host.slots is None else str(host.slots) for host in hosts))
    if spec.nproc_per_node is None and len(slots) > 1:
        raise ArgumentError(
            f"the slots of the hosts in {spec.hostfile} differ ({', '.join(slots)}), and --dry-run shows nodes alike",
            hint="give --nproc-per-node",
        )
    return replace(
        spec,
        nodes=spec.nodes or NodeRange(len(hosts), len(hosts)),
        nproc_per_node=spec.nproc_per_node or (str(hosts[0].slots) if hosts[0].slots else None),
        master_addr=hosts[0].address,
    )
