"""The bubble of a pipeline: what its slowest rank waits in a step, by the closed forms of `schedule`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paraplan.cost.pipeline.runs import StageRuns
from paraplan.cost.pipeline.schedule import Pipelines, pipeline_s
from paraplan.cost.plan_table import Floats, Ints, PlanTable


@dataclass(frozen=True, eq=False)
class RankSeconds:
    """Seconds of one micro-batch on one pipeline rank, all of its chunks together, with the sends that it waits for.

    `end_s` is the part of the embedding, or of the head and the loss: it belongs to one chunk. `weight_s` is the part
    of the backward pass that zero bubble may put off.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    end_s: Floats

    @property
    def total_s(self) -> Floats:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def bubble_s(table: PlanTable, ranks: list[RankSeconds], all_ranks_s: Floats) -> Floats:
    """Return the seconds of a step in which the slowest rank computes nothing; 0 without a pipeline.

    `ranks` are the first, the second, the last but one and the last of each plan; for a single plan without chunks, all
    of its ranks. `all_ranks_s` are the seconds of a micro-batch on all of them: the ranks between are like the second
    or like the last but one, in numbers that make up the sum.
    """
    slowest = np.max([rank.total_s for rank in ranks], axis=0)
    pipelines = Pipelines(
        schedule=table.schedule,
        pp=table.pp,
        virtual=table.virtual,
        num_microbatches=table.num_microbatches,
        stages=_one_by_one(ranks) if _is_complete(table, ranks) else _runs(table, ranks, all_ranks_s),
    )
    waited = pipeline_s(pipelines) - table.num_microbatches * slowest
    return np.where(table.pp > 1, np.maximum(waited, 0.0), 0.0)


def _is_complete(table: PlanTable, ranks: list[RankSeconds]) -> bool:
    return bool((table.virtual == 1).all() and (table.pp == len(ranks)).all())


def _one_by_one(ranks: list[RankSeconds]) -> StageRuns:
    columns = _stacked(ranks)
    # Neighbours that are alike in all plans make one run.
    alike = [np.isclose(each[1:], each[:-1], rtol=1e-9, atol=0.0).all(axis=1) for each in columns]
    firsts = np.flatnonzero(np.concatenate([[True], ~np.all(alike, axis=0)]))
    counts = np.diff(firsts, append=len(ranks))
    forward, backward, weight = (each[firsts] for each in columns)
    return StageRuns(
        np.repeat(counts[:, None], forward.shape[1], axis=1), forward, backward, weight, np.zeros(forward.shape[1])
    )


def _stacked(ranks: Sequence[RankSeconds]) -> tuple[Floats, Floats, Floats]:
    forward, backward, weight = (
        np.stack([getattr(rank, name) for rank in ranks]) for name in ("forward_s", "backward_s", "weight_s")
    )
    return forward, backward, weight


def _runs(table: PlanTable, ranks: list[RankSeconds], all_ranks_s: Floats) -> StageRuns:
    first, second, before_last, last = (ranks[place] for place in (0, 1, -2, -1))
    num_stages = table.pp * table.virtual
    between = np.maximum(num_stages - 2, 0)
    ends = _chunk(table, first, has_end=True), _chunk(table, last, has_end=True)
    # Inner chunks of the first and the last rank are like those of the ranks between.
    larger, smaller = _chunk(table, second), _chunk(table, before_last)
    rest = all_ranks_s - ends[0].total_s - ends[1].total_s
    number = _number_of_larger(larger.total_s, smaller.total_s, rest, between)
    parts = (ends[0], larger, smaller, ends[1])
    counts = np.stack([np.ones_like(between), number, between - number, (num_stages > 1).astype(np.int64)])
    return StageRuns(counts, *_stacked(parts), np.zeros(len(table)))


def _chunk(table: PlanTable, rank: RankSeconds, *, has_end: bool = False) -> RankSeconds:
    """Return one chunk of a rank, with the embedding or the head, or without."""
    end = rank.end_s * (1.0 if has_end else 0.0)
    return RankSeconds(
        forward_s=(rank.forward_s - rank.end_s / 3) / table.virtual + end / 3,
        backward_s=(rank.backward_s - rank.end_s * 2 / 3) / table.virtual + end * 2 / 3,
        weight_s=(rank.weight_s - rank.end_s / 3) / table.virtual + end / 3,
        end_s=end,
    )


def _number_of_larger(larger_s: Floats, smaller_s: Floats, rest_s: Floats, between: Ints) -> Ints:
    """Return how many of the stages between are like the larger kind, so that they sum to `rest_s`."""
    apart = np.abs(larger_s - smaller_s)
    differ = apart > 1e-9 * np.maximum(larger_s, smaller_s)
    number = (rest_s - between * smaller_s) / np.where(differ, larger_s - smaller_s, 1.0)
    return np.where(differ, np.clip(np.round(number), 0, between), between).astype(np.int64)
