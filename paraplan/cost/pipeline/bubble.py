"""The bubble of a pipeline: what its slowest rank waits in a step, for many pipelines at once.

Sends are part of the seconds of a rank. Exact timelines of single plans are in `simulation`, which tests hold the forms
here against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paraplan.cost.pipeline.recurrence import Shape, recurrence_s
from paraplan.cost.pipeline.simulation import PassSeconds, RankSeconds
from paraplan.cost.plan_table import SCHEDULES, Floats, Ints, PlanTable, ScheduleCode


@dataclass(frozen=True, eq=False)
class StageRuns:
    """Virtual stages in model order as `R` runs of equal stages, one column a pipeline."""

    counts: Ints
    """Stages of each run, `[R, N]`; they sum to pp times virtual stages, and a run may be empty."""
    passes: PassSeconds
    """Seconds on one stage of each run, `[R, N]`."""

    @property
    def total_s(self) -> Floats:
        """Seconds of one micro-batch on all stages, forward and backward."""
        return np.asarray((self.counts * self.passes.total_s).sum(axis=0))

    def select(self, rows: Ints) -> StageRuns:
        """Return some of the columns."""
        return StageRuns(self.counts[:, rows], self.passes.columns(rows))

    def by_stage(self, num_stages: int) -> PassSeconds:
        """Return the stages one by one, for columns that all have `num_stages`."""
        ends = np.cumsum(self.counts, axis=0)
        run = (np.arange(num_stages)[:, None, None] >= ends[None]).sum(axis=1)
        return PassSeconds(*(np.take_along_axis(each, run, axis=0) for each in _arrays(self.passes)))


def _arrays(passes: PassSeconds) -> tuple[Floats, Floats, Floats]:
    return passes.forward_s, passes.backward_s, passes.weight_s


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Pipelines in columns: schedule (an index into SCHEDULES), ranks, chunks of a rank, micro-batches, and stages."""

    schedule: Ints
    pp: Ints
    virtual: Ints
    num_microbatches: Ints
    stages: StageRuns

    def __len__(self) -> int:
        return len(self.pp)

    def select(self, rows: Ints) -> Pipelines:
        """Return some of the pipelines."""
        columns = (self.schedule[rows], self.pp[rows], self.virtual[rows], self.num_microbatches[rows])
        return Pipelines(*columns, self.stages.select(rows))


def pipeline_s(pipelines: Pipelines) -> Floats:
    """Return the seconds from the first forward pass to the end of the last backward pass of each pipeline.

    One rank takes its micro-batches one after the other. Equal pipelines are computed once.
    """
    firsts, inverse = _distinct(pipelines)
    one_each = pipelines.select(firsts)
    seconds = np.zeros(len(one_each))
    schedule = np.where(one_each.pp == 1, 0, one_each.schedule)
    # Chunks of a rank make 1F1B interleaved.
    schedule = np.where(
        (schedule == ScheduleCode.ONE_FORWARD_ONE_BACKWARD) & (one_each.virtual > 1), ScheduleCode.INTERLEAVED, schedule
    )
    followed = []
    for name in sorted(set(schedule.tolist())):
        rows = np.flatnonzero(schedule == name)
        part = one_each.select(rows)
        if name == ScheduleCode.NO_PIPELINE:
            seconds[rows] = part.num_microbatches * part.stages.total_s
        elif name == ScheduleCode.GPIPE:
            seconds[rows] = _gpipe_s(part)
        else:
            followed += [(rows[own], shape) for own, shape in _shapes(name, part)]
    for (rows, _), own_s in zip(followed, recurrence_s([shape for _, shape in followed]), strict=True):
        seconds[rows] = own_s
    return np.asarray(seconds[inverse])


def _gpipe_s(part: Pipelines) -> Floats:
    """Return GPipe's seconds: two flow shops of equal jobs, one behind the other, `sum + (m - 1) max` each.

    All backward passes follow all forward passes on the last stage, so the two do not overlap there.
    """
    stages = part.stages
    is_there = stages.counts > 0
    slowest = sum(
        np.where(is_there, each, 0.0).max(axis=0) for each in (stages.passes.forward_s, stages.passes.backward_s)
    )
    return np.asarray(stages.total_s + (part.num_microbatches - 1) * slowest)


