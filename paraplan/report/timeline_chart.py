"""The timeline of a step as a chart: a row for each pipeline rank, as the papers of GPipe and Megatron-LM draw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paraplan.cost.timeline import Slice, StepTimeline, Transfer
from paraplan.report.chart_svg import Spec
from paraplan.units import format_seconds

KINDS = (
    ("forward", "var(--c1)"),
    ("backward", "var(--c2)"),
    ("gradients of weights", "var(--c4)"),
    ("communication", "var(--c3)"),
    ("optimizer", "var(--c5)"),
    ("idle", "var(--idle)"),
)
"""Kinds of operation, each with its color."""

COLLECTIVE_WORDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "send_recv": "send and receive",
}
AXIS_WORDS = {"tp": "tensor-parallel", "cp": "context-parallel", "pp": "pipeline", "dp": "data-parallel"}
_NAMES = {"forward": "forward", "backward": "backward", "weight": "gradients of weights"}

_LEAST_WIDTH, _WINDOW_WIDTH = 9, 17
"""Pixels of the shortest operation: as long as it has the least, the whole step is drawn; else windows of it."""

_MOST_TAIL = 0.3
"""Share of the last window for what follows the passes."""

_AXIS_WIDTH = 64
_MOST_ROWS = 16


@dataclass(frozen=True)
class _Window:
    start_s: float
    end_s: float
    title: str


def transfer_words(transfer: Transfer) -> str:
    """Return what an axis sends in words: `tensor-parallel all-reduce`."""
    return f"{AXIS_WORDS[transfer.axis]} {COLLECTIVE_WORDS[transfer.collective]}"


def timeline_chart(timeline: StepTimeline, *, width: int) -> Spec:
    """Return the timeline: all of it, or its beginning and its end where single operations would be too narrow."""
    windows = _windows(timeline, width - _AXIS_WIDTH)
    rows = shown_rows(len(timeline.ranks))
    panels = [_panel(timeline, rows, window, width - _AXIS_WIDTH) for window in windows]
    if len(panels) == 1:
        return panels[0]
    return {"vconcat": panels, "spacing": 18}


def shown_rows(num_ranks: int) -> list[int]:
    """Return the pipeline ranks that are drawn: of many the first and the last."""
    half = _MOST_ROWS // 2
    ranks = list(range(num_ranks))
    return ranks if num_ranks <= _MOST_ROWS else ranks[:half] + ranks[-half:]


def _windows(timeline: StepTimeline, width: float) -> list[_Window]:
    lengths = [each.end_s - each.start_s for rank in timeline.ranks for each in rank]
    shortest = min((length for length in lengths if length > 0), default=timeline.step_time_s)
    if shortest / timeline.step_time_s * width >= _LEAST_WIDTH:
        return [_Window(0.0, timeline.step_time_s, "")]
    seconds = shortest * width / _WINDOW_WIDTH
    whole = timeline.step_time_s
    first = _Window(0.0, seconds, f"the first {format_seconds(seconds)} of {format_seconds(whole)}")
    # What follows the last passes may be long: it is not to push them out of the window.
    end = min(whole, timeline.operations_end_s + _MOST_TAIL * seconds)
    words = f"the last {format_seconds(seconds)}"
    if end < whole:
        words = f"{format_seconds(seconds)} around the end of the passes; {format_seconds(whole - end)} more follow"
    return [first, _Window(end - seconds, end, words)]


def _panel(timeline: StepTimeline, rows: list[int], window: _Window, width: float) -> Spec:
    """Return a part of the timeline as a chart of its own."""
    scale = 1.0 if timeline.step_time_s >= 1 else 1e3
    bars = [bar for rank in rows for bar in _bars(timeline, rank)]
    domain = [window.start_s * scale, window.end_s * scale]
    place: Spec = {
        "y": {
            "field": "row",
            "type": "ordinal",
            "title": None,
            "sort": [_row_name(timeline, rank) for rank in rows],
            "scale": {"paddingInner": 0.12, "paddingOuter": 0.05},
            "axis": {"ticks": False, "domain": False},
        },
        "x": {
            "field": "start",
            "type": "quantitative",
            "title": "seconds" if scale == 1 else "milliseconds",
            "scale": {"domain": domain, "nice": False, "zero": False},
            "axis": {"grid": False, "tickCount": 8 if width > 500 else 4},
        },
        "x2": {"field": "end"},
    }
    kinds = [kind for kind in KINDS if any(bar["kind"] == kind[0] for bar in bars)]
    color = {"domain": [kind[0] for kind in kinds], "range": [kind[1] for kind in kinds]}
    middle = {"x": {**place["x"], "field": "middle"}, "y": place["y"]}
    layers = [
        {
            "mark": {"type": "bar", "height": {"band": 1}, "stroke": "var(--paper)"},
            "encoding": place
            | {
                "color": {"field": "kind", "type": "nominal", "sort": None, "scale": color},
                "description": {"field": "words"},
                "opacity": {"condition": {"test": "datum.chunk % 2", "value": 0.62}, "value": 1},
                # Communication is often narrower than a gap would be.
                "strokeWidth": {"condition": {"test": "datum.kind === 'communication'", "value": 0}, "value": 0.7},
            },
        },
        {
            "transform": [{"filter": "datum.label !== ''"}],
            "mark": {"type": "text", "fontSize": 11, "color": "var(--on-bar)", "aria": False},
            "encoding": middle | {"text": {"field": "label"}},
        },
    ]
    sized = {"width": width} if window.title else {}
    return {
        **sized,
        "height": {"step": 26},
        "data": {"values": _inside(bars, window, width=width, scale=scale)},
        "layer": layers,
        **({"title": window.title} if window.title else {}),
    }


def _inside(bars: list[dict[str, Any]], window: _Window, *, width: float, scale: float) -> list[dict[str, Any]]:
    """Return what a window shows of the bars, with labels where they fit; times are multiplied by `scale`."""
    per_pixel = (window.end_s - window.start_s) / width
    shown = []
    for bar in bars:
        start, end = max(bar["start"], window.start_s), min(bar["end"], window.end_s)
        if end - start <= per_pixel / 20:
            continue
        is_wide = (end - start) / per_pixel >= 7.5 * len(bar["label"]) + 3
        times = {"start": start * scale, "end": end * scale, "middle": (start + end) / 2 * scale}
        shown.append(bar | times | {"label": bar["label"] if is_wide else ""})
    return shown


def _bars(timeline: StepTimeline, rank: int) -> list[dict[str, Any]]:
    """Return what fills one row, in order, what is idle included."""
    name, end_s = _row_name(timeline, rank), 0.0
    bars: list[dict[str, Any]] = []

    def add(kind: str, start: float, end: float, words: str, label: str = "", chunk: int = 0) -> None:
        if end > start:
            shown = f"{name}: {words}, {format_seconds(end - start)} from {format_seconds(start)} on"
            bars.append(
                {"row": name, "kind": kind, "start": start, "end": end, "words": shown, "label": label, "chunk": chunk}
            )

    for each in timeline.ranks[rank]:
        add("idle", end_s, each.start_s, "idle (bubble)")
        words, chunk = slice_words(each, timeline), each.virtual_stage // len(timeline.ranks)
        add(_NAMES[each.kind], each.start_s, _computed_until(each), words, str(each.micro_batch), chunk)
        for transfer in each.transfers:
            add("communication", transfer.start_s, transfer.end_s, transfer_words(transfer))
        end_s = each.end_s
    add("idle", end_s, timeline.operations_end_s, "idle (bubble)")
    end_s = timeline.operations_end_s
    for transfer in timeline.reduction:
        add("communication", transfer.start_s, transfer.end_s, transfer_words(transfer))
        end_s = transfer.end_s
    add("optimizer", end_s, end_s + timeline.optimizer_s, "optimizer step")
    return bars


def slice_words(operation: Slice, timeline: StepTimeline) -> str:
    """Return an operation in words: `forward of micro-batch 3 on stage 5`."""
    stage = f" on stage {operation.virtual_stage}" if len(timeline.ranks) > 1 else ""
    return f"{_NAMES[operation.kind]} of micro-batch {operation.micro_batch}{stage}"


def _computed_until(operation: Slice) -> float:
    return operation.transfers[0].start_s if operation.transfers else operation.end_s


def _row_name(timeline: StepTimeline, rank: int) -> str:
    return f"rank {rank}" if len(timeline.ranks) > 1 else "all ranks"
