"""The course of many pipelines of one shape at once: the simulation as a recurrence over arrays.

For interleaved and zero-bubble schedules with unequal stages no closed form holds within a percent. Their operations
are put into levels, each of which depends on earlier ones alone; a level is one step over the columns of all plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paraplan.cost.schedule_simulation import PipelineTask, input_of, rank_order, round_size
from paraplan.cost.table import Floats, Ints
from paraplan.plan.parallel import ScheduleName

EXACT_ROUNDS = 3
EXACT_MICROBATCHES = 64
"""So many rounds of p micro-batches, and at least so many micro-batches, are followed exactly; the others repeat."""

_KINDS = ("forward", "backward", "weight")
_ROWS_AT_A_TIME = 256


@dataclass(frozen=True, eq=False)
class StageColumns:
    """Seconds of one micro-batch on each virtual stage, `[stages, N]`, and of a send, `[N]`.

    `weight_s` is the part of `backward_s` that zero bubble may put off.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    send_s: Floats

    def rows(self, rows: slice) -> StageColumns:
        """Return some of the columns."""
        return StageColumns(
            self.forward_s[:, rows], self.backward_s[:, rows], self.weight_s[:, rows], self.send_s[rows]
        )


class _Level(NamedTuple):
    """Operations that do not depend on each other: their ranks, inputs and durations by position."""

    first: int
    ranks: Ints
    inputs: Ints
    crosses: Floats
    durations: Ints


def recurrence_s(schedule: ScheduleName, stages: StageColumns, *, num_ranks: int, num_microbatches: int) -> Floats:
    """Return the seconds of a step for columns of stages under one schedule and number of micro-batches.

    Equal to `simulate_pipeline` as far as the course is followed; every further round takes as long as the last of it.
    Micro-batches that make no equal rounds for several chunks, which nothing executes, count as a share of more.
    """
    virtual = len(stages.forward_s) // num_ranks
    group = round_size(num_microbatches, num_ranks)
    if virtual > 1 and num_microbatches % group:
        whole = -(-num_microbatches // group) * group
        longer = recurrence_s(schedule, stages, num_ranks=num_ranks, num_microbatches=whole)
        return np.asarray(longer * (num_microbatches / whole))
    rounds = max(EXACT_ROUNDS, -(-EXACT_MICROBATCHES // group))
    most = rounds * group + num_microbatches % group
    if num_microbatches <= most:
        return _exact_s(schedule, stages, num_ranks, virtual, num_microbatches, group)
    longer, shorter = (_exact_s(schedule, stages, num_ranks, virtual, count, group) for count in (most, most - group))
    return np.asarray(longer + (longer - shorter) * ((num_microbatches - most) // group))


def _exact_s(
    schedule: ScheduleName, stages: StageColumns, num_ranks: int, virtual: int, num_microbatches: int, group: int
) -> Floats:
    levels, count = _levels(schedule, num_ranks, virtual, num_microbatches, group)
    parts = [
        _follow(levels, count, stages.rows(slice(first, first + _ROWS_AT_A_TIME)), num_ranks, schedule)
        for first in range(0, len(stages.send_s), _ROWS_AT_A_TIME)
    ]
    return np.concatenate([np.zeros(0), *parts])


def _follow(levels: list[_Level], count: int, stages: StageColumns, num_ranks: int, schedule: ScheduleName) -> Floats:
    delayed = stages.weight_s if schedule == "zero_bubble" else np.zeros_like(stages.weight_s)
    seconds = np.concatenate([stages.forward_s, stages.backward_s - delayed, stages.weight_s])
    # The last row stands for what has no input.
    ends = np.zeros((count + 1, len(stages.send_s)))
    free = np.zeros((num_ranks, len(stages.send_s)))
    for level in levels:
        ready = ends[level.inputs] + level.crosses * stages.send_s
        done = np.maximum(free[level.ranks], ready) + seconds[level.durations]
        free[level.ranks] = done
        ends[level.first : level.first + len(done)] = done
    return np.asarray(free.max(axis=0))


def _levels(
    schedule: ScheduleName, num_ranks: int, virtual: int, num_microbatches: int, group: int
) -> tuple[list[_Level], int]:
    """Return the operations of all ranks by level, and how many there are."""
    last = num_ranks * virtual - 1
    by_level: list[list[PipelineTask]] = []
    level_of: dict[PipelineTask, int] = {}
    orders = [
        list(
            rank_order(
                schedule,
                rank=rank,
                num_ranks=num_ranks,
                virtual=virtual,
                num_microbatches=num_microbatches,
                group=group,
            )
        )
        for rank in range(num_ranks)
    ]
    positions, moved = [0] * num_ranks, True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                task = order[positions[rank]]
                before = input_of(task, last)
                if before is not None and before not in level_of:
                    break
                previous = level_of[order[positions[rank] - 1]] if positions[rank] else -1
                level = 1 + max(previous, -1 if before is None else level_of[before])
                level_of[task] = level
                by_level.extend([] for _ in range(level + 1 - len(by_level)))
                by_level[level].append(task)
                positions[rank] += 1
                moved = True
    return _as_arrays(by_level, num_ranks, last), len(level_of)


def _as_arrays(by_level: list[list[PipelineTask]], num_ranks: int, last: int) -> list[_Level]:
    place = {task: number for number, task in enumerate(task for tasks in by_level for task in tasks)}
    found, first = [], 0
    for tasks in by_level:
        inputs = [input_of(task, last) for task in tasks]
        found.append(
            _Level(
                first=first,
                ranks=np.array([task.stage % num_ranks for task in tasks]),
                inputs=np.array([-1 if task is None else place[task] for task in inputs]),
                crosses=np.array(
                    [
                        float(before is not None and before.stage % num_ranks != task.stage % num_ranks)
                        for task, before in zip(tasks, inputs, strict=True)
                    ]
                )[:, None],
                durations=np.array([_KINDS.index(task.kind) * (last + 1) + task.stage for task in tasks]),
            )
        )
        first += len(tasks)
    return found
