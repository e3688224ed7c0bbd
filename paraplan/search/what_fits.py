"""Sizes that would fit: the fewest GPUs, the largest batch, the longest sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from paraplan.cost.capacity import least_state_bytes
from paraplan.cost.cost_model import CostModel
from paraplan.cost.estimate import evaluate_plan, leaves_room
from paraplan.cost.loading import can_load, some_way_loads
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError, PlanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.cluster import Cluster
from paraplan.plan.executor import OWN_RUNTIME, Executor
from paraplan.search.cluster_sizes import MOST_NODES, first_between, smaller_clusters
from paraplan.search.constraints import FREE, Constraints
from paraplan.search.degrees import divisors
from paraplan.search.evaluation import memory_of
from paraplan.search.space import PlanSpace

MOST_GPUS_OF_NODE = 8
"""GPUs of a usual server: more GPUs are more nodes."""
LONGEST_SEQUENCE = 2**24
STEP_TOKENS = 256
"""Sequences are tried in multiples of this."""
OTHER_GPUS = ("rtx-4090", "rtx-5090", "l40s", "a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
"""GPUs that people buy or rent in place of others, slowest first by the bf16 peak of their data sheets."""


def some_plan_fits(
    workload: Workload,
    *,
    executor: Executor = OWN_RUNTIME,
    fixed: Constraints = FREE,
    without_accumulation: bool = False,
    with_room: bool = False,
) -> bool:
    """Return whether any plan of the space fits the workload's machines, and can be loaded there.

    `without_accumulation` counts only plans that take the batch in one micro-batch, `with_room` only those that are
    far enough from the limit, also by what torch's allocator keeps.
    """
    workload = CostModel.of_workload(workload)
    if (
        fixed.offload == "none"
        and least_state_bytes(workload) > workload.cluster.num_gpus * workload.usable_memory_bytes
    ):
        return False
    if not some_way_loads(workload):
        return False
    try:
        for chunk in PlanSpace(workload, executor, fixed).chunks():
            table = _one_micro_batch(chunk.table) if without_accumulation else chunk.table
            if len(table):
                peaks, fitting, beyond_host = memory_of(workload, table)
                rows = np.flatnonzero(fitting & ~beyond_host & can_load(workload, partial(getattr, table)))
                if len(rows) and (not with_room or _leaves_room(workload, table, int(rows[peaks[rows].argmin()]))):
                    return True
    except PlanError:  # what is fixed cannot be had on these machines
        return False
    return False


def _leaves_room(workload: Workload, table: PlanTable, row: int) -> bool:
    return leaves_room(workload, evaluate_plan(workload, table.plan(row)))


def wider_nodes(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield one node of twice as many of a single node's GPUs and more, up to eight, by the name of its profile."""
    count = 2 * cluster.gpus_per_node
    while cluster.num_nodes == 1 and count <= MOST_GPUS_OF_NODE:
        name = f"{count}x{cluster.gpu.name}"
        try:
            yield name, cluster_from_profile(name)
        except ParaplanError:  # there are no machines of so many
            return
        count *= 2


