"""Time of a rank in one step, summed from a trace: compute, communication by collective, and waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from paraplan.errors import PlanError
from paraplan.plan.ranks import RankGrid
from paraplan.records import Record
from paraplan.report.trace_reading import Trace, TraceEvent

Spans = list[tuple[float, float]]

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "send": "send_recv",
    "recv": "send_recv",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
"""Collectives by what is left of their names without underscores and capitals; the first that fits is meant."""

_DISPATCH = ("c10d::", "_c10d_functional::", "c10d_functional::", "record_param_comms")
"""CPU operations that only hand a collective over, or wait for one."""

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = "ProfilerStep#"
_OPTIMIZER = "Optimizer.step#"


class StepProfile(Record):
    """Seconds of one step of one rank: `compute_s`, `exposed_s` and `idle_s` sum to `step_s`.

    `exposed_s` is communication with no compute beside it; `communication_s` counts each collective whole, also what
    compute hides. `optimizer_s` is the part of compute that the optimizer's step takes, None where the trace does not
    name it. `steps` is how many steps of the trace were averaged.
    """

    source: str
    rank: int | None
    world_size: int | None
    steps: int
    on_gpu: bool
    step_s: float
    compute_s: float
    optimizer_s: float | None
    exposed_s: float
    idle_s: float
    communication_s: dict[str, float]


def predicted_profile(trace: Trace, *, rank: int) -> StepProfile:
    """Return a rank's share of a predicted step. Raises `PlanError` for a trace that paraplan did not write."""
    prediction = trace.prediction
    if prediction is None:
        raise PlanError(
            f"{trace.source} is no prediction of paraplan",
            hint="write one with paraplan estimate --trace FILE, and give it before the measured trace",
        )
    grid = RankGrid.of_plan(prediction.plan)
    process = str(grid.coordinates(rank)["pp"])
    events = [event for event in trace.events if event.process == process]
    window = [(0.0, prediction.step_time_s)]
    compute = [event for event in events if event.category != "communication"]
    sent = [(event, str(event.arguments.get("collective"))) for event in events if event.category == "communication"]
    optimizer = union(_spans(event for event in compute if event.category == "optimizer"))
    return _profile(
        trace.source,
        (rank, prediction.plan.world_size),
        window,
        compute=_spans(compute),
        optimizer=optimizer,
        sent=sent,
        on_gpu=True,
    )


def measured_profile(trace: Trace, *, steps: int | None = None) -> StepProfile:
    """Return the mean step of a trace of torch.profiler: of its ProfilerStep marks, else of the whole in `steps` parts.

    On a GPU, kernels are compute and NCCL's are communication; without one, operators of the CPU are compute and the
    backend's own marks (`gloo:all_reduce`) are communication.
    """
    if trace.prediction is not None:
        raise PlanError(f"{trace.source} is a prediction too", hint="give a trace that torch.profiler exported")
    on_gpu = any(event.category in _ON_GPU for event in trace.events)
    marks = _marks(trace.events, _STEP, on_gpu=on_gpu)
    if marks and steps is None:
        windows = [(mark.start_s, mark.end_s) for mark in marks]
    else:
        busy = [event for event in trace.events if event.category in (*_ON_GPU, "cpu_op", "user_annotation")]
        if not busy:
            raise PlanError(
                f"{trace.source} has neither kernels nor operators", hint="profile with ProfilerActivity.CPU or CUDA"
            )
        windows = [(min(event.start_s for event in busy), max(event.end_s for event in busy))]
    compute: list[TraceEvent] = []
    sent: list[tuple[TraceEvent, str]] = []
    for event in trace.events:
        kind = _collective(event, on_gpu=on_gpu)
        if kind is not None:
            sent.append((event, kind))
        elif _is_compute(event, on_gpu=on_gpu):
            compute.append(event)
    marked = _marks(trace.events, _OPTIMIZER, on_gpu=on_gpu)
    spans = _spans(compute)
    return _profile(
        trace.source,
        (trace.rank, trace.world_size),
        windows,
        compute=spans,
        optimizer=overlap(union(spans), union(_spans(marked))) if marked else None,
        sent=sent,
        on_gpu=on_gpu,
        steps=len(windows) if steps is None else steps,
    )


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return spans that do not overlap and cover the same."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def overlap(left: Spans, right: Spans) -> Spans:
    """Return what two lists of spans, each in order and without overlaps, both cover."""
    found: Spans = []
    first = second = 0
    while first < len(left) and second < len(right):
        start, end = max(left[first][0], right[second][0]), min(left[first][1], right[second][1])
        if start < end:
            found.append((start, end))
        if left[first][1] < right[second][1]:
            first += 1
        else:
            second += 1
    return found


