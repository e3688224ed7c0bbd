"""The timeline of many pipelines of one shape at once: the simulation as a recurrence over arrays.

For schedules with unequal stages no short closed form holds within a percent. Their operations are put into levels,
each of which depends on earlier ones alone; a level is one step over the columns of all plans.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paraplan.cost.pipeline.simulation import PassSeconds, PipelineTask, input_of, rank_order
from paraplan.cost.plan_table import Floats, Ints
from paraplan.plan.parallel import ScheduleName

EXACT_ROUNDS = 3
EXACT_MICROBATCHES = 64
"""So many rounds of p micro-batches, and at least so many micro-batches, are followed exactly; the others repeat."""

_KINDS = ("forward", "backward", "weight")
_ROWS_AT_A_TIME = 256


class _Level(NamedTuple):
    """Operations that do not depend on each other: their ranks, inputs and durations by position."""

    first: int
    ranks: Ints
    inputs: Ints
    durations: Ints


def recurrence_s(schedule: ScheduleName, stages: PassSeconds, *, num_ranks: int, num_microbatches: Ints) -> Floats:
    """Return the seconds of a step for columns of stages, `[stages, N]`, each with its number of micro-batches.

    Equal to `simulate_pipeline` where the timeline is followed; every further round takes as long as its last.
    Micro-batches that make no equal rounds for several chunks, which nothing executes, count as a share of more.
    """
    virtual = len(stages.forward_s) // num_ranks
    group = -(-num_microbatches // np.maximum(1, num_microbatches // num_ranks))
    count = num_microbatches if virtual == 1 else -(-num_microbatches // group) * group
    rounds = np.maximum(EXACT_ROUNDS, -(-EXACT_MICROBATCHES // group))
    followed = np.minimum(count, rounds * group + count % group)
    seconds = np.zeros(len(count))
    # All that go on beyond what is followed share it, however many more rounds they have.
    goes_on = count > followed
    for most, size, further in sorted(set(zip(followed.tolist(), group.tolist(), goes_on.tolist(), strict=True))):
        rows = np.flatnonzero((followed == most) & (group == size) & (goes_on == further))
        part = stages.columns(rows)
        longer = _exact_s(schedule, part, num_ranks, virtual, most, size)
        if further:
            shorter = _exact_s(schedule, part, num_ranks, virtual, most - size, size)
            longer = longer + (longer - shorter) * ((count[rows] - most) // size)
        seconds[rows] = longer
    return np.asarray(seconds * (num_microbatches / count))


def _exact_s(
    schedule: ScheduleName, stages: PassSeconds, num_ranks: int, virtual: int, num_microbatches: int, group: int
) -> Floats:
    levels, count = _levels_of_shape(schedule, num_ranks, virtual, num_microbatches, group)
    parts = [
        _follow(levels, count, stages.columns(slice(first, first + _ROWS_AT_A_TIME)), num_ranks, schedule)
        for first in range(0, stages.forward_s.shape[1], _ROWS_AT_A_TIME)
    ]
    return np.concatenate([np.zeros(0), *parts])


@lru_cache(maxsize=32)
def _levels_of_shape(
    schedule: ScheduleName, num_ranks: int, virtual: int, num_microbatches: int, group: int
) -> tuple[list[_Level], int]:
    if schedule == "interleaved_1f1b" and group == num_ranks and virtual > 1:
        return _interleaved_levels(num_ranks, virtual, num_microbatches)
    if schedule in ("1f1b", "zero_bubble") and virtual == 1:
        return _turns_levels(num_ranks, num_microbatches, splits_backward=schedule == "zero_bubble")
    return _levels(schedule, num_ranks, virtual, num_microbatches, group)


def _follow(levels: list[_Level], count: int, stages: PassSeconds, num_ranks: int, schedule: ScheduleName) -> Floats:
    delayed = stages.weight_s if schedule == "zero_bubble" else np.zeros_like(stages.weight_s)
    seconds = np.concatenate([stages.forward_s, stages.backward_s - delayed, stages.weight_s])
    # The last row stands for what has no input.
    ends = np.zeros((count + 1, stages.forward_s.shape[1]))
    free = np.zeros((num_ranks, stages.forward_s.shape[1]))
    for level in levels:
        ready = ends[level.inputs]
        done = np.maximum(free[level.ranks], ready, out=ready)
        done += seconds[level.durations]
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
                durations=np.array([_KINDS.index(task.kind) * (last + 1) + task.stage for task in tasks]),
            )
        )
        first += len(tasks)
    return found


def _interleaved_levels(num_ranks: int, virtual: int, num_microbatches: int) -> tuple[list[_Level], int]:
    """Return the levels of interleaved 1F1B with rounds of p micro-batches, from the slots of equal operations.

    With operations of one slot each, rank i takes its forward pass x in slot i + x while it warms up, and backward pass
    y in slot v p + 2 (p - 1 - i) + 2 y + 1, with a forward pass before each; what an operation reads is always done in
    an earlier slot (the idle slots are those of torch's schedule).
    """
    p, passes = num_ranks, num_microbatches * virtual
    rank, index = (grid.reshape(-1) for grid in np.meshgrid(np.arange(p), np.arange(passes), indexing="ij"))
    warmup = np.minimum((virtual - 1) * p + 2 * (p - 1 - rank), passes)
    steady = virtual * p + 2 * (p - 1 - rank)
    micro_batch = index // (p * virtual) * p + index % p
    chunk = index // p % virtual
    return _levels_of_slots(
        kind=np.repeat([0, 1], len(index)),
        stage=np.concatenate([chunk * p + rank, (virtual - 1 - chunk) * p + rank]),
        micro_batch=np.concatenate([micro_batch, micro_batch]),
        slot=np.concatenate(
            [np.where(index < warmup, rank + index, steady + 2 * (index - warmup)), steady + 2 * index + 1]
        ),
        num_ranks=p,
    )


def _turns_levels(num_ranks: int, num_microbatches: int, *, splits_backward: bool) -> tuple[list[_Level], int]:
    """Return the levels of 1F1B and zero bubble with one stage a rank: turns of forward, backward and weight passes.

    Rank i warms up in slots i + x. Turns of 1F1B have two slots, those of zero bubble a third one for the weights.
    """
    p, turn = num_ranks, 3 if splits_backward else 2
    rank, index = (grid.reshape(-1) for grid in np.meshgrid(np.arange(p), np.arange(num_microbatches), indexing="ij"))
    warmup = np.minimum(p - 1 - rank, num_microbatches)
    first = (2 * p - 1 if splits_backward else 2 * p - 2) - rank
    slots = [np.where(index < warmup, rank + index, first + turn * (index - warmup)), first + turn * index + 1]
    if splits_backward:
        # Rank i leaves the weights of i micro-batches for later.
        slots.append(first + turn * (index + rank) + 2)
    kinds = len(slots)
    return _levels_of_slots(
        kind=np.repeat(np.arange(kinds), len(index)),
        stage=np.tile(rank, kinds),
        micro_batch=np.tile(index, kinds),
        slot=np.concatenate(slots),
        num_ranks=p,
    )


def _levels_of_slots(
    *, kind: Ints, stage: Ints, micro_batch: Ints, slot: Ints, num_ranks: int
) -> tuple[list[_Level], int]:
    """Return operations by slot; `kind` is an index into the kinds. What an operation reads has an earlier slot."""
    order = np.argsort(slot, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    last = int(stage.max())
    # Where each stage's pass of each micro-batch stands; the entry behind the last stage stands for no input.
    where = np.full((3, last + 2, int(micro_batch.max()) + 1), -1)
    where[kind, stage, micro_batch] = place
    read_by_backward = np.where(
        stage == last, where[0, stage, micro_batch], where[1, np.minimum(stage + 1, last), micro_batch]
    )
    inputs = np.choose(kind, [where[0, stage - 1, micro_batch], read_by_backward, where[1, stage, micro_batch]])
    ranks, inputs, durations = (column[order] for column in (stage % num_ranks, inputs, kind * (last + 1) + stage))
    bounds = np.flatnonzero(np.diff(slot[order], prepend=-1, append=slot.max() + 1))
    levels = [
        _Level(int(low), ranks[low:high], inputs[low:high], durations[low:high]) for low, high in pairwise(bounds)
    ]
    return levels, len(order)
