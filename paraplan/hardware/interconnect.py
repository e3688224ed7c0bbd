"""Is the interconnect fast, inside a node and between nodes? With the numbers and the threshold that decide."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pydantic import Field

from paraplan.hardware.bus_bandwidth import nearest_nics
from paraplan.hardware.catalogue.machine_files import link_bandwidth
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.topology import GpuLink, NodeTopology
from paraplan.records import Record
from paraplan.units import format_bandwidth, gpus


class InterconnectThresholds(Record):
    """From which bandwidth per GPU and direction an interconnect counts as fast.

    Inside a node 40 GB/s lies above PCIe 4.0 x16 (26 GB/s measured) and below the slowest NVLink bridge (50 GB/s).
    Between nodes 12.5 GB/s is a NIC of 100 Gb/s for each GPU.
    """

    node_bytes_per_s: float = Field(default=40e9, gt=0)
    network_bytes_per_s: float = Field(default=12.5e9, gt=0)


class Verdict(Record):
    """Fast or slow, and why: the bandwidth per GPU and direction, and the threshold that decided."""

    is_fast: bool
    bandwidth_bytes_per_s: float
    threshold_bytes_per_s: float
    because: str


class GpuNics(Record):
    """The NICs nearest to a GPU, the GPUs that have them in common, and this GPU's share of their rate.

    The share is what is left to the GPU when all of them send at once; None where a rate is unknown.
    """

    gpu: int
    nics: tuple[str, ...]
    shared_with: tuple[int, ...]
    share_bytes_per_s: float | None


class InterconnectReport(Record):
    """Report on a cluster's links: verdicts, islands, NICs by GPU, and what is worth a word.

    `node` is None for one GPU and where nothing is known of its links, `network` for one node and without a network.
    """

    node: Verdict | None
    network: Verdict | None
    islands: tuple[tuple[int, ...], ...]
    gpu_nics: tuple[GpuNics, ...]
    remarks: tuple[str, ...]


def describe_interconnect(cluster: Cluster, thresholds: InterconnectThresholds | None = None) -> InterconnectReport:
    """Return whether a cluster's interconnect is fast, with the numbers; thresholds are settable."""
    limits = thresholds or InterconnectThresholds()
    nics = tuple(gpu_nics(cluster.node))
    return InterconnectReport(
        node=node_verdict(cluster, limits),
        network=network_verdict(cluster, limits),
        islands=tuple(tuple(island) for island in cluster.node.nvlink_islands),
        gpu_nics=nics,
        remarks=(*_kind_remarks(cluster), *_link_remarks(cluster.node), *_nic_remarks(nics)),
    )


def node_verdict(cluster: Cluster, thresholds: InterconnectThresholds) -> Verdict | None:
    """Return whether all GPUs of a node are connected fast: the best ring through them decides, by its slowest link.

    None for a single GPU, and where nothing is known of some pair that any ring needs.
    """
    count = cluster.gpus_per_node
    if count < 2:
        return None
    slowest = _ring_bottleneck(cluster)
    if slowest is None:
        return None
    at_once = _links_at_once(cluster, slowest)
    rate = at_once * _rate(cluster, slowest)
    limit = thresholds.node_bytes_per_s
    several = f"{at_once} x " if at_once > 1 else ""
    words = f"{format_bandwidth(rate)} per GPU and direction over {several}{_link_words(slowest)}"
    islands = cluster.node.nvlink_islands
    if islands and not slowest.link_type.is_fast:
        inside = ", ".join("-".join(str(gpu) for gpu in island) for island in islands)
        words += f" (NVLink only inside {inside})"
    return Verdict(
        is_fast=rate >= limit,
        bandwidth_bytes_per_s=rate,
        threshold_bytes_per_s=limit,
        because=f"{words}; fast from {format_bandwidth(limit)}",
    )


def network_verdict(cluster: Cluster, thresholds: InterconnectThresholds) -> Verdict | None:
    """Return whether the nodes are connected fast, by the NICs of a node divided over its GPUs; None if unknown."""
    network = cluster.network
    if cluster.num_nodes == 1 or network is None:
        return None
    rate = network.node_bandwidth_bytes_per_s / cluster.gpus_per_node
    limit = thresholds.network_bytes_per_s
    nics = f"{network.nics_per_node} x {format_bandwidth(network.nic_bandwidth_bytes_per_s)}"
    words = f"{nics} for {gpus(cluster.gpus_per_node)} = {format_bandwidth(rate)} per GPU and direction"
    return Verdict(
        is_fast=rate >= limit,
        bandwidth_bytes_per_s=rate,
        threshold_bytes_per_s=limit,
        because=f"{words}; fast from {format_bandwidth(limit)}",
    )


