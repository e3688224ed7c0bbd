"""How fast collectives are on the links of a cluster. Bus bandwidth is defined as nccl-tests defines it.

nccl-tests, doc/PERFORMANCE.md: with S the size of a message (of the whole result for all-gather, of the whole input
for reduce-scatter), t the time and n the ranks, bus bandwidth is S/t times 2(n-1)/n for all-reduce, (n-1)/n for
all-gather, reduce-scatter and all-to-all, and 1 for broadcast and send/receive: the rate of the links, whatever n.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import ceil, inf, isclose, log2, sqrt

from pydantic import Field

from paraplan.errors import ProfileError
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.link_speed import LinkSpeedTable
from paraplan.hardware.profiles import Collective, MeasuredRate, NetworkProfile
from paraplan.hardware.topology import GpuLink, LinkType, NodeTopology, connected_groups
from paraplan.records import Record

_MOST_CUT = 8
"""GPUs without a switch of which every part is looked at; of more, each GPU by itself."""


class GroupSpeed(Record):
    """Speed of one group of ranks in one collective: its kind of link decides, between nodes the network's.

    `payload_bytes_per_s` is what the links of one GPU carry at most (of all NICs that the group uses in a node where
    the network decides); both bandwidths are per direction.
    """

    collective: Collective
    num_ranks: int
    kind: str
    payload_bytes_per_s: float
    bus_bandwidth_bytes_per_s: float
    latency_s: float
    ramp_bytes: int = 0

    def time_s(self, num_bytes: float) -> float:
        """Return the time of the collective on a message of `num_bytes`; 0 for a group of one."""
        if self.num_ranks == 1:
            return 0.0
        return self.latency_s + self._on_bus(num_bytes) / self.bus_bandwidth_bytes_per_s

    def that_reaches(self, rate: MeasuredRate) -> GroupSpeed:
        """Return this speed with the bus bandwidth, and where it is too slow the latency, of messages as measured.

        A rate that nccl-tests prints holds latency and ramp, so the bus is faster than it.
        """
        seconds = bus_factor(self.collective, self.num_ranks) * rate.message_bytes / rate.bus_bandwidth_bytes_per_s
        latency_s = self.latency_s * min(1.0, seconds / self.time_s(rate.message_bytes))
        bus = self._on_bus(rate.message_bytes) / (seconds - latency_s)
        return self.replace(bus_bandwidth_bytes_per_s=bus, latency_s=latency_s)

    def _on_bus(self, num_bytes: float) -> float:
        return bus_factor(self.collective, self.num_ranks) * (num_bytes + sqrt(num_bytes * self.ramp_bytes))


class RankGroup(Record):
    """The ranks of a collective: the same `gpus` (indices inside a node) of each of `num_nodes` nodes.

    `groups_per_node` equal groups leave each node at the same time and share its NICs.
    """

    gpus: tuple[int, ...] = Field(min_length=1)
    num_nodes: int = Field(default=1, gt=0)
    groups_per_node: int = Field(default=1, gt=0)

    @property
    def num_ranks(self) -> int:
        """Ranks of the group over all nodes."""
        return len(self.gpus) * self.num_nodes


class InsideLink(Record):
    """Link inside a group of GPUs of one node: the kind of link, what one GPU's links carry together, and a pair's."""

    kind: str
    payload_bytes_per_s: float
    pair_bytes_per_s: float


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """Return the bytes that cross each rank's link for each byte of a message."""
    if collective in ("broadcast", "send_recv"):
        return 1.0
    once = (num_ranks - 1) / num_ranks
    return 2 * once if collective == "all_reduce" else once


