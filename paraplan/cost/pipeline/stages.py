"""Which blocks a pipeline rank holds, for many plans at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts
from paraplan.cost.plan_table import Floats, Ints, Mask, PlanTable, ScheduleCode, distinct_rows, first_rows
from paraplan.model.spec import ModelSpec


class _Kinds(NamedTuple):
    """Plans under which a rank's blocks cost alike."""

    asked: Ints
    """The column that they were found for: kept, so that no other one gets its place in memory."""
    key: Ints
    """The sharding of each kind, a row of a cost's `[K, R]`."""
    num_blocks: Ints
    """`[D, R]`: how many blocks of each run of equal ones the rank holds under each kind."""
    of_plan: Ints
    """The kind of each plan."""


@dataclass(frozen=True, eq=False)
class StageBlocks:
    """The blocks of one pipeline rank under each plan of a table: chunk bounds, and whether it holds the ends.

    `low` and `high` are `[V, N]`: the bounds of each virtual chunk, equal where a plan has fewer chunks. Where all
    blocks are alike and all chunks have as many, they are `[1, N]`, as if a rank's blocks stood in a row. `shape` is
    the same for plans whose bounds are, None where those of all plans are.
    """

    rank: Ints
    low: Ints
    high: Ints
    is_first: Mask
    is_last: Mask
    shape: Ints | None = None
    _kinds: dict[int, _Kinds] = field(default_factory=dict, repr=False)

    def sum(self, costs: BlockCosts, column: Floats) -> Floats:
        """Return the sum of a `[K, R]` cost over the blocks of this rank."""
        kinds = self._kinds_of(costs)
        of_kinds = (column[kinds.key] * kinds.num_blocks).sum(axis=1)
        return np.asarray(of_kinds[kinds.of_plan])

    def sum_in_flight(self, costs: BlockCosts, column: Floats, kept: Floats) -> Floats:
        """Return the sum of a cost over the blocks of this rank, each chunk as often as `kept` [V, N] says."""
        total = np.zeros(len(self.rank))
        for low, high, times in zip(self.low, self.high, kept, strict=True):
            total += costs.among(column, low, high) * times
        return total

    def apart(self, pp: int) -> list[StageBlocks]:
        """Return the ranks of plans that stand rank by rank (`all_ranks`) one by one: first the first of every plan."""
        return [
            StageBlocks(
                rank=self.rank[rank::pp],
                low=self.low[:, rank::pp],
                high=self.high[:, rank::pp],
                is_first=self.is_first[rank::pp],
                is_last=self.is_last[rank::pp],
                shape=None if self.shape is None else self.shape[rank::pp],
            )
            for rank in range(pp)
        ]

    @cached_property
    def num_blocks(self) -> Ints:
        """Blocks of this rank."""
        return np.asarray((self.high - self.low).sum(axis=0))

    def chunk_shares(self, virtual: Ints) -> Floats:
        """Return `[V, N]`, the part of this rank's blocks in each of its `virtual` chunks, 0 beyond them."""
        most = int(virtual.max(initial=1))
        equal = np.where(np.arange(most)[:, None] < virtual, 1 / virtual, 0.0)
        if len(self.low) < most:
            return equal
        return np.where(self.num_blocks > 0, (self.high - self.low) / np.maximum(self.num_blocks, 1), equal)

    def _kinds_of(self, costs: BlockCosts) -> _Kinds:
        """Return the kinds of plans that cut and divide their blocks alike."""
        found = self._kinds.get(id(costs.key))
        if found is None:
            shape = np.zeros_like(self.rank) if self.shape is None else self.shape
            firsts, of_plan = first_rows(costs.key, shape)
            blocks = costs.counts[:, self.high[:, firsts]] - costs.counts[:, self.low[:, firsts]]
            found = _Kinds(costs.key, costs.key[firsts], blocks.sum(axis=1).T, of_plan)
            self._kinds[id(costs.key)] = found
        return found


def joined_ranks(stages: Sequence[StageBlocks]) -> StageBlocks:
    """Return the ranks of one plan as if each were a plan of its own."""
    return StageBlocks(
        rank=np.concatenate([stage.rank for stage in stages]),
        low=np.concatenate([stage.low for stage in stages], axis=1),
        high=np.concatenate([stage.high for stage in stages], axis=1),
        is_first=np.concatenate([stage.is_first for stage in stages]),
        is_last=np.concatenate([stage.is_last for stage in stages]),
        shape=np.arange(len(stages)),
    )


def all_ranks(table: PlanTable, num_blocks: int) -> StageBlocks:
    """Return the ranks of plans with as many each, all of the first plan first, as if each were a plan of its own."""
    pp = int(table.pp[0])
    rows = np.repeat(np.arange(len(table)), pp)
    return even_stage(table.select(rows), num_blocks, np.tile(np.arange(pp), len(table)))


