"""Time of collectives on the links that their groups cross."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.cost.table import Floats, Ints, PlanTable, distinct_rows
from paraplan.cost.workload import Workload
from paraplan.hardware.bus_bandwidth import GroupSpeed, RankGroup, bus_bandwidth, bus_factor
from paraplan.hardware.profiles import Collective
from paraplan.plan.parallel import Axis


@dataclass(frozen=True, eq=False)
class GroupLinks:
    """The groups of one axis, one entry a plan: members, and what a collective reaches on their slowest group.

    Speeds are kept for each distinct pair of group size and distance between members; `key` gives that of each plan.
    """

    size: Ints
    key: Ints
    speeds: dict[Collective, tuple[GroupSpeed, ...]]

    def all_reduce_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds of an all-reduce of `num_bytes` on every rank."""
        return self._time_s("all_reduce", num_bytes)

    def all_gather_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds of an all-gather whose result has `num_bytes`."""
        return self._time_s("all_gather", num_bytes)

    def reduce_scatter_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds of a reduce-scatter whose input has `num_bytes`."""
        return self._time_s("reduce_scatter", num_bytes)

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
    sizes: dict[Axis, Ints] = {"pp": table.pp, "dp": table.dp, "cp": table.cp, "tp": table.tp}
    stride = np.ones_like(table.dp)
    for inner in table.rank_order[table.rank_order.index(axis) + 1 :]:
        stride = stride * sizes[inner]
    keys, key = distinct_rows(sizes[axis], stride)
    groups = [_groups(workload, int(size), int(step)) for size, step in zip(*keys, strict=True)]
    collectives: tuple[Collective, ...] = (
        ("send_recv",) if axis == "pp" else ("all_reduce", "all_gather", "reduce_scatter")
    )
    speeds = {
        collective: tuple(_slowest(workload, candidates, collective) for candidates in groups)
        for collective in collectives
    }
    return GroupLinks(size=sizes[axis], key=key, speeds=speeds)


def _slowest(workload: Workload, groups: list[RankGroup], collective: Collective) -> GroupSpeed:
    speeds = [bus_bandwidth(workload.cluster, group, collective, workload.links) for group in groups]
    return min(speeds, key=lambda speed: speed.bus_bandwidth_bytes_per_s)


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