def inside_link(cluster: Cluster, gpus: Sequence[int]) -> InsideLink:
    """Return what joins two or more `gpus` of a node: NVLink or xGMI where it connects them all, else PCIe.

    Through NVSwitch every pair has all the links of a GPU; without a switch a GPU's links divide over its peers, and
    the GPU with the fewest decides. Over PCIe the slowest pair decides, and whether each pair has peer access.
    """
    node = cluster.node
    if cluster.gpu.vendor == "cpu":
        rate = _slowest_pcie(cluster, gpus)
        return InsideLink(kind="loopback", payload_bytes_per_s=rate, pair_bytes_per_s=rate)
    links = [link for pair in combinations(gpus, 2) if (link := node.link(*pair)) is not None]
    fast = [link for link in links if link.link_type.is_fast]
    if fast and len(connected_groups(gpus, [(link.gpu_a, link.gpu_b) for link in fast])) == 1:
        return _fast_link(cluster, gpus, fast)
    kind = "pcie-peer" if all(_has_peer_access(cluster, *pair) for pair in combinations(gpus, 2)) else "pcie-host"
    pair = _slowest_pcie(cluster, gpus)
    # Without peer access all copies go through the host's memory, and a ring of n GPUs has n of them at a time.
    shared = 2 / len(gpus) if kind == "pcie-host" else 1.0
    return InsideLink(kind=kind, payload_bytes_per_s=pair * shared, pair_bytes_per_s=pair * shared)


def bus_bandwidth(cluster: Cluster, group: RankGroup, collective: Collective, table: LinkSpeedTable) -> GroupSpeed:
    """Return what a collective reaches on a group.

    Where the cluster carries a measurement of this collective on this kind of link and number of ranks, it is taken.
    Raises `ProfileError` for several nodes without a network.
    """
    if group.num_ranks == 1:
        return GroupSpeed(
            collective=collective,
            num_ranks=1,
            kind="none",
            payload_bytes_per_s=inf,
            bus_bandwidth_bytes_per_s=inf,
            latency_s=0,
        )
    inside = None
    if len(group.gpus) > 1:
        inside = _as_measured(cluster, _inside_speed(cluster, group.gpus, collective, table))
    if group.num_nodes == 1 and inside is not None:
        return inside
    return _as_measured(cluster, _between_speed(cluster, group, collective, table, inside))


def nic_bandwidth(cluster: Cluster, group: RankGroup) -> float:
    """Return what the GPUs of a group may send from one node to others, in bytes/s: their nearest NICs, or their share.

    Raises `ProfileError` where the cluster names no network.
    """
    network = _network(cluster)
    rate_of = {nic.name: nic.rate_bytes_per_s for nic in cluster.node.nics}
    near = {name for gpu in group.gpus for name in nearest_nics(cluster.node, gpu)}
    rates = [rate for name in near if (rate := rate_of[name]) is not None]
    if rates and len(rates) == len(near):
        usable = sum(rates)
    else:
        share = network.node_bandwidth_bytes_per_s * len(group.gpus) / cluster.gpus_per_node
        usable = max(network.nic_bandwidth_bytes_per_s, share)
    return min(usable, network.node_bandwidth_bytes_per_s / group.groups_per_node)


def nearest_nics(node: NodeTopology, gpu: int) -> list[str]:
    """Return the NICs with the nearest link to a GPU, in the order of the node; none where no link is known."""
    links = {nic.name: nic.gpu_links[gpu] for nic in node.nics if gpu in nic.gpu_links}
    nearest = min((link.distance for link in links.values()), default=None)
    return [name for name, link in links.items() if link.distance == nearest]


def _fast_link(cluster: Cluster, gpus: Sequence[int], fast: list[GpuLink]) -> InsideLink:
    of_gpu = [[link for link in fast if gpu in (link.gpu_a, link.gpu_b)] for gpu in gpus]
    per_link = [[_payload(cluster, link) for link in links] for links in of_gpu]
    xgmi = any(link.link_type is not LinkType.NV for link in fast)
    if not xgmi and _is_switched(cluster, fast):
        generation = min(5, max(2, cluster.gpu.nvlink_generation or 3))
        rate = min(min(rates) for rates in per_link)
        return InsideLink(kind=f"nvswitch-{generation}", payload_bytes_per_s=rate, pair_bytes_per_s=rate)
    return InsideLink(
        kind="xgmi" if xgmi else "nvlink-direct",
        payload_bytes_per_s=_narrowest_cut(cluster, gpus, fast),
        pair_bytes_per_s=min(min(rates) for rates in per_link),
    )