def gpu_nics(node: NodeTopology) -> list[GpuNics]:
    """Return the nearest NICs of each GPU, in the order of the GPUs."""
    nearest = {gpu.index: tuple(nearest_nics(node, gpu.index)) for gpu in node.gpus}
    users = {nic.name: [gpu for gpu, names in nearest.items() if nic.name in names] for nic in node.nics}
    rate_of = {nic.name: nic.rate_bytes_per_s for nic in node.nics}
    found = []
    for gpu, names in nearest.items():
        shares = [rate / len(users[name]) for name in names if (rate := rate_of[name]) is not None]
        found.append(
            GpuNics(
                gpu=gpu,
                nics=names,
                shared_with=tuple(sorted({other for name in names for other in users[name]} - {gpu})),
                share_bytes_per_s=sum(shares) if shares and len(shares) == len(names) else None,
            )
        )
    return found


def _rate(cluster: Cluster, link: GpuLink) -> float:
    if link.bandwidth_bytes_per_s is not None:
        return link.bandwidth_bytes_per_s
    known = link_bandwidth(cluster.gpu, link.link_type, link.nvlink_count)
    return known if known is not None else cluster.gpu.pcie_bandwidth_bytes_per_s


def _links_at_once(cluster: Cluster, link: GpuLink) -> int:
    """Return over how many links a GPU sends at a time: one to each peer where all pairs have wires of their own.

    Where the links to all peers together are more than the GPU has, they are one switch's (NVSwitch).
    """
    count, peers = cluster.gpus_per_node, cluster.gpus_per_node - 1
    kinds = {(each.link_type, each.nvlink_count) for each in cluster.node.links}
    is_whole = len(kinds) == 1 and len(cluster.node.links) == count * peers // 2 and link.link_type.is_fast
    has_wires = (link.nvlink_count or 1) * peers <= (cluster.gpu.nvlink_count or 0)
    return peers if is_whole and has_wires else 1


def _ring_bottleneck(cluster: Cluster) -> GpuLink | None:
    """Return the slowest link of the best spanning tree: no ring through all GPUs can avoid one as slow.

    Kruskal's tree of the fastest links has the largest possible minimum.
    """
    links = sorted(cluster.node.links, key=lambda link: -_rate(cluster, link))
    home = {gpu.index: gpu.index for gpu in cluster.node.gpus}
    groups = len(home)
    for link in links:
        first, second = home[link.gpu_a], home[link.gpu_b]
        if first != second:
            home = {gpu: first if label == second else label for gpu, label in home.items()}
            groups -= 1
            if groups == 1:
                return link
    return None


def _link_words(link: GpuLink) -> str:
    count = link.nvlink_count or ""
    return f"{link.link_type}{count if link.link_type.is_fast else ''}"


def _kind_remarks(cluster: Cluster) -> list[str]:
    """Say that kinds of GPU are mixed, and by which the cluster is planned."""
    names = sorted({gpu.name for gpu in cluster.node.gpus if gpu.name is not None})
    if len(names) < 2:
        return []
    return [
        f"{len(names)} kinds of GPU ({', '.join(names)}): plans count all as {cluster.gpu.title}, and the least memory"
    ]


def _link_remarks(node: NodeTopology) -> list[str]:
    """Say which NVLinks are unequal, which islands cross sockets, and how many pairs nothing is known of."""
    remarks = []
    counts = sorted({link.nvlink_count for link in node.links if link.link_type.is_fast and link.nvlink_count})
    if len(counts) > 1:
        remarks.append(f"NVLinks of a pair differ: {counts[0]} to {counts[-1]}")
    home = {gpu.index: gpu.numa_node for gpu in node.gpus}
    for island in node.nvlink_islands:
        sockets = {home[gpu] for gpu in island}
        if len(island) < len(node.gpus) and None not in sockets and len(sockets) > 1:
            remarks.append(f"the NVLink island {'-'.join(map(str, island))} crosses NUMA nodes")
    count = len(node.gpus)
    unknown = count * (count - 1) // 2 - len(node.links)
    if unknown > 0:
        remarks.append(f"nothing is known of the links of {unknown} pairs of GPUs")
    return remarks


def _nic_remarks(nics: Sequence[GpuNics]) -> list[str]:
    """Say which GPUs share a NIC while others have more, so that rails are uneven."""
    shares = sorted({round(each.share_bytes_per_s) for each in nics if each.share_bytes_per_s is not None})
    if any(low * 1.01 < high for low, high in pairwise(shares)):
        return [
            f"GPUs have unequal shares of the NICs: {format_bandwidth(shares[0])} to {format_bandwidth(shares[-1])}"
        ]
    return []
