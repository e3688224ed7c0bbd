"""Which local ranks send to each other, and over which bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from paraplan.hardware.bus_bandwidth import nearest_nics
from paraplan.hardware.catalogue.machine_files import link_bandwidth
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.interconnect import gpu_nics
from paraplan.hardware.topology import LinkType
from paraplan.plan.parallel import Axis
from paraplan.plan.ranks import RankGrid

PCIE_REACH = {
    LinkType.PIX: 1.0,
    LinkType.PXB: 1.0,
    LinkType.PHB: 0.97,
    LinkType.NODE: 0.95,
    LinkType.SYS: 0.85,
}
"""Share of the rate left on a path over PCIe. Across sockets 50.2 of 56.6 GB/s (local-inference-lab/rtx6kpro on GitHub,
dual EPYC) and 7.1 of 9 (pc2/GPUInspector.jl on GitHub, V100) were measured; the others are assumed, to prefer the
nearer of equal rates."""

CROSS_RAIL = 0.9
"""Share of its rate that a path between nodes keeps where its ends are nearest to different NICs."""


class Edge(NamedTuple):
    """Two local ranks that an axis sends between, inside a node or from one node to another."""

    axis: Axis
    first: int
    second: int
    crosses_nodes: bool


Table = tuple[tuple[float, ...], ...]


class LinkRates(NamedTuple):
    """Bandwidth between GPUs, by position in the node.

    `inside` a node; `between` the GPUs of two nodes in a collective, which chooses the NICs of its rings itself; and
    `sends` from a GPU to another node, which use the NICs of both ends.
    """

    inside: Table
    between: Table
    sends: Table

    def table(self, edge: Edge) -> int:
        """Return which of the tables holds the rate of an edge: 0, 1 or 2."""
        if not edge.crosses_nodes:
            return 0
        return 2 if edge.axis == "pp" else 1

    def rate(self, edge: Edge, order: Sequence[int]) -> float:
        """Return the bandwidth of an edge under an order of positions."""
        return self[self.table(edge)][order[edge.first]][order[edge.second]]


def ring_edges(grid: RankGrid, *, per_node: int, wraps_pipeline: bool) -> list[Edge]:
    """Return what each axis sends between local ranks, each once, for a grid laid over nodes of `per_node` ranks."""
    found: dict[Edge, None] = {}
    for axis in grid.axes:
        size = grid.size(axis)
        if size < 2:
            continue
        closes = size > 2 and (axis != "pp" or wraps_pipeline)
        for group in grid.groups(axis):
            pairs = list(pairwise(group))
            if closes:
                pairs.append((group[-1], group[0]))
            for first, second in pairs:
                low, high = sorted((first % per_node, second % per_node))
                found[Edge(axis, low, high, first // per_node != second // per_node)] = None
    return list(found)


def link_rates(cluster: Cluster) -> LinkRates:
    """Return the bandwidths between all pairs of GPUs of a node, and between GPUs of two nodes by their NICs."""
    gpus = [gpu.index for gpu in cluster.node.gpus]
    inside = tuple(tuple(_inside_rate(cluster, first, second) for second in gpus) for first in gpus)
    share = {each.gpu: each.share_bytes_per_s for each in gpu_nics(cluster.node)}
    nearest = {gpu: nearest_nics(cluster.node, gpu) for gpu in gpus}
    network = cluster.network.node_bandwidth_bytes_per_s / len(gpus) if cluster.network is not None else 1e9
    rate = {gpu: value if (value := share[gpu]) is not None else network for gpu in gpus}
    between = tuple(tuple(min(rate[first], rate[second]) for second in gpus) for first in gpus)
    sends = tuple(
        tuple(
            between[row][column] * (1.0 if nearest[first] == nearest[second] else CROSS_RAIL)
            for column, second in enumerate(gpus)
        )
        for row, first in enumerate(gpus)
    )
    return LinkRates(inside=inside, between=between, sends=sends)


def _inside_rate(cluster: Cluster, first: int, second: int) -> float:
    slow = cluster.gpu.pcie_bandwidth_bytes_per_s
    if first == second:
        return slow  # no edge joins a rank to itself inside a node
    link = cluster.node.link(first, second)
    if link is None:
        return slow * PCIE_REACH[LinkType.SYS]
    rate = link.bandwidth_bytes_per_s or link_bandwidth(cluster.gpu, link.link_type, link.nvlink_count) or slow
    return rate * PCIE_REACH.get(link.link_type, 1.0)