def _narrowest_cut(cluster: Cluster, gpus: Sequence[int], links: list[GpuLink]) -> float:
    """Return the least that links carry between any part of the GPUs and the rest: every ring leaves each part."""
    rates = [(one.gpu_a, one.gpu_b, _payload(cluster, one)) for one in links]
    largest = len(gpus) // 2 if len(gpus) <= _MOST_CUT else 1
    parts = (part for size in range(1, largest + 1) for part in combinations(gpus, size))
    return min(sum(rate for gpu_a, gpu_b, rate in rates if (gpu_a in part) != (gpu_b in part)) for part in parts)


def _is_switched(cluster: Cluster, fast: list[GpuLink]) -> bool:
    """Tell whether GPUs list more links, over all their peers, than a GPU has: then all pairs share them."""
    have = cluster.gpu.nvlink_count
    largest = max(link.nvlink_count or 0 for link in fast)
    listed = cluster.node.most_nvlinks
    # Two GPUs with all their links toward one another have a bridge, or are two of those behind a switch.
    return have is not None and (listed > have or (largest == have and not cluster.gpu.nvlink_bridge))


def _payload(cluster: Cluster, link: GpuLink) -> float:
    if link.bandwidth_bytes_per_s is not None:
        return link.bandwidth_bytes_per_s
    return (link.nvlink_count or 1) * (
        cluster.gpu.nvlink_bandwidth_bytes_per_s or cluster.gpu.pcie_bandwidth_bytes_per_s
    )


def _slowest_pcie(cluster: Cluster, gpus: Sequence[int]) -> float:
    rates = [cluster.gpu.pcie_bandwidth_bytes_per_s]
    for pair in combinations(gpus, 2):
        link = cluster.node.link(*pair)
        if link is not None and not link.link_type.is_fast and link.bandwidth_bytes_per_s is not None:
            rates.append(link.bandwidth_bytes_per_s)
    return min(rates)


def _has_peer_access(cluster: Cluster, gpu_a: int, gpu_b: int) -> bool:
    """Tell whether a pair has peer access: unless the driver or the data sheet denies it. NVLink has its own."""
    link = cluster.node.link(gpu_a, gpu_b)
    if link is not None and link.link_type.is_fast:
        return True
    pair = (min(gpu_a, gpu_b), max(gpu_a, gpu_b))
    for access in cluster.node.peer_access:
        if (access.gpu_a, access.gpu_b) == pair and access.is_allowed is not None:
            return access.is_allowed
    return cluster.gpu.peer_access is not False


def _as_measured(cluster: Cluster, speed: GroupSpeed) -> GroupSpeed:
    """Return `speed` with the figures that were measured on such a group, as it is where nobody measured one."""
    for measured in cluster.measured:
        known = measured.payload_bytes_per_s
        same_links = known is None or isclose(known, speed.payload_bytes_per_s, rel_tol=0.05)
        wanted = (speed.collective, speed.num_ranks, speed.kind)
        if same_links and (measured.collective, measured.num_ranks, measured.link) == wanted:
            return speed.replace(
                bus_bandwidth_bytes_per_s=measured.bus_bandwidth_bytes_per_s,
                latency_s=measured.latency_s,
                ramp_bytes=measured.ramp_bytes,
            )
    return speed