def even_stage(table: PlanTable, num_blocks: int, rank: Ints, *, are_alike: bool = False) -> StageBlocks:
    """Return the blocks of pipeline rank `rank` (one entry a plan): blocks are split evenly, or as the table says.

    With virtual stages, rank i holds chunks i, i + pp, i + 2 pp, ... (Narayanan et al. 2021, section 2.2).
    `are_alike` says that all blocks of the model are.
    """
    num_stages = table.pp * table.virtual
    most = int(table.virtual.max(initial=1))
    is_even = are_alike and not table.split.any() and not (num_blocks % num_stages).any()
    if most > 1 and is_even:
        return _uniform_stage(table, num_blocks, rank)
    low, high = np.zeros((most, len(table)), np.int64), np.zeros((most, len(table)), np.int64)
    split = table.split
    share, rest = num_blocks // num_stages, num_blocks % num_stages
    for chunk in range(most):
        held = chunk < table.virtual
        stage = rank + chunk * table.pp
        start = stage * share + np.minimum(stage, rest)
        end = start + share + (stage < rest)
        if split.any():
            within = np.minimum(stage, table.splits.shape[1] - 2)
            start = np.where(split > 0, table.splits[split, within], start)
            end = np.where(split > 0, table.splits[split, within + 1], end)
        low[chunk] = np.where(held, start, 0)
        high[chunk] = np.where(held, end, 0)
    _, shape = distinct_rows(table.pp, table.virtual, rank, split)
    return StageBlocks(rank=rank, low=low, high=high, is_first=rank == 0, is_last=rank == table.pp - 1, shape=shape)


