"""The exact timeline of one step of a pipeline: every rank's operations with their start and end, by simulation.

`bubble.py` has the forms that a search uses; tests hold them against this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from paraplan.cost.plan_table import Floats, Ints, Mask
from paraplan.errors import PlanError
from paraplan.plan.parallel import ScheduleName

OperationKind = Literal["forward", "backward", "weight"]


class PipelineOperation(NamedTuple):
    """One operation of a rank: what it does for which micro-batch on which virtual stage, and when (seconds).

    `backward` is the whole backward pass with what it recomputes; under zero bubble it is the gradient of the stage's
    input alone, and `weight` that of its weights.
    """

    kind: OperationKind
    micro_batch: int
    virtual_stage: int
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class PassSeconds:
    """Seconds of one micro-batch, sends included, by stage, by pipeline or by both: arrays of one shape."""

    forward_s: Floats
    """The forward pass."""
    backward_s: Floats
    """The backward pass with recomputation and the gradients of the weights."""
    weight_s: Floats
    """The part of the backward pass that zero bubble may put off: the gradients of the weights."""

    @property
    def total_s(self) -> Floats:
        """Forward and backward."""
        return np.asarray(self.forward_s + self.backward_s)

    def columns(self, rows: Ints | slice) -> PassSeconds:
        """Return some of the columns: entries of the last axis."""
        return PassSeconds(self.forward_s[..., rows], self.backward_s[..., rows], self.weight_s[..., rows])


@dataclass(frozen=True, eq=False)
class RankSeconds(PassSeconds):
    """Seconds of one micro-batch on one pipeline rank, all of its chunks together."""

    end_s: Floats
    """The part of the embedding, or of the head and the loss, which belongs to one chunk: a third of it is forward, a
    third the gradient of its weights."""
    shares: Floats
    """`[V, N]`: each chunk's part of the rank's blocks, 0 beyond the chunks of a plan."""

    def chunk(self, share: Floats, *, has_end: Mask | bool) -> PassSeconds:
        """Return a chunk with a part of the blocks, with the embedding or the head, or without."""
        third = self.end_s / 3
        own = third * np.where(has_end, 1.0, 0.0)
        return PassSeconds(
            forward_s=(self.forward_s - third) * share + own,
            backward_s=(self.backward_s - 2 * third) * share + 2 * own,
            weight_s=(self.weight_s - third) * share + own,
        )


@dataclass(frozen=True)
class Timeline:
    """Each pipeline rank's operations in their order; `end_s` is when the last one ends, sends not counted."""

    ranks: tuple[tuple[PipelineOperation, ...], ...]

    @property
    def end_s(self) -> float:
        """Seconds from the first operation's start to the last one's end."""
        return max(operations[-1].end_s for operations in self.ranks)

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank computes."""
        return sum(operation.end_s - operation.start_s for operation in self.ranks[rank])


class PipelineTask(NamedTuple):
    """One operation of a rank."""

    kind: OperationKind
    micro_batch: int
    stage: int


def simulate_pipeline(
    schedule: ScheduleName,
    stages: PassSeconds,
    *,
    num_ranks: int,
    num_microbatches: int,
) -> Timeline:
    """Return the timeline of one step. `stages` has one entry a virtual stage in model order, stage i on rank i % p.

    A rank takes its operations in the order of the schedule and starts each as soon as its input is there; sends
    are part of the seconds of stages. Raises `PlanError` where the stages do not divide over the ranks, and for chunks
    with micro-batches that make no equal rounds.
    """
    virtual, rest = divmod(len(stages.forward_s), num_ranks)
    if rest or not virtual:
        raise PlanError(f"{len(stages.forward_s)} stages do not divide over {num_ranks} pipeline ranks")
    group = round_size(num_microbatches, num_ranks)
    if virtual > 1 and num_microbatches % group:
        raise PlanError(
            f"{num_microbatches} micro-batches do not make equal rounds over {num_ranks} pipeline ranks",
            hint=f"use {num_microbatches // num_ranks * num_ranks} or {-(-num_microbatches // num_ranks) * num_ranks}",
        )
    orders = [
        list(rank_order(schedule, rank=rank, num_ranks=num_ranks, virtual=virtual, num_microbatches=num_microbatches))
        for rank in range(num_ranks)
    ]
    return Timeline(_run(orders, stages, splits_backward=schedule == "zero_bubble"))


def _run(
    orders: list[list[PipelineTask]], stages: PassSeconds, *, splits_backward: bool
) -> tuple[tuple[PipelineOperation, ...], ...]:
    num_ranks, last = len(orders), len(stages.forward_s) - 1
    done: list[list[PipelineOperation]] = [[] for _ in orders]
    ends: dict[PipelineTask, float] = {}
    seconds = {
        "forward": stages.forward_s.tolist(),
        "backward": (stages.backward_s - stages.weight_s * splits_backward).tolist(),
        "weight": stages.weight_s.tolist(),
    }
    free = [0.0] * num_ranks
    waiting = list(range(num_ranks))
    while waiting:
        rank = waiting.pop()
        order, finished = orders[rank], done[rank]
        while len(finished) < len(order):
            task = order[len(finished)]
            before = input_of(task, last)
            ready = 0.0
            if before is not None:
                if before not in ends:
                    break
                ready = ends[before]
            start = max(free[rank], ready)
            free[rank] = ends[task] = start + seconds[task.kind][task.stage]
            finished.append(PipelineOperation(*task, start, free[rank]))
            reader = _reader_of(task, last)
            if reader is not None and reader % num_ranks != rank:
                waiting.append(reader % num_ranks)
    assert all(len(finished) == len(order) for finished, order in zip(done, orders, strict=True)), "deadlock"
    return tuple(tuple(finished) for finished in done)


def input_of(task: PipelineTask, last: int) -> PipelineTask | None:
    """Return the task whose output `task` reads, None for the first stage's forward pass; `last` is the last stage."""
    if task.kind == "weight":
        return PipelineTask("backward", task.micro_batch, task.stage)
    if task.kind == "forward":
        return PipelineTask("forward", task.micro_batch, task.stage - 1) if task.stage else None
    if task.stage == last:
        return PipelineTask("forward", task.micro_batch, last)
    return PipelineTask("backward", task.micro_batch, task.stage + 1)