def _inside_speed(cluster: Cluster, gpus: Sequence[int], collective: Collective, table: LinkSpeedTable) -> GroupSpeed:
    link = inside_link(cluster, gpus)
    speed = table.speed(link.kind)
    payload = link.pair_bytes_per_s if collective == "send_recv" else link.payload_bytes_per_s
    bus = speed.bus_efficiency[collective] * payload
    reduction = speed.switch_reduction
    if collective == "all_reduce" and reduction is not None and len(gpus) >= reduction.min_ranks:
        bus = max(bus, bus_factor(collective, len(gpus)) * reduction.efficiency * payload)
    return GroupSpeed(
        collective=collective,
        num_ranks=len(gpus),
        kind=link.kind,
        payload_bytes_per_s=payload,
        bus_bandwidth_bytes_per_s=bus,
        latency_s=speed.latency_s,
        ramp_bytes=speed.ramp_bytes,
    )


def _between_speed(
    cluster: Cluster, group: RankGroup, collective: Collective, table: LinkSpeedTable, inside: GroupSpeed | None
) -> GroupSpeed:
    network = _network(cluster)
    share = nic_bandwidth(cluster, group)
    speed = table.speed(network.protocol)
    payload = speed.bus_efficiency[collective] * share
    limit = inside.bus_bandwidth_bytes_per_s if inside is not None else inf
    ranks, here = group.num_ranks, len(group.gpus)
    bus = min(limit, payload)
    if collective == "all_to_all":
        # Of a GPU's message the part for other nodes, (N-g)/N, goes through its NICs: they alone decide.
        bus = min(limit, payload / here * (ranks - 1) / (ranks - here))
    elif collective == "send_recv":
        bus = min(limit, payload / here)
    start = inside.latency_s if inside is not None else speed.latency_s

    def passing(hops: int, bandwidth: float) -> GroupSpeed:
        decides = speed if inside is None or bandwidth < limit else table.speed(inside.kind)
        return GroupSpeed(
            collective=collective,
            num_ranks=ranks,
            kind=decides.kind,
            payload_bytes_per_s=share if inside is None or bandwidth < limit else inside.payload_bytes_per_s,
            bus_bandwidth_bytes_per_s=bandwidth,
            latency_s=start + hops * network.latency_s,
            ramp_bytes=speed.ramp_of(collective),
        )

    reached = network.measured_rate(collective, ranks)
    if collective in ("send_recv", "all_to_all"):
        found = passing(1, bus)
    elif collective == "all_reduce":
        tree = _tree_bandwidth(group, table, inside, network_rate=payload * speed.tree_share)
        ways = (passing(2 * (ranks - 1), bus), passing(2 * ceil(log2(group.num_nodes)), tree))
        # Where nobody measured it the faster bus: over many nodes medium messages take longer than trees tell.
        if reached is None:
            found = max(ways, key=lambda way: way.bus_bandwidth_bytes_per_s)
        else:
            found = min(ways, key=lambda way: way.time_s(reached.message_bytes))
    else:
        found = passing(ranks - 1, bus)  # a ring passes every rank
    return (
        found if reached is None else found.that_reaches(reached.of_share(share / network.node_bandwidth_bytes_per_s))
    )


def _tree_bandwidth(
    group: RankGroup, table: LinkSpeedTable, inside: GroupSpeed | None, *, network_rate: float
) -> float:
    """Return the bus bandwidth of an all-reduce by trees: S (m-1)/m twice through the NICs of each of m nodes.

    With a reduction in the switch the links inside keep their rate; otherwise a tree reaches less of them than a ring.
    """
    ranks, nodes = group.num_ranks, group.num_nodes
    between = network_rate * (ranks - 1) / ranks * nodes / (nodes - 1)
    if inside is None:
        return between
    speed = table.speed(inside.kind)
    in_switch = speed.switch_reduction is not None and len(group.gpus) >= speed.switch_reduction.min_ranks
    return min(between, inside.bus_bandwidth_bytes_per_s * (1 if in_switch else speed.tree_share))


def _network(cluster: Cluster) -> NetworkProfile:
    if cluster.network is None:
        raise ProfileError(
            f"{cluster.name} names no network, and several nodes need one",
            hint="add a network to the profile, or plan for one node",
        )
    return cluster.network
