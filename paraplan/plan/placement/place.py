"""Which GPU each local rank runs on: tensor-parallel groups on the fastest links, the other axes on the next best.

The cost of an order of GPUs is, summed over the axes, the bytes of the axis divided by the bandwidth of the slowest
link that any of its rings crosses: all groups of an axis wait for the slowest. Rings run through the members of a
group in the order of their ranks (NCCL may find a better ring inside a group; with a good order it need not); a
pipeline sends from each stage to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.errors import PlanError
from paraplan.hardware.cluster import Cluster
from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.plan.placement.links import link_rates, order_cost, ring_edges
from paraplan.plan.placement.order import best_order
from paraplan.plan.placement.traffic import AxisTraffic
from paraplan.plan.ranks import RankGrid
from paraplan.records import Record


class Placement(Record):
    """Local rank i of each node runs on GPU `local_gpus[i]`; `node_order` lists the nodes in the order of their ranks.

    Costs are seconds of the given traffic, `plain_cost` that of GPUs in their own numbering. `slowest_bytes_per_s` is
    the slowest link of each axis. `is_proven` is False where the search gave up before it had seen every possibility.
    """

    local_gpus: tuple[int, ...]
    node_order: tuple[int, ...]
    cost: float
    plain_cost: float
    slowest_bytes_per_s: dict[Axis, float]
    is_proven: bool = True

    @property
    def is_plain(self) -> bool:
        """True where the order of GPUs is that of their numbers."""
        return self.local_gpus == tuple(sorted(self.local_gpus)) and self.local_gpus[:1] in ((), (0,))


def place(
    plan: ParallelPlan,
    cluster: Cluster,
    *,
    traffic: AxisTraffic | None = None,
    node_switches: Sequence[str] | None = None,
) -> Placement:
    """Return the cheapest order of each node's GPUs for a plan, never worse than their own numbering.

    All nodes get the same order, so that ranks of equal local rank share a rail. `node_switches` names the network
    switch of each node: nodes of one switch become neighbours. Raises `PlanError` for a plan that does not fill its
    nodes evenly.
    """
    per_node, num_nodes = _shape(plan, cluster)
    weights = traffic or AxisTraffic()
    grid = RankGrid.of_plan(plan)
    edges = ring_edges(grid, per_node=per_node, wraps_pipeline=plan.virtual_pipeline_size > 1)
    rates = link_rates(cluster)
    plain = tuple(range(per_node))
    plain_cost = order_cost(plain, edges, rates, weights)
    order, is_proven = best_order(edges, rates, weights, per_node=per_node)
    indices = [gpu.index for gpu in cluster.node.gpus]
    return Placement(
        local_gpus=tuple(indices[position] for position in order),
        node_order=_node_order(num_nodes, node_switches),
        cost=order_cost(order, edges, rates, weights),
        plain_cost=plain_cost,
        slowest_bytes_per_s={
            axis: min(rates.rate(edge, order) for edge in edges if edge.axis == axis)
            for axis in dict.fromkeys(edge.axis for edge in edges)
        },
        is_proven=is_proven,
    )


def _shape(plan: ParallelPlan, cluster: Cluster) -> tuple[int, int]:
    """Return the ranks of each node and the nodes that a plan uses."""
    world, gpus = plan.world_size, cluster.gpus_per_node
    if world <= gpus:
        return world, 1
    nodes, rest = divmod(world, gpus)
    if rest or nodes > cluster.num_nodes:
        raise PlanError(
            f"a plan of {world} ranks does not fill {cluster.num_nodes} nodes of {gpus} GPUs evenly",
            hint=f"plan for a multiple of {gpus} ranks, at most {cluster.num_gpus}",
        )
    return gpus, nodes


def _node_order(num_nodes: int, switches: Sequence[str] | None) -> tuple[int, ...]:
    if switches is None:
        return tuple(range(num_nodes))
    if len(switches) < num_nodes:
        raise PlanError(f"node_switches names {len(switches)} nodes, but the plan uses {num_nodes}")
    # Switches with more nodes first: fewer rings then span two of them.
    size = {switch: switches.count(switch) for switch in switches}
    return tuple(
        sorted(range(len(switches)), key=lambda node: (-size[switches[node]], switches[node], node))[:num_nodes]
    )
