"""The cheapest order of a node's GPUs: which slowest links the axes can have together, and which cost least.

The cost depends on each axis only through its slowest link, which has few possible rates: its levels, fastest first.
A combination of levels, one for each axis, can be met or cannot; what cannot be met cannot be met with faster levels
either. So boxes of combinations are dropped whole where their slowest corner cannot be met, and split where it can.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from paraplan.plan.parallel import Axis
from paraplan.plan.placement.assignment import Masks, find_assignment
from paraplan.plan.placement.chains import MAX_GPUS, find_chain
from paraplan.plan.placement.links import Edge, LinkRates, order_cost
from paraplan.plan.placement.ring_symmetry import ordered_pairs
from paraplan.plan.placement.traffic import AxisTraffic

MAX_STEPS = 2_000_000
"""Steps of the whole search after which its result is not proven best: about a minute. 16 GPUs with links drawn at
random mostly take thousands; several axes that weigh alike, with rates that all differ, can come near the limit."""

MAX_STEPS_TIDY = 5_000
"""Steps of the last search, for the GPUs in rising order, after which they stay as found."""

Combination = tuple[int, ...]
Order = tuple[int, ...]


def best_order(
    edges: Sequence[Edge], rates: LinkRates, traffic: AxisTraffic, *, per_node: int
) -> tuple[tuple[int, ...], bool]:
    """Return the cheapest order of GPUs (positions in the node, by local rank), and whether that is proven.

    Plain numbering where nothing is cheaper.
    """
    plain = tuple(range(per_node))
    search = _LevelSearch(edges, rates, traffic, per_node=per_node)
    found = search.by_swaps()
    order, is_proven = search.by_boxes(found)
    if order_cost(order, edges, rates, traffic) >= order_cost(plain, edges, rates, traffic) * (1 - 1e-9):
        return plain, is_proven
    # Of equally cheap orders, one with the GPUs in rising order wherever the ranks are alike.
    return search.order_within(search.levels_of(order), keeps_numbering=True) or order, is_proven


class _LevelSearch:
    """The levels of each axis that costs, and what is known of their combinations."""

    def __init__(self, edges: Sequence[Edge], rates: LinkRates, traffic: AxisTraffic, *, per_node: int) -> None:
        self.edges, self.rates, self.traffic, self.per_node = edges, rates, traffic, per_node
        self.axes = [axis for axis in dict.fromkeys(edge.axis for edge in edges) if traffic.bytes_of(axis) > 0]
        self.levels = [_levels(axis, edges, rates) for axis in self.axes]
        self.impossible: list[Combination] = []
        self.met: list[Combination] = []
        self.symmetries: dict[frozenset[Axis], list[tuple[int, int]]] = {}
        self.masks: dict[tuple[float, ...], Masks] = {}
        self.steps = 0

    def by_boxes(self, best: Order) -> tuple[Order, bool]:
        """Return the cheapest order, `best` where none is cheaper, and whether that is proven."""
        best_cost = self._order_cost(best)
        self.met.append(self.levels_of(best))
        fastest = self._fastest_alone(best)
        slowest = tuple(len(levels) - 1 for levels in self.levels)
        boxes = [(self._cost(fastest), fastest, slowest)]
        while boxes and self.steps < MAX_STEPS:
            cost, low, high = heapq.heappop(boxes)
            if cost >= best_cost * (1 - 1e-9):
                return best, True
            high = self._affordable(low, high, best_cost)
            if self._cannot(high):
                continue
            if not self._is_met(high):
                order = self.order_within(high)
                if order is None:
                    if self.steps < MAX_STEPS:
                        self.impossible.append(high)
                    else:
                        return best, False
                    continue
                self.met.append(self.levels_of(order))
                if (found := self._order_cost(order)) < best_cost:
                    best, best_cost = order, found
            for part_low, part_high in self._halves(low, high):
                heapq.heappush(boxes, (self._cost(part_low), part_low, part_high))
        return best, not boxes

    def order_within(self, combination: Sequence[int | None], *, keeps_numbering: bool = False) -> Order | None:
        """Return an order in which no axis has a slower link than its level, None for any; None if none was found."""
        least = {
            axis: self.levels[place][level]
            for place, (axis, level) in enumerate(zip(self.axes, combination, strict=True))
            if level is not None
        }
        needed: dict[tuple[int, int], tuple[float, ...]] = {}
        for edge in self.edges:
            if edge.axis not in least:
                continue
            need = list(needed.get((edge.first, edge.second), (0.0,) * len(self.rates)))
            which = self.rates.table(edge)
            need[which] = max(need[which], least[edge.axis])
            needed[edge.first, edge.second] = tuple(need)
        if not keeps_numbering and (closes := self._chain_closes(needed)) is not None:
            return find_chain(self._masks(next(iter(needed.values()))), length=self.per_node, closes=closes)
        order, steps = find_assignment(
            self.per_node,
            len(self.rates.inside),
            {pair: self._masks(need) for pair, need in needed.items()},
            self._symmetry(frozenset(least)),
            max_steps=min(MAX_STEPS - self.steps, MAX_STEPS_TIDY if keeps_numbering else MAX_STEPS),
            keeps_numbering=keeps_numbering,
        )
        self.steps += steps
        return order

    def _chain_closes(self, needed: dict[tuple[int, int], tuple[float, ...]]) -> bool | None:
        """Tell whether ranks that are one line in their order also close a ring; None where they are no such line."""
        line = {(rank, rank + 1) for rank in range(self.per_node - 1)}
        ring = line | {(0, self.per_node - 1)}
        if self.per_node < 3 or len(self.rates.inside) > MAX_GPUS or len(set(needed.values())) != 1:
            return None
        return {frozenset(line): False, frozenset(ring): True}.get(frozenset(needed))

    def levels_of(self, order: Sequence[int]) -> Combination:
        """Return the level of the slowest link of each axis under an order."""
        slowest = [min(self.rates.rate(e, order) for e in self.edges if e.axis == axis) for axis in self.axes]
        return tuple(levels.index(rate) for levels, rate in zip(self.levels, slowest, strict=True))

    def by_swaps(self) -> Order:
        """Return a good order: from plain numbering, two GPUs are swapped as long as that makes it cheaper."""
        order = list(range(len(self.rates.inside)))
        cost = self._order_cost(order)
        improved = True
        while improved:
            improved = False
            for first in range(self.per_node):
                for second in range(first + 1, len(order)):
                    order[first], order[second] = order[second], order[first]
                    swapped = self._order_cost(order)
                    if swapped < cost * (1 - 1e-9):
                        cost, improved = swapped, True
                    else:
                        order[first], order[second] = order[second], order[first]
        return tuple(order[: self.per_node])

    def _fastest_alone(self, order: Order) -> Combination:
        """Return the fastest level that each axis could have if the others did not count."""
        fastest = []
        for place, slowest in enumerate(self.levels_of(order)):
            low, high = 0, slowest
            while low < high:
                middle = (low + high) // 2
                alone = [middle if other == place else None for other in range(len(self.axes))]
                found = self.order_within(alone)
                if found is not None:
                    high = self.levels_of(found)[place]
                elif self.steps >= MAX_STEPS:
                    break
                else:
                    low = middle + 1
            fastest.append(low)
        return tuple(fastest)

    def _affordable(self, low: Combination, high: Combination, limit: float) -> Combination:
        """Return `high` without levels that cost too much even where all other axes have the fastest of the box."""
        base = self._cost(low)
        kept = []
        for place, level in enumerate(high):
            price, levels = self.traffic.bytes_of(self.axes[place]), self.levels[place]
            others = base - price / levels[low[place]]
            while level > low[place] and others + price / levels[level] >= limit * (1 - 1e-9):
                level -= 1
            kept.append(level)
        return tuple(kept)

    def _halves(self, low: Combination, high: Combination) -> list[tuple[Combination, Combination]]:
        """Return a box in two parts, split where the cost differs most; nothing for a single combination."""
        spread = [
            self.traffic.bytes_of(axis) * (1 / levels[slow] - 1 / levels[fast])
            for axis, levels, fast, slow in zip(self.axes, self.levels, low, high, strict=True)
        ]
        if low == high:
            return []
        place = max(range(len(spread)), key=spread.__getitem__)
        middle = (low[place] + high[place]) // 2
        return [
            (low, (*high[:place], middle, *high[place + 1 :])),
            ((*low[:place], middle + 1, *low[place + 1 :]), high),
        ]

    def _cannot(self, combination: Combination) -> bool:
        return any(
            all(level <= known for level, known in zip(combination, corner, strict=True)) for corner in self.impossible
        )

    def _is_met(self, combination: Combination) -> bool:
        return any(all(level >= known for level, known in zip(combination, corner, strict=True)) for corner in self.met)

    def _cost(self, combination: Combination) -> float:
        return sum(
            self.traffic.bytes_of(axis) / levels[level]
            for axis, levels, level in zip(self.axes, self.levels, combination, strict=True)
        )

    def _order_cost(self, order: Sequence[int]) -> float:
        return order_cost(order, self.edges, self.rates, self.traffic)

    def _symmetry(self, axes: frozenset[Axis]) -> list[tuple[int, int]]:
        if axes not in self.symmetries:
            labels: dict[tuple[int, int], frozenset[tuple[Axis, bool]]] = {}
            for edge in self.edges:
                if edge.axis in axes:
                    pair = (edge.first, edge.second)
                    labels[pair] = labels.get(pair, frozenset()) | {(edge.axis, edge.crosses_nodes)}
            self.symmetries[axes] = ordered_pairs(labels, num_ranks=self.per_node)
        return self.symmetries[axes]

    def _masks(self, need: tuple[float, ...]) -> Masks:
        """Return by GPU which others, as bits, it reaches with the needed rate of each table."""
        if need not in self.masks:
            gpus = range(len(self.rates.inside))
            self.masks[need] = tuple(
                sum(
                    1 << second
                    for second in gpus
                    if all(table[first][second] >= rate for table, rate in zip(self.rates, need, strict=True))
                )
                for first in gpus
            )
        return self.masks[need]


def _levels(axis: Axis, edges: Sequence[Edge], rates: LinkRates) -> list[float]:
    """Return the rates that may be the slowest of an axis, fastest first."""
    found: set[float] = set()
    limit = float("inf")
    for which in {rates.table(edge) for edge in edges if edge.axis == axis}:
        values = {
            rate
            for first, row in enumerate(rates[which])
            for second, rate in enumerate(row)
            if which > 0 or first != second
        }
        found |= values
        limit = min(limit, max(values))
    return sorted((rate for rate in found if rate <= limit), reverse=True)
