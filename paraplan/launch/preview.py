"""`paraplan launch --dry-run`: what would be started, from the arguments. torch is imported only to ask it for GPUs."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paraplan.hardware.catalogue.profile_files import cluster_from_profile, load_machine
from paraplan.launch.accelerate import drives_accelerate
from paraplan.launch.dry_run import CHOSEN_AT_START, LaunchTarget, plan_launch
from paraplan.launch.nodes.hosts import Host, carried_variables, read_host_file
from paraplan.launch.planning import make_plan
from paraplan.launch.request import LaunchRequest, check_request
from paraplan.launch.spec import ArgumentError, LaunchSpec, NodeRange
from paraplan.plan.files import PlanFile
from paraplan.units import printable


def show_dry_run(spec: LaunchSpec) -> int:
    """Print what would be started, on stdout; return the exit status. Raises `CheckFailedError` if it could not run."""
    if spec.profile is None:
        import torch

        from paraplan.launch.run import count_gpus

        num_gpus = count_gpus()
        memory = min((torch.cuda.get_device_properties(index).total_memory for index in range(num_gpus)), default=None)
        target = LaunchTarget(host=socket.gethostname(), num_gpus=num_gpus, gpu_memory_bytes=memory)
    else:
        target = _profile_target(spec.profile)
    if spec.hostfile is not None:
        hosts = read_host_file(Path(spec.hostfile))
        target = replace(target, hosts=tuple(host.name for host in hosts))
        spec = _with_hosts(spec, hosts)
    request = _dry_request(spec, target)
    words = request.nproc_per_node
    if words in ("gpu", "auto") and target.num_gpus:
        ranks = target.num_gpus if request.gpus is None else len(request.gpus)
    elif words.isdigit():
        ranks = int(words)
    else:
        from torch.distributed.run import determine_local_world_size

        ranks = determine_local_world_size(words)
    request = _with_made_plan(request, ranks=ranks)
    plan = plan_launch(request, ranks_per_node=ranks, target=target, drives_accelerate=drives_accelerate(request))
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


def _with_made_plan(request: LaunchRequest, *, ranks: int) -> LaunchRequest:
    """Return the request with the plan that its planner makes, as the start of the job would."""
    if request.planner is None:
        return request
    num_nodes = request.nodes.max
    text = make_plan(request.planner, num_nodes=num_nodes, ranks_per_node=ranks, environment=dict(os.environ))
    return replace(request, file=PlanFile.from_json(text, source="plan"), plan_path=CHOSEN_AT_START)


def _dry_request(spec: LaunchSpec, target: LaunchTarget) -> LaunchRequest:
    profile = spec.profile
    if profile is None:
        return check_request(spec, num_gpus=target.num_gpus, current_folder=Path.cwd())
    return check_request(
        spec,
        num_gpus=target.num_gpus,
        current_folder=Path.cwd(),
        read_gpus=lambda: load_machine(profile).node.gpus,
        environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},  # a profile's GPUs have no UUIDs, only their numbers
    )


def _profile_target(name: str) -> LaunchTarget:
    cluster = cluster_from_profile(name)
    if cluster.gpu.vendor == "cpu":
        return LaunchTarget(host=cluster.name, num_gpus=0, num_cores=None)
    memory = cluster.gpu_memory_bytes
    return LaunchTarget(host=cluster.name, num_gpus=cluster.gpus_per_node, gpu_memory_bytes=memory, num_cores=None)
