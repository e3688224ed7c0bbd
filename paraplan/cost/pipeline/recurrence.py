"""The timeline of many pipelines of one shape at once: the simulation as a recurrence over arrays.

For schedules with unequal stages no short closed form holds within a percent. Their operations are put into levels,
each of which depends on earlier ones alone; a level is one step over the columns of all plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paraplan.cost.pipeline.simulation import PassSeconds, rank_order
from paraplan.cost.plan_table import Floats, Ints
from paraplan.plan.parallel import ScheduleName

EXACT_ROUNDS = 3
EXACT_MICROBATCHES = 64
"""So many rounds of p micro-batches, and at least so many micro-batches, are followed exactly; the others repeat."""

_KINDS = ("forward", "backward", "weight")
_WIDE = 16
"""Columns from which a shape is worth steps of its own: narrower ones are followed together."""
_ROWS_AT_A_TIME = 256
_TOGETHER = 1 << 20
"""Entries of the table of ends up to which narrow shapes are followed together."""


class _Graph(NamedTuple):
    """The operations of one pipeline by level: none depends on another of its level or of a later one."""

    levels: Ints
    """The level of each operation, ascending."""
    ranks: Ints
    inputs: Ints
    """The operation that each waits for, -1 for none."""
    durations: Ints
    """Entries of the passes by kind and stage."""


class _Problem(NamedTuple):
    """Pipelines of one graph in columns: seconds by kind and stage, `[3 * stages, N]`."""

    graph: _Graph
    num_ranks: int
    seconds: Floats


@dataclass(frozen=True, eq=False)
class Shape:
    """Pipelines of one schedule and shape: columns of stages, `[stages, N]`, each with its number of micro-batches."""

    schedule: ScheduleName
    num_ranks: int
    stages: PassSeconds
    num_microbatches: Ints


def recurrence_s(shapes: Sequence[Shape]) -> list[Floats]:
    """Return the seconds of a step for the columns of each of `shapes`.

    Equal to `simulate_pipeline` where the timeline is followed; every further round takes as long as its last.
    Micro-batches that make no equal rounds for several chunks, which nothing executes, count as a share of more.
    """
    problems: list[_Problem] = []
    parts = [list(_parts(shape, problems)) for shape in shapes]
    solved = _solved(problems)
    found = []
    for shape, own in zip(shapes, parts, strict=True):
        seconds = np.zeros(len(shape.num_microbatches))
        for rows, longer, shorter, rounds, share in own:
            more = 0.0 if shorter is None else (solved[longer] - solved[shorter]) * rounds
            seconds[rows] = (solved[longer] + more) * share
        found.append(seconds)
    return found


def _parts(shape: Shape, problems: list[_Problem]) -> Iterator[tuple[Ints, int, int | None, Ints, Floats]]:
    """Add to `problems` what has to be followed; yield rows, the places of their problems, further rounds, and share.

    All that go on beyond what is followed share it, however many more rounds they have: a second problem is a round
    shorter.
    """
    number = shape.num_microbatches
    virtual = len(shape.stages.forward_s) // shape.num_ranks
    group = -(-number // np.maximum(1, number // shape.num_ranks))
    count = number if virtual == 1 else -(-number // group) * group
    rounds = np.maximum(EXACT_ROUNDS, -(-EXACT_MICROBATCHES // group))
    followed = np.minimum(count, rounds * group + count % group)
    goes_on = count > followed
    for most, size, further in sorted(set(zip(followed.tolist(), group.tolist(), goes_on.tolist(), strict=True))):
        rows = np.flatnonzero((followed == most) & (group == size) & (goes_on == further))
        seconds = _seconds_of(shape.schedule, shape.stages.columns(rows))
        places: list[int | None] = [None, None]
        for place, microbatches in enumerate((most, most - size) if further else (most,)):
            places[place] = len(problems)
            graph = _graph_of_shape(shape.schedule, shape.num_ranks, virtual, microbatches, size)
            problems.append(_Problem(graph, shape.num_ranks, seconds))
        longer, shorter = places
        assert longer is not None
        yield rows, longer, shorter, (count[rows] - most) // size, number[rows] / count[rows]


def _seconds_of(schedule: ScheduleName, stages: PassSeconds) -> Floats:
    backward_s = stages.backward_s - stages.weight_s if schedule == "zero_bubble" else stages.backward_s
    return np.concatenate([stages.forward_s, backward_s, stages.weight_s])


@lru_cache(maxsize=64)
def _graph_of_shape(schedule: ScheduleName, num_ranks: int, virtual: int, num_microbatches: int, group: int) -> _Graph:
    if schedule == "interleaved_1f1b" and group == num_ranks and virtual > 1:
        return _interleaved_graph(num_ranks, virtual, num_microbatches)
    if schedule in ("1f1b", "zero_bubble") and virtual == 1:
        return _turns_graph(num_ranks, num_microbatches, splits_backward=schedule == "zero_bubble")
    return _graph(schedule, num_ranks, virtual, num_microbatches, group)


def _solved(problems: Sequence[_Problem]) -> list[Floats]:
    """Return the seconds of the columns of each problem."""
    found = [np.zeros(problem.seconds.shape[1]) for problem in problems]
    together: list[int] = []
    entries = 0
    for place, (graph, num_ranks, seconds) in enumerate(problems):
        columns = seconds.shape[1]
        if columns >= _WIDE:
            for first in range(0, columns, _ROWS_AT_A_TIME):
                some = slice(first, first + _ROWS_AT_A_TIME)
                found[place][some] = _follow(graph, num_ranks, seconds[:, some]).max(axis=0)
            continue
        if together and entries + len(graph.levels) * _WIDE > _TOGETHER:
            _solve_together(problems, together, found)
            together, entries = [], 0
        together.append(place)
        entries += len(graph.levels) * _WIDE
    _solve_together(problems, together, found)
    return found


def _solve_together(problems: Sequence[_Problem], places: Sequence[int], found: list[Floats]) -> None:
    """Follow narrow problems as one, whose ranks stand one behind the other, and put what they take into `found`."""
    if not places:
        return
    own = [problems[place] for place in places]
    most = max(each.seconds.shape[1] for each in own)
    seconds = np.zeros((sum(len(each.seconds) for each in own), most))
    first = 0
    for each in own:
        seconds[first : first + len(each.seconds), : each.seconds.shape[1]] = each.seconds
        first += len(each.seconds)
    free = _follow(_joined(own), sum(each.num_ranks for each in own), seconds)
    first_ranks = np.cumsum([0, *(each.num_ranks for each in own[:-1])])
    ends = np.maximum.reduceat(free, first_ranks, axis=0)
    for place, each, end in zip(places, own, ends, strict=True):
        found[place][:] = end[: each.seconds.shape[1]]


def _joined(problems: Sequence[_Problem]) -> _Graph:
    """Return the graphs of some problems as one, whose operations, ranks and seconds stand one behind the other."""
    if len(problems) == 1:
        return problems[0].graph
    columns: list[tuple[Ints, Ints, Ints, Ints]] = []
    operations = ranks = entries = 0
    for graph, num_ranks, seconds in problems:
        inputs = np.where(graph.inputs < 0, -1, graph.inputs + operations)
        columns.append((graph.levels, graph.ranks + ranks, inputs, graph.durations + entries))
        operations, ranks, entries = operations + len(inputs), ranks + num_ranks, entries + len(seconds)
    return _by_level(*(np.concatenate(each) for each in zip(*columns, strict=True)))


def _by_level(levels: Ints, ranks: Ints, inputs: Ints, durations: Ints) -> _Graph:
    """Return operations, whose inputs are places among them, in the order of their levels."""
    order = np.argsort(levels, kind="stable")
    place = np.full(len(order) + 1, -1)  # the last entry is what -1 reads
    place[order] = np.arange(len(order))
    return _Graph(levels[order], ranks[order], place[inputs[order]], durations[order])


def _follow(graph: _Graph, num_ranks: int, seconds: Floats) -> Floats:
    """Return when each rank is free at last, `[ranks, N]`."""
    count = len(graph.levels)
    # The last row stands for what has no input.
    ends = np.zeros((count + 1, seconds.shape[1]))
    free = np.zeros((num_ranks, seconds.shape[1]))
    bounds = np.flatnonzero(np.diff(graph.levels, prepend=-1, append=-1)).tolist()
    for low, high in pairwise(bounds):
        ranks = graph.ranks[low:high]
        done = np.maximum(free[ranks], ends[graph.inputs[low:high]], out=ends[low:high])
        done += seconds[graph.durations[low:high]]
        free[ranks] = done
    return free


def _graph(schedule: ScheduleName, num_ranks: int, virtual: int, num_microbatches: int, group: int) -> _Graph:
    """Return the operations of all ranks in the order of a schedule."""
    num_stages = num_ranks * virtual
    orders = [
        [
            (_KINDS.index(kind) * num_microbatches + micro_batch) * num_stages + stage
            for kind, micro_batch, stage in rank_order(
                schedule,
                rank=rank,
                num_ranks=num_ranks,
                virtual=virtual,
                num_microbatches=num_microbatches,
                group=group,
            )
        ]
        for rank in range(num_ranks)
    ]
    operations = np.sort(np.concatenate([np.array(order, dtype=int) for order in orders]))
    kind, rest = np.divmod(operations, num_microbatches * num_stages)
    stage, of_stage = rest % num_stages, num_microbatches * num_stages
    reads = np.select(
        [kind == 2, kind == 0, stage == num_stages - 1],
        [operations - of_stage, np.where(stage > 0, operations - 1, -1), operations - of_stage],
        operations + 1,
    )
    levels = _levels(orders, dict(zip(operations.tolist(), reads.tolist(), strict=True)))
    return _by_level(
        levels=np.array([levels[operation] for operation in operations.tolist()]),
        ranks=stage % num_ranks,
        inputs=np.where(reads < 0, -1, np.searchsorted(operations, reads)),
        durations=kind * num_stages + stage,
    )


def _levels(orders: Sequence[Sequence[int]], reads: Mapping[int, int]) -> dict[int, int]:
    """Return how many operations come before each, of its rank and of what it `reads` (-1: nothing), at most."""
    level_of = {-1: -1}
    positions, previous, moved = [0] * len(orders), [-1] * len(orders), True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            position, level = positions[rank], previous[rank]
            while position < len(order):
                before = level_of.get(reads[order[position]])
                if before is None:
                    break
                level = 1 + max(level, before)
                level_of[order[position]] = level
                position += 1
            moved = moved or position > positions[rank]
            positions[rank], previous[rank] = position, level
    return level_of


def _interleaved_graph(num_ranks: int, virtual: int, num_microbatches: int) -> _Graph:
    """Return interleaved 1F1B with rounds of p micro-batches, from the slots of equal operations.

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
    return _graph_of_slots(
        kind=np.repeat([0, 1], len(index)),
        stage=np.concatenate([chunk * p + rank, (virtual - 1 - chunk) * p + rank]),
        micro_batch=np.concatenate([micro_batch, micro_batch]),
        slot=np.concatenate(
            [np.where(index < warmup, rank + index, steady + 2 * (index - warmup)), steady + 2 * index + 1]
        ),
        num_ranks=p,
    )


