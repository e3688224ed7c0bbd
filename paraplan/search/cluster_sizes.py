"""Fewer and more of a cluster's machines: a coarse pass in steps of two, then every number between two of these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from paraplan.cost.cost_model import CostModel
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.hardware.cluster import Cluster
from paraplan.plan.executor import Executor
from paraplan.search.constraints import FREE, Constraints
from paraplan.search.degrees import divisors
from paraplan.search.evaluation import Plans, Survey
from paraplan.search.space import PlanSpace

MOST_NODES = 16_384
MOST_BETWEEN = 40
"""So many numbers of GPUs are tried between two of the coarse pass; of more, those at even distances."""


def smaller_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the clusters of fewer GPUs that can be made of a cluster's machines, and itself last.

    First parts of one machine, then machines, in steps of two.
    """
    for count in divisors(cluster.gpus_per_node)[:-1]:
        yield cluster.replace(num_nodes=1, node=cluster.node.first(count))
    nodes = 1
    while nodes < cluster.num_nodes:
        yield cluster.replace(num_nodes=nodes)
        nodes *= 2
    yield cluster


def larger_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield clusters of more of the same machines, in steps of two; none where there is no network between them."""
    nodes = 2 * cluster.num_nodes
    while cluster.network is not None and nodes <= MOST_NODES:
        yield cluster.replace(num_nodes=nodes)
        nodes *= 2


def counts_between(low: int, high: Cluster) -> list[int]:
    """Return the numbers of GPUs more than `low` and fewer than those of `high` that its machines allow.

    Of one machine each number of GPUs, of several whole machines.
    """
    per_node = high.gpus_per_node
    parts = range(low + 1, min(per_node, high.num_gpus))
    return [*parts, *range((low // per_node + 1) * per_node, high.num_gpus, per_node)]


def part_of(cluster: Cluster, num_gpus: int) -> Cluster:
    """Return so many of a cluster's GPUs: the first of one machine, or whole machines."""
    if num_gpus < cluster.gpus_per_node:
        return cluster.replace(num_nodes=1, node=cluster.node.first(num_gpus))
    return cluster.replace(num_nodes=num_gpus // cluster.gpus_per_node)


def first_between(low: int, high: Cluster, suits: Callable[[Cluster], bool]) -> tuple[Cluster, str]:
    """Return the fewest GPUs more than `low` that suit, `high` where none fewer does, and which were tried, in words.

    What suits need not grow with the number: each is asked about, from the fewest on. Of more than `MOST_BETWEEN` those
    are that the largest step leaves.
    """
    between = counts_between(low, high)
    step = math.ceil(len(between) / MOST_BETWEEN) or 1
    tried = between[step - 1 :: step]  # multiples of the step: these divide batches rather than the others
    first = next((part for count in tried if suits(part := part_of(high, count))), high)
    unit = "GPUs" if high.num_nodes == 1 else "machines"
    numbers = f"each number of {unit}" if step == 1 else f"each {step} {unit}"
    also = f", and {numbers} between {low} and {high.num_gpus} GPUs" if between else ""
    return first, f"tried in steps of two{also}"


def least_time_s(workload: Workload, *, executor: Executor, fixed: Constraints = FREE) -> float:
    """Return seconds that every plan of the workload's machines needs for a step, whether it fits or not.

    Infinite where there is no plan.
    """
    plans = _plans_of(workload, executor, fixed)
    return math.inf if plans is None else float(plans.least_s.min(initial=math.inf))


def can_take_less(workload: Workload, limit_s: float, *, executor: Executor, fixed: Constraints = FREE) -> bool:
    """Return whether a plan of the workload's machines that fits takes less than `limit_s` seconds a step."""
    plans = _plans_of(workload, executor, fixed)
    if plans is None:
        return False
    survey = Survey(CostModel.of_workload(workload), plans, num_kinds=1)
    return survey.find(np.ones(len(plans), dtype=bool), at_most_s=limit_s) < limit_s


def _plans_of(workload: Workload, executor: Executor, fixed: Constraints) -> Plans | None:
    """Return the plans of the workload's machines, None where what is fixed cannot be had on so many."""
    workload = CostModel.of_workload(workload)
    try:
        return Plans.of(workload, PlanSpace(workload, executor, fixed))
    except PlanError:
        return None
