"""What another number of GPUs would change: the best plan on each, for the same batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, PlanError
from paraplan.hardware.cluster import Cluster
from paraplan.search.budget import SizeOffer, size_offer
from paraplan.search.fixed import FREE, Constraints
from paraplan.search.search import search
from paraplan.search.what_fits import smaller_clusters

FACTOR = 4
"""So many times fewer and more GPUs are looked at."""


def scaling(
    workload: Workload,
    *,
    price_per_gpu_hour: float | None = None,
    runnable_only: bool = True,
    fixed: Constraints = FREE,
) -> tuple[SizeOffer, ...]:
    """Return the best plan on fewer and on more GPUs, the fewest first; sizes on which no plan fits are left out.

    The global batch stays: with more GPUs each has less of it.
    """
    offers = []
    for cluster in _sizes(workload.cluster):
        part = replace(workload, cluster=cluster)
        try:
            found = search(part, num_candidates=1, runnable_only=runnable_only, fixed=fixed, explains_failure=False)
        except (NoPlanFitsError, PlanError):  # or what is fixed cannot be had on so many
            continue
        offers.append(size_offer(part, found.best, price_per_gpu_hour=price_per_gpu_hour))
    return tuple(offers)


def _sizes(cluster: Cluster) -> Iterator[Cluster]:
    """Yield clusters in steps of two from a quarter of a cluster's GPUs to four times as many.

    There is no more than one machine of those without a network.
    """
    for smaller in smaller_clusters(cluster):
        if smaller.num_gpus * FACTOR >= cluster.num_gpus:
            yield smaller
    nodes = 2 * cluster.num_nodes
    while cluster.network is not None and nodes <= FACTOR * cluster.num_nodes:
        yield cluster.replace(num_nodes=nodes)
        nodes *= 2
