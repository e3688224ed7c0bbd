"""This machine as a cluster to plan for."""

from __future__ import annotations

from paraplan.errors import UsageError
from paraplan.hardware.catalogue.real_machines import machine_from_topology
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.probe.nvml import read_this_machine


def cluster_of_this_machine(*, num_nodes: int = 1, gpus_per_node: int | None = None) -> Cluster:
    """Return `num_nodes` machines like this one, each with its first `gpus_per_node` GPUs (all by default).

    Raises `NoGpuError` where there is no GPU, `ProfileError` for a kind of GPU that no profile describes, `UsageError`
    where there are fewer GPUs than asked for.
    """
    node = read_this_machine()
    if gpus_per_node is not None:
        if not 1 <= gpus_per_node <= len(node.gpus):
            raise UsageError(
                f"--gpus-per-node={gpus_per_node}, and this machine has {len(node.gpus)} GPUs",
                hint=f"use 1 to {len(node.gpus)}, or name another machine with --profile",
            )
        node = node.first(gpus_per_node)
    machine = machine_from_topology(node, name=node.hostname or "this-machine")
    return Cluster(name=machine.name, gpu=machine.gpu, node=node, num_nodes=num_nodes, network=machine.network)
