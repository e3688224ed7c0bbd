"""Streams of one GPU, run one event after the other: what the closed forms of `communication` take a shortcut to.

A stream runs its tasks in the order in which they were queued, each after those that it waits for. Tasks of different
resources run at the same time and slow each other, as in the closed form (Galvatron, Miao et al. 2022, section 3.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """Work of a stream: `seconds` alone on the GPU, and the numbers of the tasks that have to end before."""

    stream: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass
class _Running:
    number: int
    left_s: float


@dataclass(frozen=True)
class StreamTimes:
    """When all tasks have ended, and how long each stream had something to do."""

    total_s: float
    busy_s: dict[str, float]
    ends_s: tuple[float, ...] = field(repr=False)


def run_streams(tasks: Sequence[Task], *, slowdown: float) -> StreamTimes:
    """Return the times of tasks that start as early as they can.

    While more than one stream works, all are `slowdown` times as slow. Raises `ValueError` for tasks that wait for
    each other.
    """
    queues: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, []).append(number)
    now, ended, ends = 0.0, set[int](), [0.0] * len(tasks)
    running: dict[str, _Running] = {}
    busy = dict.fromkeys(queues, 0.0)
    while len(ended) < len(tasks):
        for stream, queue in queues.items():
            if stream not in running and queue and ended.issuperset(tasks[queue[0]].after):
                number = queue.pop(0)
                running[stream] = _Running(number, tasks[number].seconds)
        if not running:
            raise ValueError(f"tasks {sorted(set(range(len(tasks))) - ended)[:4]} wait for each other")
        pace = slowdown if len(running) > 1 else 1.0
        step = min(one.left_s for one in running.values()) * pace
        now += step
        for stream, one in list(running.items()):
            busy[stream] += step
            one.left_s -= step / pace
            if one.left_s <= 1e-15:
                ended.add(one.number)
                ends[one.number] = now
                del running[stream]
    return StreamTimes(total_s=now, busy_s=busy, ends_s=tuple(ends))


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of one block: its passes, the gather of its parameters and the reduction of its gradients."""

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float


def sharded_tasks(blocks: Iterable[BlockSeconds], *, num_microbatches: int) -> list[Task]:
    """Return the tasks of ZeRO-3 as FSDP2 queues them.

    A block's parameters are gathered while its neighbour computes, no more than one block ahead, in either pass; its
    gradients are reduced behind the next block's backward pass, and the last micro-batch's end the step
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py). Both kinds share the links: one stream.
    """
    rows, tasks = list(blocks), list[Task]()

    def add(stream: str, seconds: float, *after: int | None) -> int:
        tasks.append(Task(stream, seconds, tuple(number for number in after if number is not None)))
        return len(tasks) - 1

    before: int | None = None
    for _ in range(num_microbatches):
        passes = [(row, False) for row in rows] + [(row, True) for row in reversed(rows)]
        gathered = add("communication", passes[0][0].gather_s, before)
        reduced: tuple[BlockSeconds, int] | None = None
        for place, (row, is_backward) in enumerate(passes):
            ahead = None
            if place + 1 < len(passes):
                # The last block of a forward pass stays gathered for the backward pass that begins with it.
                following = 0.0 if place + 1 == len(rows) else passes[place + 1][0].gather_s
                ahead = add("communication", following, before)
            if reduced is not None:
                add("communication", reduced[0].reduce_s, reduced[1])
            before = add("compute", row.backward_s if is_backward else row.forward_s, gathered, before)
            reduced, gathered = (row, before) if is_backward else None, ahead if ahead is not None else gathered
        if reduced is not None:
            add("communication", reduced[0].reduce_s, reduced[1])
    return tasks
