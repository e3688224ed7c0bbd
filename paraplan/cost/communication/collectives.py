"""Time of collectives on the links that their groups cross."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.cost.cost_model import cache_of
from paraplan.cost.plan_table import RANK_ORDERS, Floats, Ints, Mask, PlanTable, distinct_rows
from paraplan.cost.workload import Workload
from paraplan.hardware.bus_bandwidth import GroupSpeed, RankGroup, bus_bandwidth, bus_factor
from paraplan.hardware.profiles import Collective
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, Axis

_PLACES = np.array([[order.index(axis) for order in RANK_ORDERS] for axis in MEGATRON_RANK_ORDER])
"""Where each axis stands in each order of ranks, from the outermost."""
_REDUCTIONS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, eq=False)
class GroupLinks:
    """The groups of one axis, one entry a plan: members, and what a collective reaches on their slowest group.

    Speeds are kept for each distinct pair of group size and distance between members; `key` gives that of each plan.
    """

    size: Ints
    key: Ints
    speeds: dict[Collective, tuple[GroupSpeed, ...]]
    leaves_node: Mask
    """Whether members stand on several nodes."""

    def select(self, rows: Ints) -> GroupLinks:
        """Return those of some of the plans."""
        return GroupLinks(self.size[rows], self.key[rows], self.speeds, self.leaves_node[rows])

    def all_reduce_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds of an all-reduce of `num_bytes` on every rank."""
        return self._time_s("all_reduce", num_bytes)

    def all_gather_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds of an all-gather whose result has `num_bytes`."""
        return self._time_s("all_gather", num_bytes)

    def reduce_scatter_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds of a reduce-scatter whose input has `num_bytes`."""
        return self._time_s("reduce_scatter", num_bytes)

    def broadcast_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds in which one rank sends `num_bytes` to all others, or sums theirs."""
        return self._time_s("broadcast", num_bytes)

    def all_to_all_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds in which every rank sends `num_bytes`, an equal part to each of the group."""
        return self._time_s("all_to_all", num_bytes)

    def send_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds to send `num_bytes` to a neighbour in the group."""
        return self._time_s("send_recv", num_bytes)

    def _time_s(self, collective: Collective, num_bytes: Floats) -> Floats:
        # The form of `GroupSpeed.time_s`, over columns.
        speeds = self.speeds[collective]
        factor, bus, latency_s, ramp_bytes = (
            np.array(values, dtype=float)[self.key]
            for values in zip(
                *(
                    (
                        bus_factor(collective, speed.num_ranks),
                        speed.bus_bandwidth_bytes_per_s,
                        speed.latency_s,
                        speed.ramp_bytes,
                    )
                    for speed in speeds
                ),
                strict=True,
            )
        )
        seconds = latency_s + factor * (num_bytes + np.sqrt(num_bytes * ramp_bytes)) / bus
        return np.where((self.size == 1) | (num_bytes == 0), 0.0, seconds)


def group_links(workload: Workload, table: PlanTable, axis: Axis) -> GroupLinks:
    """Return what the groups of `axis` cross under every plan of `table`.

    Members of a group stand `stride` ranks apart (see `RankGrid`). The slowest group decides. Groups that leave a node
    at the same time share its NICs. Raises `ProfileError` for several nodes without a network.
    """
    kinds: dict[Axis, tuple[Collective, ...]] = {"pp": ("send_recv",), "cp": (*_REDUCTIONS, "all_to_all")}
    return _links_of(workload, _sizes(table)[axis], _stride(table, axis), kinds.get(axis, _REDUCTIONS))


def data_links(workload: Workload, table: PlanTable) -> tuple[GroupLinks, GroupLinks]:
    """Return what groups cross over which ZeRO shards, and groups of ranks with equal shards.

    These groups are of one rank each, unless ZeRO shards over some neighbours alone (hybrid sharding).
    """
    joined = table.joined_data_axes()
    shards, stride = table.shard_size, _stride(joined, "dp")
    return (
        _links_of(workload, shards, stride, _REDUCTIONS),
        _links_of(workload, joined.dp // shards, stride * shards, ("all_reduce",)),
    )


def expert_links(workload: Workload, table: PlanTable) -> tuple[GroupLinks, GroupLinks]:
    """Return what groups cross that share out the experts, and groups of ranks with the same experts.

    The first are neighbours along cp and dp together, as many as `ep` says, and along tp where experts are whole.
    """
    joined = table.joined_data_axes()
    stride = _stride(joined, "dp")
    within = np.where(_stride(joined, "tp") * table.tp == stride, table.tp, 1)
    within = within if workload.framework.experts.over_tensor_ranks else np.ones_like(within)
    return (
        _links_of(workload, table.ep * within, stride // within, ("all_to_all",)),
        _links_of(workload, joined.dp // table.ep, stride * table.ep, _REDUCTIONS),
    )


def inside_links(workload: Workload, sizes: Ints) -> GroupLinks:
    """Return what `sizes` neighbouring GPUs of one node cross in an all-to-all."""
    return _links_of(workload, sizes, np.ones_like(sizes), ("all_to_all",))


def device_links(workload: Workload, table: PlanTable) -> GroupLinks:
    """Return what the GPUs of one process cross over which DataParallel divides its micro-batches."""
    return _links_of(workload, table.devices, np.ones_like(table.devices), ("broadcast", "send_recv"))


def _sizes(table: PlanTable) -> dict[Axis, Ints]:
    return {axis: getattr(table, axis) for axis in MEGATRON_RANK_ORDER}


def _stride(table: PlanTable, axis: Axis) -> Ints:
    """Return how many ranks apart the members of a group of `axis` stand."""
    stride, places = np.ones_like(table.dp), _PLACES[:, table.order]
    own = places[MEGATRON_RANK_ORDER.index(axis)]
    for size, place in zip(_sizes(table).values(), places, strict=True):
        stride = stride * np.where(place > own, size, 1)
    return stride


def _links_of(workload: Workload, size: Ints, stride: Ints, collectives: tuple[Collective, ...]) -> GroupLinks:
    keys, key = distinct_rows(size, stride)
    speeds = {
        collective: tuple(_speed(workload, int(size), int(step), collective) for size, step in zip(*keys, strict=True))
        for collective in collectives
    }
    leaves_node = (size > 1) & (size * stride > workload.cluster.gpus_per_node)
    return GroupLinks(size=size, key=key, speeds=speeds, leaves_node=leaves_node)


def fastest_links(workload: Workload, size: Ints, collective: Collective) -> GroupLinks:
    """Return what groups of `size` ranks cross at best in a collective, however ranks are ordered."""
    sizes, size_of = np.unique(size, return_inverse=True)
    fastest = []
    for members in sizes.tolist():
        # Members that stand further apart than a node has GPUs are on nodes of their own.
        apart = range(1, workload.cluster.gpus_per_node + 1 if members < workload.cluster.num_gpus else 2)
        speeds = [_speed(workload, members, step, collective) for step in apart]
        bus = max(speed.bus_bandwidth_bytes_per_s for speed in speeds)
        fastest.append(
            speeds[0].replace(
                bus_bandwidth_bytes_per_s=bus,
                latency_s=min(speed.latency_s for speed in speeds),
                ramp_bytes=min(speed.ramp_bytes for speed in speeds),
            )
        )
    leaves_node = size > workload.cluster.gpus_per_node
    return GroupLinks(size, size_of.reshape(-1), {collective: tuple(fastest)}, leaves_node)


def _speed(workload: Workload, size: int, stride: int, collective: Collective) -> GroupSpeed:
    """Return what a collective reaches on the slowest group, computed once for a workload."""
    stride = 1 if workload.has_equal_links else stride
    known, key = cache_of(workload).group_speeds, (size, stride, collective)
    if key not in known:
        groups = _groups(workload, size, stride)[: 1 if workload.has_equal_links else None]
        speeds = [bus_bandwidth(workload.cluster, group, collective, workload.links) for group in groups]
        known[key] = min(speeds, key=lambda speed: speed.bus_bandwidth_bytes_per_s)
    return known[key]


def _groups(workload: Workload, size: int, stride: int) -> list[RankGroup]:
    """Return the groups of a node whose members stand `stride` ranks apart, each distinct set of local GPUs once."""
    per_node = workload.cluster.gpus_per_node
    if size == 1:
        return [RankGroup(gpus=(0,))]
    members = min(size, max(1, per_node // stride))
    num_nodes = -(-size // members)
    step = stride if members > 1 else 1
    firsts = [gpu for gpu in range(per_node) if gpu // step % members == 0 and gpu + step * (members - 1) < per_node]
    return [
        RankGroup(
            gpus=tuple(first + step * member for member in range(members)),
            num_nodes=num_nodes,
            groups_per_node=max(1, per_node // members) if num_nodes > 1 else 1,
        )
        for first in firsts
    ]


def overlap_s(transfer_s: Floats, compute_s: Floats, *, slowdown: float) -> Floats:
    """Return what `transfer_s` of communication adds to `compute_s` of compute that runs at the same time.

    While both run, each takes `slowdown` times as long (Galvatron, Miao et al. 2022, section 3.4): what is hidden still
    costs `slowdown - 1` of the shorter one, and what is longer goes on alone.
    """
    shared = np.minimum(transfer_s, compute_s)
    return np.asarray((slowdown - 1.0) * shared + np.maximum(transfer_s - compute_s, 0.0))