def _turns_graph(num_ranks: int, num_microbatches: int, *, splits_backward: bool) -> _Graph:
    """Return 1F1B and zero bubble with one stage a rank: turns of forward, backward and weight passes.

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
    return _graph_of_slots(
        kind=np.repeat(np.arange(kinds), len(index)),
        stage=np.tile(rank, kinds),
        micro_batch=np.tile(index, kinds),
        slot=np.concatenate(slots),
        num_ranks=p,
    )


def _graph_of_slots(*, kind: Ints, stage: Ints, micro_batch: Ints, slot: Ints, num_ranks: int) -> _Graph:
    """Return operations by slot; `kind` is an index into the kinds. What an operation reads has an earlier slot."""
    last = int(stage.max())
    # Where each stage's pass of each micro-batch stands; the entry behind the last stage stands for no input.
    where = np.full((3, last + 2, int(micro_batch.max()) + 1), -1)
    where[kind, stage, micro_batch] = np.arange(len(kind))
    read_by_backward = np.where(
        stage == last, where[0, stage, micro_batch], where[1, np.minimum(stage + 1, last), micro_batch]
    )
    inputs = np.choose(kind, [where[0, stage - 1, micro_batch], read_by_backward, where[1, stage, micro_batch]])
    return _by_level(slot, stage % num_ranks, inputs, kind * (last + 1) + stage)