def _shapes(schedule: int, part: Pipelines) -> Iterator[tuple[Ints, Shape]]:
    """Yield the rows of pipelines of one schedule that have one shape, and these."""
    name = SCHEDULES[schedule]
    assert name is not None
    shapes, shape_of = np.unique(np.stack([part.pp, part.virtual]), axis=1, return_inverse=True)
    for number, (pp, virtual) in enumerate(shapes.T):
        rows = np.flatnonzero(shape_of.reshape(-1) == number)
        columns = part.stages.select(rows).by_stage(int(pp * virtual))
        yield rows, Shape(name, int(pp), columns, part.num_microbatches[rows])


def _distinct(pipelines: Pipelines) -> tuple[Ints, Ints]:
    """Return the first of each kind of equal pipelines, and the kind of each.

    Rows are compared by a 64-bit hash of all their columns: multiplied by odd constants and mixed, so that two of a
    million different rows share one with a probability of about 1e-7.
    """
    stages = pipelines.stages
    columns = [pipelines.schedule, pipelines.pp, pipelines.virtual, pipelines.num_microbatches]
    columns += [row for each in (stages.counts, *_arrays(stages.passes)) for row in each]
    mixed = np.zeros(len(pipelines), dtype=np.uint64)
    for column in columns:
        bits = np.ascontiguousarray(column, dtype=np.float64).view(np.uint64)
        mixed = (mixed ^ bits) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    _, firsts, inverse = np.unique(mixed, return_index=True, return_inverse=True)
    return firsts, inverse.reshape(-1)


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
    passes = _stacked(ranks)
    # Neighbours that are alike in all plans make one run.
    alike = [np.isclose(each[1:], each[:-1], rtol=1e-9, atol=0.0).all(axis=1) for each in _arrays(passes)]
    firsts = np.flatnonzero(np.concatenate([[True], ~np.all(alike, axis=0)]))
    counts = np.diff(firsts, append=len(ranks))
    kept = PassSeconds(*(each[firsts] for each in _arrays(passes)))
    return StageRuns(np.repeat(counts[:, None], kept.forward_s.shape[1], axis=1), kept)


def _stacked(ranks: Sequence[PassSeconds]) -> PassSeconds:
    return PassSeconds(*(np.stack(each) for each in zip(*map(_arrays, ranks), strict=True)))


def _runs(table: PlanTable, ranks: list[RankSeconds], all_ranks_s: Floats) -> StageRuns:
    first, second, before_last, last = (ranks[place] for place in (0, 1, -2, -1))
    num_stages = table.pp * table.virtual
    between = np.maximum(num_stages - 2, 0)
    last_share = last.shares[table.virtual - 1, np.arange(len(table))]
    ends = first.chunk(first.shares[0], has_end=True), last.chunk(last_share, has_end=True)
    # Inner chunks of the first and the last rank are like those of the ranks between.
    held = np.arange(len(before_last.shares))[:, None] < table.virtual
    larger = second.chunk(second.shares.max(axis=0), has_end=False)
    smaller = before_last.chunk(np.where(held, before_last.shares, np.inf).min(axis=0), has_end=False)
    rest = all_ranks_s - ends[0].total_s - ends[1].total_s
    number = _number_of_larger(larger.total_s, smaller.total_s, rest, between)
    parts = (ends[0], larger, smaller, ends[1])
    counts = np.stack([np.ones_like(between), number, between - number, (num_stages > 1).astype(np.int64)])
    return StageRuns(counts, _stacked(parts))


def _number_of_larger(larger_s: Floats, smaller_s: Floats, rest_s: Floats, between: Ints) -> Ints:
    """Return how many of the stages between are like the larger kind, so that they sum to `rest_s`."""
    apart = np.abs(larger_s - smaller_s)
    differ = apart > 1e-9 * np.maximum(larger_s, smaller_s)
    number = (rest_s - between * smaller_s) / np.where(differ, larger_s - smaller_s, 1.0)
    return np.where(differ, np.clip(np.round(number), 0, between), between).astype(np.int64)