def length(spans: Spans) -> float:
    """Return the seconds that spans without overlaps cover."""
    return sum(end - start for start, end in spans)


def _profile(
    source: str,
    place: tuple[int | None, int | None],
    windows: Spans,
    *,
    compute: Spans,
    optimizer: Spans | None,
    sent: Sequence[tuple[TraceEvent, str]],
    on_gpu: bool,
    steps: int = 1,
) -> StepProfile:
    inside = union(windows)
    computing = overlap(union(compute), inside)
    sending = overlap(union(_spans(event for event, _ in sent)), inside)
    busy = length(union([*computing, *sending]))
    total = length(inside)
    kinds = sorted({kind for _, kind in sent})
    return StepProfile(
        source=source,
        rank=place[0],
        world_size=place[1],
        steps=steps,
        on_gpu=on_gpu,
        step_s=total / steps,
        compute_s=length(computing) / steps,
        optimizer_s=None if optimizer is None else length(overlap(optimizer, inside)) / steps,
        exposed_s=(busy - length(computing)) / steps,
        # Traces count microseconds with three decimals: a rest of a few of them is no idle time.
        idle_s=(total - busy if total - busy > 1e-6 * total else 0.0) / steps,
        communication_s={
            kind: length(overlap(union(_spans(event for event, name in sent if name == kind)), inside)) / steps
            for kind in kinds
        },
    )


def _spans(events: Iterable[TraceEvent]) -> Spans:
    return [(event.start_s, event.end_s) for event in events]


def _marks(events: Sequence[TraceEvent], name: str, *, on_gpu: bool) -> list[TraceEvent]:
    """Return the marks of a name, those on the GPU's clock where there are any; steps meet without a gap.

    On a GPU a step has a mark on each stream, over its own kernels there (Kineto's GpuUserEventMap goes by device and
    stream): it lasts from the first of them to the last.
    """
    categories = ("gpu_user_annotation", "user_annotation") if on_gpu else ("user_annotation",)
    for category in categories:
        found = [event for event in events if event.category == category and event.name.startswith(name)]
        if found:
            break
    if name != _STEP:
        return found
    steps: dict[str, TraceEvent] = {}
    for event in found:
        other = steps.get(event.name, event)
        steps[event.name] = event._replace(
            start_s=min(event.start_s, other.start_s), end_s=max(event.end_s, other.end_s)
        )
    ordered = sorted(steps.values(), key=lambda event: event.start_s)
    met = [event._replace(end_s=max(event.end_s, after.start_s)) for event, after in pairwise(ordered)]
    return [*met, *ordered[-1:]]


def _collective(event: TraceEvent, *, on_gpu: bool) -> str | None:
    """Return which collective an event is on the device that does it, None for none."""
    if on_gpu:
        if event.category != "kernel" or "nccl" not in event.name.lower():
            return None
        name = f"{event.arguments.get('Collective name', '')} {event.name}"
    elif event.category == "user_annotation" and event.name.startswith(("gloo:", "mpi:", "nccl:", "ucc:")):
        name = event.name.split(":", 1)[1]
    else:
        return None
    plain = name.lower().replace("_", "")
    return next((kind for word, kind in COLLECTIVES.items() if word in plain), "other")


def _is_compute(event: TraceEvent, *, on_gpu: bool) -> bool:
    if on_gpu:
        return event.category in _ON_GPU
    return event.category == "cpu_op" and not event.name.startswith(_DISPATCH)