def _uniform_stage(table: PlanTable, num_blocks: int, rank: Ints) -> StageBlocks:
    """Return the blocks of a rank that has `num_blocks / pp`, as if they were its first ones."""
    share = (num_blocks // table.pp)[None]
    _, shape = distinct_rows(table.pp, rank)
    return StageBlocks(
        rank=rank, low=np.zeros_like(share), high=share, is_first=rank == 0, is_last=rank == table.pp - 1, shape=shape
    )


def running_parameters(model: ModelSpec) -> Floats:
    """Return `[B + 1]`, the running sum of the blocks' parameters."""
    counts = np.concatenate([np.full(run.count, float(run.block.num_parameters)) for run in model.runs])
    return np.concatenate([[0.0], np.cumsum(counts)])


def inner_ranks(table: PlanTable, running: Floats) -> tuple[Ints, Ints]:
    """Return two ranks of each plan that stand for those between the first and the last: with most and least of blocks.

    `running` is `[B + 1]`, the running sum of what a block counts. Of an even split of blocks that are alike these are
    the second and the last but one, which are also taken of ranks with several chunks.
    """
    last = table.pp - 1
    most, least = np.minimum(1, last), np.maximum(last - 1, 0)
    uneven = np.flatnonzero(are_unlike(table, running) & (table.virtual == 1))
    (splits, pps), kind = distinct_rows(table.split[uneven], table.pp[uneven])
    found = np.zeros((2, len(splits)), dtype=np.int64)
    for place, (split, pp) in enumerate(zip(splits, pps, strict=True)):
        between = _rank_loads(table, running, split=int(split), pp=int(pp), virtual=1)[1:-1]
        found[:, place] = 1 + _first_most(between), len(between) - _first_most(-between[::-1])
    most[uneven], least[uneven] = found[:, kind]
    return most, least


def fullest_ranks(table: PlanTable, running: Floats) -> Ints:
    """Return the inner rank of each plan with most of its blocks, by `running` [B + 1]; the second where all are alike.

    Of several it is the first one, which keeps most micro-batches in flight; under zero bubble the last one, which puts
    off most gradients of weights (`in_flight`).
    """
    fullest = np.minimum(1, table.pp - 1)
    rows = np.flatnonzero(are_unlike(table, running))
    zero_bubble = (table.schedule[rows] == ScheduleCode.ZERO_BUBBLE).astype(np.int64)
    (splits, pps, virtuals, lasts), kind = distinct_rows(
        table.split[rows], table.pp[rows], table.virtual[rows], zero_bubble
    )
    found = np.zeros(len(splits), dtype=np.int64)
    for place, (split, pp, virtual, takes_last) in enumerate(zip(splits, pps, virtuals, lasts, strict=True)):
        between = _rank_loads(table, running, split=int(split), pp=int(pp), virtual=int(virtual))[1:-1]
        found[place] = len(between) - _first_most(between[::-1]) if takes_last else 1 + _first_most(between)
    fullest[rows] = found[kind]
    return fullest


def are_unlike(table: PlanTable, running: Floats) -> Mask:
    """Return which plans have inner ranks that differ in what they hold of the blocks."""
    each = np.diff(running)
    has_kinds = bool(len(each)) and not np.allclose(each, each[0], rtol=1e-9, atol=0.0)
    uneven = (len(each) % (table.pp * table.virtual) > 0) | (table.split > 0) | has_kinds
    return np.asarray(uneven & (table.pp > 3))


def _rank_loads(table: PlanTable, running: Floats, *, split: int, pp: int, virtual: int) -> Floats:
    """Return what each of `pp` ranks holds of the blocks, by their `running` sum."""
    stages, num_blocks = pp * virtual, len(running) - 1
    if split:
        bounds = table.splits[split, : stages + 1]
    else:
        share, rest = divmod(num_blocks, stages)
        number = np.arange(stages + 1)
        bounds = number * share + np.minimum(number, rest)
    return np.asarray(np.diff(running[bounds]).reshape(virtual, pp).sum(axis=0))


def _first_most(values: Floats) -> int:
    """Return where the largest of `values` stands first, but for rounding."""
    return int(np.argmax(values >= values.max() - 1e-9 * abs(values.max())))


def in_flight(table: PlanTable, stage: StageBlocks) -> Floats:
    """Return how many micro-batches a rank of `stage` keeps activations of, counted in whole stages.

    GPipe keeps all. 1F1B keeps at most `pp - i` (Narayanan et al. 2021, section 2.2.1). Zero bubble keeps `pp` on every
    rank: rank i puts off the weight gradients of i micro-batches (Qi et al. 2024, ZB-H1, section 2.2). Interleaved,
    rank i starts `2 (pp - i - 1) + (v - 1) pp + 1` chunks of 1/v stage before its first backward pass (section 2.2.2;
    on the first rank this is `pp + (pp - 1) / v` stages, as in Korthikanti et al. 2022, section 4.2.3).
    """
    return mean_in_flight(table, chunk_in_flight(table, stage))


def mean_in_flight(table: PlanTable, kept: Floats) -> Floats:
    """Return the mean of `kept` over the chunks of a rank."""
    return np.asarray(kept.sum(axis=0) / (table.virtual if len(kept) > 1 else 1))


def chunk_in_flight(table: PlanTable, stage: StageBlocks) -> Floats:
    """Return `[V, N]`: how many micro-batches of each virtual chunk a rank keeps when its first backward pass begins.

    Interleaved, `pp` micro-batches go through one chunk after the other, so that the first chunks are ahead of the last
    (Narayanan et al. 2021, section 2.2.2). `[1, N]` for a rank whose chunks count as one: their mean.
    """
    if len(stage.low) == 1:
        interleaved = np.minimum(_started(table, stage) / table.virtual, table.num_microbatches)
        return np.where(table.schedule == ScheduleCode.INTERLEAVED, interleaved, _whole_in_flight(table, stage))[None]
    return np.stack(
        [one_chunk_in_flight(table, stage, np.full_like(stage.rank, chunk)) for chunk in range(len(stage.low))]
    )


def one_chunk_in_flight(table: PlanTable, stage: StageBlocks, chunk: Ints) -> Floats:
    """Return how many micro-batches of virtual chunk `chunk` a rank keeps when its first backward pass begins."""
    microbatches = table.num_microbatches
    round_size = table.pp * table.virtual
    rounds, rest = np.divmod(np.minimum(_started(table, stage), microbatches * table.virtual), round_size)
    group = np.minimum(table.pp, microbatches - rounds * table.pp)
    interleaved = rounds * table.pp + np.clip(rest - chunk * group, 0, group)
    kept = np.where(
        table.schedule == ScheduleCode.INTERLEAVED, interleaved, _whole_in_flight(table, stage) * (chunk == 0)
    )
    return np.where(chunk < table.virtual, kept, 0).astype(float)


def _started(table: PlanTable, stage: StageBlocks) -> Ints:
    """Return how many chunks a rank starts before its first backward pass, interleaved."""
    return np.asarray(2 * (table.pp - stage.rank - 1) + (table.virtual - 1) * table.pp + 1)


def _whole_in_flight(table: PlanTable, stage: StageBlocks) -> Ints:
    """Return how many micro-batches a rank without chunks keeps."""
    ahead = np.where(table.schedule == ScheduleCode.ZERO_BUBBLE, table.pp, table.pp - stage.rank)
    depth = np.minimum(table.num_microbatches, ahead)
    return np.where(table.pp == 1, 1, np.where(table.schedule == ScheduleCode.GPIPE, table.num_microbatches, depth))
