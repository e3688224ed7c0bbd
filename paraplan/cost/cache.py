"""Costs computed before for one workload: of blocks by sharding, of groups of ranks, and the padding of shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paraplan.cost.plan_table import Floats, Ints
from paraplan.hardware.bus_bandwidth import GroupSpeed
from paraplan.hardware.profiles import Collective
from paraplan.model.spec import ModelSpec

ShardingKey = tuple[int, ...]


class BlockCostCache:
    """Cache of block costs, one row per distinct sharding of a block. Columns grow by doubling."""

    def __init__(self) -> None:
        self.rows: dict[ShardingKey, int] = {}
        self._columns: dict[str, Floats] = {}

    def missing(self, shardings: Sequence[ShardingKey]) -> list[int]:
        """Return the positions of the shardings that are not known."""
        return [position for position, one in enumerate(shardings) if one not in self.rows]

    def add(self, shardings: Sequence[ShardingKey], columns: Mapping[str, Floats]) -> None:
        """Keep columns of shardings that are not known yet, an entry a sharding."""
        first = len(self.rows)
        self.rows.update((one, first + position) for position, one in enumerate(shardings))
        for name, column in columns.items():
            known = self._columns.get(name)
            if known is None:
                self._columns[name] = column
                continue
            if len(known) < len(self.rows):
                grown = np.empty((2 * len(self.rows), *known.shape[1:]))
                grown[:first] = known[:first]
                self._columns[name] = known = grown
            known[first : len(self.rows)] = column

    def columns(self) -> dict[str, Floats]:
        """Return all columns, a row a sharding."""
        return {name: column[: len(self.rows)] for name, column in self._columns.items()}


def counts_of_kinds(model: ModelSpec) -> Ints:
    """Return `[R, B + 1]`: how many of the first 0..B blocks are of each kind, in the order in which kinds come."""
    kinds = list(dict.fromkeys(run.block for run in model.runs))
    order = np.concatenate([np.full(run.count, kinds.index(run.block)) for run in model.runs])
    is_kind = order == np.arange(len(kinds))[:, None]
    return np.concatenate([np.zeros((len(kinds), 1), dtype=np.int64), np.cumsum(is_kind, axis=1)], axis=1)


@dataclass(eq=False)
class CostCache:
    """Tables that were computed before for one workload, however many tables of plans ask for them."""

    blocks: BlockCostCache = field(default_factory=BlockCostCache)
    """Costs of blocks by sharding."""
    group_speeds: dict[tuple[int, int, Collective], GroupSpeed] = field(default_factory=dict)
    """Collective speeds by group size, stride and collective."""
    shard_paddings: dict[tuple[int, int], float] = field(default_factory=dict)
    """Padding of FSDP shards relative to an even split, by the number of shards and whether tp divides layers."""
    _counts: Ints | None = None

    def block_counts(self, model: ModelSpec) -> Ints:
        """Return how many of the first blocks are of each kind (`counts_of_kinds`)."""
        if self._counts is None:
            self._counts = counts_of_kinds(model)
        return self._counts
