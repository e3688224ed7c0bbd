"""How many machines a workload needs."""

from __future__ import annotations

from dataclasses import replace

from paraplan.cost.estimate import fits, peak_memory
from paraplan.cost.workload import Workload
from paraplan.search.space import PlanSpace

MOST_NODES = 1024


def some_plan_fits(workload: Workload) -> bool:
    """Return whether any plan of the space fits the workload's machines."""
    cluster = workload.cluster
    space = PlanSpace(workload.model, workload.training, cluster.num_gpus, cluster.gpus_per_node)
    return any(bool(fits(workload, peak_memory(workload, chunk)).any()) for chunk in space.chunks())


def fewest_nodes(workload: Workload) -> int | None:
    """Return the least number of nodes, doubling from the workload's, on which some plan fits.

    None where none up to 1024 does, and for machines without a network, of which there cannot be more than one.
    """
    nodes = workload.cluster.num_nodes
    if workload.cluster.network is None:
        return None
    while nodes <= MOST_NODES:
        larger = replace(workload, cluster=workload.cluster.replace(num_nodes=nodes))
        if some_plan_fits(larger):
            return nodes
        nodes *= 2
    return None