def other_machines(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield as many of the GPUs that people take in place of others, by the name of their profile."""
    for gpu in OTHER_GPUS:
        name = f"{cluster.gpus_per_node}x{gpu}"
        try:
            other = cluster_from_profile(name, num_nodes=cluster.num_nodes)
        except ParaplanError:  # there are no machines of so many
            continue
        if other.gpu.name != cluster.gpu.name:
            yield name, other


def larger_machines(workload: Workload, *, executor: Executor, fixed: Constraints) -> tuple[str, Cluster] | None:
    """Return as many GPUs with more memory on which some plan fits, the slowest, by their profile's name."""
    for name, other in other_machines(workload.cluster):
        is_larger = other.gpu_memory_bytes > workload.cluster.gpu_memory_bytes
        if is_larger and some_plan_fits(replace(workload, cluster=other), executor=executor, fixed=fixed):
            return name, other
    return None


def fewest_gpus(
    workload: Workload, *, executor: Executor = OWN_RUNTIME, fixed: Constraints = FREE
) -> tuple[Cluster, str] | None:
    """Return the smallest cluster of the workload's machines on which some plan fits, and which were tried, in words.

    None where none up to the workload's own does. Numbers are tried downwards: that a plan fits is known soon, that
    none does when all were looked at.
    """

    def fits_on(cluster: Cluster) -> bool:
        return some_plan_fits(replace(workload, cluster=cluster), executor=executor, fixed=fixed)

    fitting, too_small = None, 0
    for cluster in reversed(list(smaller_clusters(workload.cluster))):
        if fits_on(cluster):
            fitting = cluster
        elif fitting is not None or cluster.num_gpus < workload.cluster.num_gpus:
            too_small = cluster.num_gpus
            break
    return None if fitting is None else first_between(too_small, fitting, fits_on)


def fewest_nodes(workload: Workload, *, executor: Executor = OWN_RUNTIME, fixed: Constraints = FREE) -> int | None:
    """Return the least number of nodes, doubling from the workload's, on which some plan fits.

    None where none up to 16,384 does, and for machines without a network, of which there cannot be more than one. The
    batch grows with the nodes where they are more than it has sequences.
    """
    nodes = workload.cluster.num_nodes
    if workload.cluster.network is None:
        return None
    while nodes <= MOST_NODES:
        larger = replace(workload, cluster=workload.cluster.replace(num_nodes=nodes))
        if some_plan_fits(larger, executor=executor, fixed=fixed):
            return nodes
        nodes *= 2
    return None


def more_gpus(
    workload: Workload, *, executor: Executor = OWN_RUNTIME, fixed: Constraints = FREE
) -> tuple[str, Cluster] | None:
    """Return the least of more of the same GPUs on which some plan fits, and the options that ask for them.

    A node of fewer than eight GPUs is filled before there are more of it. None where none up to 16,384 nodes does.
    """
    for name, cluster in wider_nodes(workload.cluster):
        if some_plan_fits(replace(workload, cluster=cluster), executor=executor, fixed=fixed):
            return f"--profile {name}", cluster
    nodes = fewest_nodes(workload, executor=executor, fixed=fixed)
    return None if nodes is None else (f"--nodes {nodes}", workload.cluster.replace(num_nodes=nodes))


def largest_batch(workload: Workload, *, executor: Executor = OWN_RUNTIME, fixed: Constraints = FREE) -> int | None:
    """Return the most sequences that some plan takes in one micro-batch, a multiple of the GPUs where it is that many.

    Gradient accumulation makes any batch fit that its share fits. None where not even one sequence does.
    """

    def is_fitting(size: int) -> bool:
        training = workload.training.replace(global_batch_size=size)
        return some_plan_fits(
            replace(workload, training=training), executor=executor, fixed=fixed, without_accumulation=True
        )

    gpus = workload.cluster.num_gpus
    if is_fitting(gpus):
        return gpus * _most(lambda count: is_fitting(gpus * count), limit=2**20)
    fitting = [size for size in divisors(gpus) if is_fitting(size)]
    return max(fitting, default=None)


def longest_sequence(
    workload: Workload, *, executor: Executor = OWN_RUNTIME, fixed: Constraints = FREE, with_room: bool = False
) -> int | None:
    """Return the longest sequence that some plan trains with the workload's batch, in multiples of 256 tokens.

    A table of learned positions limits it. None where no such sequence fits. `with_room` counts only plans that are
    far enough from the limit.
    """
    model = workload.model
    limit = model.max_seq_length if model.has_learned_positions and model.max_seq_length else LONGEST_SEQUENCE

    def is_fitting(steps: int) -> bool:
        training = workload.training.replace(seq_length=steps * STEP_TOKENS)
        return some_plan_fits(replace(workload, training=training), executor=executor, fixed=fixed, with_room=with_room)

    if limit < STEP_TOKENS or not is_fitting(1):
        return None
    return STEP_TOKENS * _most(is_fitting, limit=limit // STEP_TOKENS)


def _most(is_fitting: Callable[[int], bool], *, limit: int) -> int:
    """Return the largest number up to `limit` that fits, where 1 does, to within a 32nd of it.

    Numbers are doubled until one does not fit, and the gap is halved.
    """
    low = 1
    while 2 * low <= limit and is_fitting(2 * low):
        low *= 2
    high = min(2 * low, limit + 1)
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if is_fitting(middle) else (low, middle)
    return low


def _one_micro_batch(table: PlanTable) -> PlanTable:
    return table.select(np.asarray(table.num_microbatches == 1))