def _reader_of(task: PipelineTask, last: int) -> int | None:
    """Return the stage that waits for the output of `task`."""
    if task.kind == "forward":
        return task.stage + 1 if task.stage < last else None
    return task.stage - 1 if task.kind == "backward" and task.stage else None


def round_size(num_microbatches: int, num_ranks: int) -> int:
    """Return how many micro-batches go through the chunks together under interleaving: about one for each rank.

    Rounds have to be equal (torch's and Megatron-LM's schedules need it): where they cannot be, the size is rounded up.
    """
    return -(-num_microbatches // max(1, num_microbatches // num_ranks))


def rank_order(
    schedule: ScheduleName,
    *,
    rank: int,
    num_ranks: int,
    virtual: int,
    num_microbatches: int,
    group: int | None = None,
) -> Iterator[PipelineTask]:
    """Yield the operations of one rank in the order in which it takes them; `group` replaces the size of a round.

    GPipe: all forward passes, then all backward passes (Huang et al. 2019, section 2.3). 1F1B: `p - i - 1` forward
    passes, then one forward and one backward in turn (Narayanan et al. 2021, section 2.2.1). Interleaved: micro-batches
    go through the chunks in rounds of about p, with `2 (p - i - 1) + (v - 1) q` forward passes first for rounds of q
    (section 2.2.2). Zero bubble (Qi et al. 2024, ZB-H1, section 2.2): 1F1B, where rank i leaves the weights' gradients
    of i micro-batches for later, so that the last ones fill the bubble at the end.
    """
    group = group or round_size(num_microbatches, num_ranks)
    forwards = list(_passes(rank, num_ranks, range(virtual), num_microbatches, group))
    backwards = list(_passes(rank, num_ranks, range(virtual - 1, -1, -1), num_microbatches, group))
    each_hop = 2 if virtual > 1 and schedule != "zero_bubble" else 1
    warmup = min(len(forwards), (virtual - 1) * group + each_hop * (num_ranks - 1 - rank))
    if schedule == "gpipe":
        warmup = len(forwards)
    for stage, micro_batch in forwards[:warmup]:
        yield PipelineTask("forward", micro_batch, stage)
    late = 0
    for number, (stage, micro_batch) in enumerate(backwards):
        if warmup + number < len(forwards):
            ahead_stage, ahead = forwards[warmup + number]
            yield PipelineTask("forward", ahead, ahead_stage)
        yield PipelineTask("backward", micro_batch, stage)
        if schedule == "zero_bubble" and number >= rank:
            yield PipelineTask("weight", backwards[late][1], backwards[late][0])
            late += 1
    if schedule == "zero_bubble":
        for stage, micro_batch in backwards[late:]:
            yield PipelineTask("weight", micro_batch, stage)


def _passes(
    rank: int, num_ranks: int, chunks: Sequence[int], num_microbatches: int, group: int
) -> Iterator[tuple[int, int]]:
    """Yield the stage and micro-batch of each pass of a rank in one direction, round by round."""
    for first in range(0, num_microbatches, group):
        for chunk in chunks:
            for micro_batch in range(first, min(first + group, num_microbatches)):
                yield chunk * num_ranks + rank, micro_batch
