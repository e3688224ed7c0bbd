"""Which blocks a pipeline rank holds, for many plans at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paraplan.cost.blocks import BlockCosts
from paraplan.cost.table import SCHEDULES, Floats, Ints, Mask, PlanTable

_GPIPE = SCHEDULES.index("gpipe")
_INTERLEAVED = SCHEDULES.index("interleaved_1f1b")


@dataclass(frozen=True, eq=False)
class StageBlocks:
    """The blocks of one pipeline rank under each plan of a table: chunk bounds, and whether it holds the ends.

    `low` and `high` are `[V, N]`: the bounds of each virtual chunk, equal where a plan has fewer chunks.
    """

    rank: Ints
    low: Ints
    high: Ints
    is_first: Mask
    is_last: Mask

    def sum(self, costs: BlockCosts, running: Floats) -> Floats:
        """Return the sum of a running `[K, B + 1]` cost over the blocks of this rank."""
        total = np.zeros(len(self.rank))
        for low, high in zip(self.low, self.high, strict=True):
            total += running[costs.key, high] - running[costs.key, low]
        return total

    def sum_in_flight(self, costs: BlockCosts, running: Floats, kept: Floats) -> Floats:
        """Return the sum of a running cost over the blocks of this rank, each chunk as often as `kept` [V, N] says."""
        total = np.zeros(len(self.rank))
        for low, high, times in zip(self.low, self.high, kept, strict=True):
            total += (running[costs.key, high] - running[costs.key, low]) * times
        return total

    @property
    def num_blocks(self) -> Ints:
        """Blocks of this rank."""
        return np.asarray((self.high - self.low).sum(axis=0))


def even_stage(table: PlanTable, num_blocks: int, rank: Ints, bounds: Ints | None = None) -> StageBlocks:
    """Return the blocks of pipeline rank `rank` (one entry a plan) when blocks are split evenly over the stages.

    With virtual stages, rank i holds chunks i, i + pp, i + 2 pp, ... (Narayanan et al. 2021, section 2.2).
    `bounds` replaces the even split of a one-row table: the first block of each stage, and the number of blocks.
    """
    num_stages = table.pp * table.virtual
    most = int(table.virtual.max(initial=1))
    low, high = np.zeros((most, len(table)), np.int64), np.zeros((most, len(table)), np.int64)
    for chunk in range(most):
        held = chunk < table.virtual
        stage = rank + chunk * table.pp
        if bounds is not None:
            stage = np.minimum(stage, len(bounds) - 2)
            start, end = bounds[stage], bounds[stage + 1]
        else:
            share, rest = num_blocks // num_stages, num_blocks % num_stages
            start = stage * share + np.minimum(stage, rest)
            end = start + share + (stage < rest)
        low[chunk] = np.where(held, start, 0)
        high[chunk] = np.where(held, end, 0)
    return StageBlocks(rank=rank, low=low, high=high, is_first=rank == 0, is_last=rank == table.pp - 1)


def in_flight(table: PlanTable, stage: StageBlocks) -> Floats:
    """Return how many micro-batches a rank of `stage` keeps activations of, counted in whole stages.

    GPipe keeps all. 1F1B keeps at most `pp - i` (Narayanan et al. 2021, section 2.2.1), and so do zero-bubble schedules
    of 1F1B's memory (Qi et al. 2024, ZB-H1, section 2.2). Interleaved, rank i starts `2 (pp - i - 1) + (v - 1) pp + 1`
    chunks of 1/v stage before its first backward pass (section 2.2.2; on the first rank this is `pp + (pp - 1) / v`
    stages, as in Korthikanti et al. 2022, section 4.2.3).
    """
    return np.asarray(chunk_in_flight(table, stage).sum(axis=0) / table.virtual)


def chunk_in_flight(table: PlanTable, stage: StageBlocks) -> Floats:
    """Return `[V, N]`: how many micro-batches of each virtual chunk a rank keeps when its first backward pass begins.

    Interleaved, `pp` micro-batches go through one chunk after the other, so that the first chunks are ahead of the last
    (Narayanan et al. 2021, section 2.2.2).
    """
    microbatches = table.num_microbatches
    depth = np.minimum(microbatches, table.pp - stage.rank)
    whole = np.where(table.pp == 1, 1, np.where(table.schedule == _GPIPE, microbatches, depth))
    started = 2 * (table.pp - stage.rank - 1) + (table.virtual - 1) * table.pp + 1
    rounds, rest = np.divmod(np.minimum(started, microbatches * table.virtual), table.pp * table.virtual)
    group = np.minimum(table.pp, microbatches - rounds * table.pp)
    kept = np.zeros(stage.low.shape)
    for chunk in range(len(kept)):
        interleaved = rounds * table.pp + np.clip(rest - chunk * group, 0, group)
        once = np.where(chunk == 0, whole, 0)
        kept[chunk] = np.where(table.schedule == _INTERLEAVED, np.where(chunk < table.virtual, interleaved, 0), once)
    return kept
