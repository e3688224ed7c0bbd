"""Which GPU each local rank runs on: tensor-parallel groups on the fastest links, the other axes on the next best.

The cost of an order of GPUs is, summed over the axes, the bytes of the axis divided by the bandwidth of the slowest
link that any of its rings crosses: all groups of an axis wait for the slowest. Rings run through the members of a
group in the order of their ranks (NCCL may find a better ring inside a group; with a good order it need not); a
pipeline sends from each stage to the next. Every order is tried where they are few enough, else orders are improved
by swaps of two GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations
from math import perm

import numpy as np
import numpy.typing as npt

from paraplan.errors import PlanError
from paraplan.hardware.cluster import Cluster
from paraplan.plan.files import PlannedPlacement
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.placement.links import Edge, LinkRates, link_rates, ring_edges
from paraplan.plan.placement.traffic import AxisTraffic
from paraplan.plan.ranks import RankGrid

MAX_ORDERS = 50_000
"""Orders up to which each one is tried: all of 8 GPUs, and of 4 out of 16."""

NUM_STARTS = 32
"""Orders from which swaps start where there are more: plain numbering and others drawn at random."""

MEAN_SHARE = 1e-3
"""Weight of an axis' mean link beside its slowest in the choice of a swap: it tells one slow link from several."""

ROUNDING = 1e-9
"""Costs that differ by less, relatively, are equal."""

Orders = npt.NDArray[np.intp]
Costs = npt.NDArray[np.float64]


def place(plan: ParallelPlan, cluster: Cluster, *, traffic: AxisTraffic) -> PlannedPlacement:
    """Return the cheapest order of each node's GPUs for a plan, never worse than their own numbering.

    All nodes get the same order, so that ranks of equal local rank share a rail. Raises `PlanError` for a plan that
    does not fill its nodes evenly.
    """
    per_node = _ranks_per_node(plan, cluster)
    edges = ring_edges(RankGrid.of_plan(plan), per_node=per_node, wraps_pipeline=plan.virtual_pipeline_size > 1)
    rates = link_rates(cluster)
    order = best_order(edges, rates, traffic, per_node=per_node)
    return PlannedPlacement(
        local_gpus=tuple(cluster.node.gpus[position].index for position in order),
        slowest_bytes_per_s={
            axis: min(rates.rate(edge, order) for edge in edges if edge.axis == axis)
            for axis in dict.fromkeys(edge.axis for edge in edges)
        },
    )


def _ranks_per_node(plan: ParallelPlan, cluster: Cluster) -> int:
    world, gpus = plan.world_size, cluster.gpus_per_node
    if world <= gpus:
        return world
    nodes, rest = divmod(world, gpus)
    if rest or nodes > cluster.num_nodes:
        raise PlanError(
            f"a plan of {world} ranks does not fill {cluster.num_nodes} nodes of {gpus} GPUs evenly",
            hint=f"plan for a multiple of {gpus} ranks, at most {cluster.num_gpus}",
        )
    return gpus


def best_order(edges: Sequence[Edge], rates: LinkRates, traffic: AxisTraffic, *, per_node: int) -> tuple[int, ...]:
    """Return the cheapest order of GPUs: positions in the node, by local rank.

    Of equally cheap orders it is plain numbering, else the first of those tried. It is exact up to `MAX_ORDERS`.
    """
    num_gpus = len(rates.inside)
    sent = _Traffic(edges, rates, traffic)
    orders = np.array([range(num_gpus)])
    if sent.costs(orders)[0] <= sent.least * (1 + ROUNDING):
        return tuple(range(per_node))
    if perm(num_gpus, per_node) <= MAX_ORDERS:
        orders = np.array(list(permutations(range(num_gpus), per_node)))
    else:
        generator = np.random.default_rng(0)
        starts = [orders[0], *(generator.permutation(num_gpus) for _ in range(NUM_STARTS - 1))]
        orders = np.array([orders[0], *(sent.by_swaps(start, per_node=per_node) for start in starts)])
    costs = sent.costs(orders)
    best = int(np.argmax(costs <= costs.min() * (1 + ROUNDING)))
    return tuple(orders[best, :per_node].tolist())


class _Traffic:
    """Bytes that each axis sends over its pairs of ranks, and the seconds a byte that each link takes."""

    def __init__(self, edges: Sequence[Edge], rates: LinkRates, traffic: AxisTraffic) -> None:
        self.slowness = 1 / np.array(rates)
        fastest = self.slowness.min(axis=(1, 2))
        inside = self.slowness[0][~np.eye(len(rates.inside), dtype=bool)]
        fastest[0] = inside.min(initial=np.inf)
        self.axes = []
        self.least = 0.0
        """Cost below which no order can be: each axis on the fastest links that there are."""
        for axis in dict.fromkeys(edge.axis for edge in edges):
            tables, first, second = np.array([(rates.table(e), e.first, e.second) for e in edges if e.axis == axis]).T
            self.axes.append((traffic.bytes_of(axis), tables, first, second))
            self.least += traffic.bytes_of(axis) * float(fastest[tables].max())

    def costs(self, orders: Orders, *, mean_share: float = 0.0) -> Costs:
        """Return the cost of each order, a row of GPUs: the bytes of each axis by its slowest link."""
        costs = np.zeros(len(orders))
        for num_bytes, tables, first, second in self.axes:
            links = self.slowness[tables, orders[:, first], orders[:, second]]
            costs += num_bytes * (links.max(axis=1) + mean_share * links.mean(axis=1))
        return costs

    def by_swaps(self, start: Orders, *, per_node: int) -> Orders:
        """Return an order that no swap of two GPUs makes cheaper, from `start` by the best swap each time."""
        pairs = [(a, b) for a, b in combinations(range(len(start)), 2) if a < per_node]
        swaps = np.tile(np.arange(len(start)), (len(pairs), 1))
        for row, (a, b) in zip(swaps, pairs, strict=True):
            row[[a, b]] = row[[b, a]]
        order, cost = start, self.costs(start[None], mean_share=MEAN_SHARE)[0]
        while True:
            swapped = order[swaps]
            costs = self.costs(swapped, mean_share=MEAN_SHARE)
            best = int(costs.argmin())
            if costs[best] >= cost * (1 - ROUNDING):
                return order
            order, cost = swapped[best], costs[best]
