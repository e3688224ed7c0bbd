"""Orders of ranks that are worth pricing: those whose groups no other order puts on links as fast or faster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import numpy as np

from paraplan.cost.communication.collectives import expert_links, group_links
from paraplan.cost.plan_table import RANK_ORDERS, Floats, Ints, PlanTable
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, Axis

ORDERS: tuple[tuple[Axis, ...], ...] = tuple(
    order for order in RANK_ORDERS if abs(order.index("dp") - order.index("cp")) == 1
)
"""The orders of the axes, Megatron-LM's first. dp and cp stand side by side: their ranks average gradients together."""

_SIZES = np.array([1e3, 1e5, 1e6, 1e7, 1e8, 1e9, 1e11])


@dataclass
class RankOrders:
    """The orders of ranks of each product of axes; times of groups are computed once for each size and distance."""

    workload: Workload
    allowed: tuple[tuple[Axis, ...], ...] | None = None
    """The orders to choose from; None for all."""
    _seconds: dict[tuple[str, int, int], Floats] = field(default_factory=dict)
    _counts: dict[tuple[Axis, ...], int] = field(default_factory=dict)

    def count(self, sizes: dict[Axis, int]) -> int:
        """Return how many orders differ: those of the axes that are divided."""
        divided = tuple(axis for axis in MEGATRON_RANK_ORDER if sizes[axis] > 1)
        if divided not in self._counts:
            orders = {tuple(axis for axis in order if axis in divided) for order in self._orders}
            self._counts[divided] = len(orders)
        return self._counts[divided]

    @property
    def _orders(self) -> tuple[tuple[Axis, ...], ...]:
        return ORDERS if self.allowed is None else self.allowed

    def worth_pricing(self, sizes: dict[Axis, int], ep: int = 1) -> list[int]:
        """Return indices into RANK_ORDERS of orders that none beats or equals on all axes, Megatron-LM's before equals.

        The groups of `ep` count as those of an axis, and so do the ranks with equal experts.

        An order is left out only where another has every collective of every axis, at every size from a kilobyte to a
        hundred gigabytes, at least as fast.
        """
        if self.workload.has_equal_links:
            return [RANK_ORDERS.index(self._orders[0])]
        kept: list[tuple[int, Floats]] = []
        seen: set[tuple[Axis, ...]] = set()
        for order in self._orders:
            divided = tuple(axis for axis in order if sizes[axis] > 1)
            if divided in seen:
                continue
            seen.add(divided)
            groups = [self._of_group(axis, divided, sizes) for axis in sorted(divided)]
            seconds = np.concatenate([np.zeros(0), *groups, *self._of_data_axes(order, sizes, ep)])
            if any(bool((other <= seconds).all()) for _, other in kept):
                continue
            kept = [(each, other) for each, other in kept if not bool((seconds <= other).all())]
            kept.append((RANK_ORDERS.index(order), seconds))
        return [number for number, _ in kept]

    def _of_group(self, axis: Axis, divided: tuple[Axis, ...], sizes: dict[Axis, int]) -> Floats:
        stride = prod(sizes[inner] for inner in divided[divided.index(axis) + 1 :])
        return self._at(axis, sizes[axis], stride)

    def _at(self, axis: Axis | Literal["ep"], size: int, stride: int) -> Floats:
        key = (axis, size, stride)
        if key not in self._seconds:
            self._seconds[key] = self._exchange(size, stride) if axis == "ep" else self._measure(axis, size, stride)
        return self._seconds[key]

    def _of_data_axes(self, order: tuple[Axis, ...], sizes: dict[Axis, int], ep: int) -> list[Floats]:
        """Return the seconds of the ranks of dp and cp together, and of the parts of them that experts go over."""
        joined = sizes | {"dp": sizes["dp"] * sizes["cp"], "cp": 1}
        if joined["dp"] == 1:
            return []
        of_all = self._of_group("dp", order, joined)
        if ep == 1:
            return [of_all]
        stride = prod(joined[inner] for inner in order[order.index("dp") + 1 :])
        alike = joined["dp"] // ep
        found = [of_all, self._at("ep", ep, stride)]
        return [*found, self._at("dp", alike, stride * ep)] if alike > 1 else found

    def _exchange(self, size: int, stride: int) -> Floats:
        """Return the seconds in which neighbours along dp, `stride` ranks apart, send to each other, by size."""
        table = _table({"dp": size, "tp": stride}, MEGATRON_RANK_ORDER)
        links, _ = expert_links(self.workload, replace(table, ep=table.dp))
        return links.all_to_all_s(_SIZES)

    def _measure(self, axis: Axis, size: int, stride: int) -> Floats:
        """Return the seconds of the collectives of an axis whose members stand `stride` ranks apart, by size."""
        inner: Axis = "tp" if axis != "tp" else "dp"
        others: tuple[Axis, ...] = tuple(each for each in MEGATRON_RANK_ORDER if each not in (axis, inner))
        table = _table({axis: size, inner: stride}, (*others, axis, inner))
        links = group_links(self.workload, table, axis)
        if axis == "pp":
            return links.send_s(_SIZES)
        collectives = [links.all_reduce_s, links.all_gather_s, links.reduce_scatter_s]
        if axis == "cp":
            collectives.append(links.all_to_all_s)
        return np.concatenate([time_s(_SIZES) for time_s in collectives])


def _table(sizes: dict[Axis, int], rank_order: tuple[Axis, ...]) -> PlanTable:
    def column(value: int) -> Ints:
        return np.full(1, value, dtype=np.int64)

    names = ("zero_stage", "sequence_parallel", "schedule", "recompute", "offload", "split", "order", "shards")
    zeros = {name: column(0) for name in names}
    ones = {name: column(1) for name in ("micro_batch_size", "num_microbatches", "virtual", "devices", "ep")}
    axes = {axis: column(sizes.get(axis, 1)) for axis in MEGATRON_RANK_ORDER}
    return PlanTable(**axes, **zeros, **ones).ordered(rank_order)
