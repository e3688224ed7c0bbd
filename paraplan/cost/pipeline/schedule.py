"""Seconds of a step of many pipelines at once: GPipe, and 1F1B without sends, in closed form; others by recurrence.

Exact courses of single plans are in `schedule_simulation`; the forms here are held against them by tests.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from paraplan.cost.pipeline.one_forward import one_forward_one_backward_s
from paraplan.cost.pipeline.recurrence import recurrence_s
from paraplan.cost.pipeline.runs import StageRuns
from paraplan.cost.plan_table import SCHEDULES, Floats, Ints

_GPIPE = SCHEDULES.index("gpipe")
_ONE_FORWARD = SCHEDULES.index("1f1b")
_INTERLEAVED = SCHEDULES.index("interleaved_1f1b")


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
    schedule = np.where((schedule == _ONE_FORWARD) & (one_each.virtual > 1), _INTERLEAVED, schedule)
    has_sends = one_each.stages.send_s > 0
    for name, sends in sorted(set(zip(schedule.tolist(), has_sends.tolist(), strict=True))):
        rows = np.flatnonzero((schedule == name) & (has_sends == sends))
        part = one_each.select(rows)
        if name == 0:
            seconds[rows] = part.num_microbatches * part.stages.total_s
        elif name == _GPIPE:
            seconds[rows] = _gpipe_s(part)
        elif name == _ONE_FORWARD and not sends:
            seconds[rows] = one_forward_one_backward_s(part.stages, part.num_microbatches)
        else:
            seconds[rows] = _followed_s(name, part)
    return np.asarray(seconds[inverse])


def _gpipe_s(part: Pipelines) -> Floats:
    """Return GPipe's seconds: two flow shops of equal jobs, one behind the other, `sum + (m - 1) max` each.

    All backward passes follow all forward passes on the last stage, so the two do not overlap there.
    """
    stages = part.stages
    is_there = stages.counts > 0
    slowest = sum(np.where(is_there, each, 0.0).max(axis=0) for each in (stages.forward_s, stages.backward_s))
    sends = 2 * (part.pp - 1) * stages.send_s
    return np.asarray(stages.total_s + sends + (part.num_microbatches - 1) * slowest)


def _followed_s(schedule: int, part: Pipelines) -> Floats:
    """Return the seconds of interleaved and zero-bubble pipelines, those of one shape together."""
    name = SCHEDULES[schedule]
    assert name is not None
    seconds = np.zeros(len(part))
    shapes, shape_of = np.unique(np.stack([part.pp, part.virtual]), axis=1, return_inverse=True)
    for number, (pp, virtual) in enumerate(shapes.T):
        rows = np.flatnonzero(shape_of.reshape(-1) == number)
        columns = part.stages.select(rows).by_stage(int(pp * virtual))
        seconds[rows] = recurrence_s(name, columns, num_ranks=int(pp), num_microbatches=part.num_microbatches[rows])
    return seconds


def _distinct(pipelines: Pipelines) -> tuple[Ints, Ints]:
    """Return the first of each kind of equal pipelines, and the kind of each.

    Rows are compared by a 64-bit hash of all their columns: multiplied by odd constants and mixed, so that two of a
    million different rows share one with a probability of about 1e-7.
    """
    stages = pipelines.stages
    columns = [pipelines.schedule, pipelines.pp, pipelines.virtual, pipelines.num_microbatches]
    columns += [row for field in fields(stages) for row in np.atleast_2d(getattr(stages, field.name))]
    mixed = np.zeros(len(pipelines), dtype=np.uint64)
    for column in columns:
        bits = np.ascontiguousarray(column, dtype=np.float64).view(np.uint64)
        mixed = (mixed ^ bits) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    _, firsts, inverse = np.unique(mixed, return_index=True, return_inverse=True)
    return firsts, inverse.reshape(-1)
