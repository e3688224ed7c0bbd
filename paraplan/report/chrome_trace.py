"""A predicted step in Chrome's trace format, which Perfetto and chrome://tracing show.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the format)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.timeline import Slice, StepTimeline, Transfer, step_timeline
from paraplan.cost.workload import Workload
from paraplan.plan.ranks import RankGrid
from paraplan.report.timeline_chart import slice_words, transfer_words

COMPUTE, COMMUNICATION, HIDDEN = 0, 1, 2
"""Tracks of a rank: operations, what is waited for, and what runs beside operations."""

_TRACKS = {
    COMPUTE: "compute",
    COMMUNICATION: "communication that is waited for",
    HIDDEN: "communication beside compute",
}
_PER_S = 1e6  # the format counts microseconds


def chrome_trace(workload: Workload, estimate: PlanEstimate) -> dict[str, Any]:
    """Return the JSON object of a trace: a process for each pipeline rank, with a track for each kind of work.

    `paraplan` beside the events says what was predicted, in seconds.
    """
    timeline, plan = step_timeline(workload, estimate), estimate.plan
    grid = RankGrid.of_plan(plan)
    events: list[dict[str, Any]] = []
    for rank in range(plan.pp):
        stages = ", ".join(str(stage) for stage in range(rank, plan.num_stages, plan.pp))
        first = grid.rank(pp=rank)
        where = f"stage {stages}" if plan.num_stages > 1 else "the whole model"
        events += _names(rank, f"rank {first}: {where}", sort_index=rank)
        events += _events(timeline, rank)
    cluster, training = workload.cluster, workload.training
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "paraplan": {
            "schema_version": 1,
            "model": workload.model.name,
            "cluster": {"name": cluster.name, "num_nodes": cluster.num_nodes, "gpus_per_node": cluster.gpus_per_node},
            "training": training.model_dump(mode="json"),
            "plan": plan.model_dump(mode="json"),
            "step_time_s": estimate.step.step_time_s,
        },
    }


def _names(process: int, name: str, *, sort_index: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": sort_index}}
    for track, title in _TRACKS.items():
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": title}}
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _events(timeline: StepTimeline, rank: int) -> Iterator[dict[str, Any]]:
    for operation in timeline.ranks[rank]:
        yield _operation(timeline, rank, operation)
        for transfer in operation.transfers:
            yield _transfer(rank, COMMUNICATION, transfer)
    for track, transfers in ((COMMUNICATION, timeline.reduction), (HIDDEN, timeline.hidden)):
        for transfer in transfers:
            yield _transfer(rank, track, transfer)
    start = timeline.step_time_s - timeline.optimizer_s
    yield _event(rank, COMPUTE, "optimizer step", "optimizer", start, timeline.step_time_s, {})


def _operation(timeline: StepTimeline, rank: int, operation: Slice) -> dict[str, Any]:
    end = operation.transfers[0].start_s if operation.transfers else operation.end_s
    arguments = {
        "micro_batch": operation.micro_batch,
        "stage": operation.virtual_stage,
        "with_communication_ms": round((operation.end_s - operation.start_s) * 1e3, 6),
    }
    name = slice_words(operation, timeline)
    return _event(rank, COMPUTE, name, operation.kind, operation.start_s, end, arguments)


def _transfer(rank: int, track: int, transfer: Transfer) -> dict[str, Any]:
    arguments = {"axis": transfer.axis, "collective": transfer.collective}
    return _event(rank, track, transfer_words(transfer), "communication", transfer.start_s, transfer.end_s, arguments)


def _event(
    process: int, track: int, name: str, category: str, start_s: float, end_s: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "cat": category,
        "ts": round(start_s * _PER_S, 3),
        "dur": round((end_s - start_s) * _PER_S, 3),
        "args": arguments,
    }
