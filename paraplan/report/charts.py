"""The charts of a report as Vega-Lite specifications: memory of stages, plans by time and memory, other sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paraplan.cost.estimate import MemoryEstimate, PlanEstimate
from paraplan.report.chart_svg import Spec
from paraplan.search.results import Candidate
from paraplan.search.sizes import SizeOffer
from paraplan.units import GIB, format_bytes, format_count, format_seconds

MEMORY_PARTS = (
    ("parameter_bytes", "parameters", "var(--c1)"),
    ("gradient_bytes", "gradients", "var(--c2)"),
    ("optimizer_state_bytes", "optimizer", "var(--c3)"),
    ("activation_bytes", "activations", "var(--c4)"),
    ("workspace_bytes", "workspace", "var(--c5)"),
)
"""Parts of a memory estimate: field, name, color."""

_PLAN_KINDS = (
    ("", "recommended", "var(--best)"),
    ("", "Pareto-optimal", "var(--c1)"),
    ("", "other plans", "var(--dim)"),
)
_MOST_STAGES = 16


def shown_stages(memory: Sequence[MemoryEstimate]) -> list[MemoryEstimate]:
    """Return the stages that are drawn: of a long pipeline its first eight, its last ones and the fullest."""
    if len(memory) <= _MOST_STAGES:
        return list(memory)
    half, stages = _MOST_STAGES // 2, range(len(memory))
    fullest = max(stages, key=lambda stage: memory[stage].total_bytes)
    drawn = {*stages[:half], *stages[-half:]}
    if fullest not in drawn:
        drawn = drawn - {len(memory) - half} | {fullest}
    return [memory[stage] for stage in sorted(drawn)]


def memory_chart(estimate: PlanEstimate, *, capacity_bytes: int) -> Spec:
    """Return stacked bars of each stage's memory in GiB, with lines where usable memory and the GPU's end."""
    rows: list[dict[str, Any]] = []
    names = []
    for stage in shown_stages(estimate.memory):
        name = f"stage {stage.pipeline_stage}: {format_bytes(stage.total_bytes)}"
        if len(estimate.memory) == 1:
            name = f"every rank: {format_bytes(stage.total_bytes)}"
        names.append(name)
        for order, (field, part, _) in enumerate(MEMORY_PARTS):
            size = getattr(stage, field)
            words = f"{name.split(':')[0]}, {part}: {format_bytes(size)}"
            rows.append({"stage": name, "part": part, "order": order, "gib": size / GIB, "words": words})
    limits = [
        {"gib": estimate.usable_memory_bytes / GIB, "name": f"{format_bytes(estimate.usable_memory_bytes)} usable"},
        {"gib": capacity_bytes / GIB, "name": f"{format_bytes(capacity_bytes)} on the GPU"},
    ]
    bars = {
        "data": {"values": rows},
        "mark": {"type": "bar", "height": {"band": 0.8}},
        "encoding": {
            "y": {"field": "stage", "type": "ordinal", "title": None, "sort": names, "axis": {"ticks": False}},
            "x": {"field": "gib", "type": "quantitative", "title": "GiB", "stack": "zero", "axis": {"tickCount": 10}},
            "order": {"field": "order"},
            "color": {"field": "part", "type": "nominal", "sort": None, "scale": _scale(MEMORY_PARTS)},
            "description": {"field": "words"},
        },
    }
    return {"height": {"step": 30}, "layer": [bars, *_limit_lines(limits, "x")]}


def plans_chart(
    best: PlanEstimate,
    *,
    cloud: Sequence[Candidate],
    front: Sequence[Candidate],
    linked: dict[str, str],
) -> Spec:
    """Return the plans by step time and memory; those in `linked`, by their words, lead to a row of a table."""
    front_rows = [_plan_row(plan, "Pareto-optimal", linked) for plan in front]
    cloud_rows = [_plan_row(plan, "other plans", linked) for plan in cloud]
    chosen = _point(best.plan.describe(), best.step.step_time_s, best.peak_memory_bytes, "recommended", linked)
    place = {
        "x": {
            "field": "step",
            "type": "quantitative",
            "title": "step time, seconds (logarithmic)",
            "scale": {"type": "log", "nice": False},
            "axis": {"tickCount": 6, "format": "~g", "labelOverlap": True},
        },
        "y": {"field": "gib", "type": "quantitative", "title": "peak memory, GiB"},
    }
    named = {
        "color": {"field": "kind", "type": "nominal", "sort": None, "scale": _scale(_PLAN_KINDS)},
        "description": {"field": "words"},
    }
    linking = named | {"href": {"field": "link"}}
    usable = {"gib": best.usable_memory_bytes / GIB, "name": f"{format_bytes(best.usable_memory_bytes)} usable"}
    return {
        "height": 360,
        "layer": [
            {
                "data": {"values": cloud_rows},
                "mark": {"type": "circle", "size": 34, "opacity": 0.75},
                "encoding": place | named,
            },
            {
                "data": {"values": front_rows},
                "mark": {"type": "line", "interpolate": "step-after", "aria": False, "strokeWidth": 1.5},
                "encoding": place | {"color": {"value": "var(--c1)"}},
            },
            {
                "data": {"values": front_rows},
                "mark": {"type": "circle", "size": 90, "opacity": 1},
                "encoding": place | linking,
            },
            {
                "data": {"values": [chosen]},
                "mark": {"type": "point", "filled": True, "shape": "diamond", "size": 220, "opacity": 1},
                "encoding": place | linking,
            },
            *_limit_lines([usable], "y"),
        ],
    }


def throughput_chart(offers: Sequence[SizeOffer], *, tokens_per_step: int, now: int) -> Spec:
    """Return tokens per second by number of GPUs, beside what proportion to the present number `now` would give."""
    rates: dict[int, float] = {offer.num_gpus: tokens_per_step / offer.step_time_s for offer in offers}
    each = rates[now] / now if now in rates else max(rates.values()) / max(rates)
    rows: list[dict[str, Any]] = [
        {
            "gpus": offer.num_gpus,
            "rate": rates[offer.num_gpus],
            "kind": "predicted",
            "words": f"{offer.num_gpus} GPUs: {format_count(rates[offer.num_gpus])} tokens/s, {offer.plan}",
        }
        for offer in offers
    ]
    ideal: list[dict[str, Any]] = [
        {"gpus": num, "rate": each * num, "kind": "linear scaling", "words": "linear scaling"} for num in rates
    ]
    return _size_chart(
        [*ideal, *rows], "tokens/s (logarithmic)", ticks=_log_ticks([row["rate"] for row in [*ideal, *rows]])
    )


def cost_chart(offers: Sequence[SizeOffer], *, has_price: bool) -> Spec:
    """Return what a billion tokens cost by number of GPUs: GPU-hours, or money where there is a price."""
    what = "cost of a billion tokens" if has_price else "GPU-hours for a billion tokens"
    rows = []
    for offer in offers:
        value = offer.cost_per_billion_tokens if has_price else offer.gpu_hours_per_billion_tokens
        words = f"{offer.num_gpus} GPUs: {what} {value:,.1f}, {offer.plan}"
        rows.append({"gpus": offer.num_gpus, "rate": value, "kind": "predicted", "words": words})
    return _size_chart(rows, what)


def _size_chart(rows: list[dict[str, Any]], title: str, *, ticks: list[float] | None = None) -> Spec:
    axis: Spec = {"format": "~s", "tickCount": 6} if ticks is None else {"format": "~s", "values": ticks}
    scale: Spec = {} if ticks is None else {"scale": {"type": "log", "nice": False, "padding": 12}}
    place = {
        "x": {"field": "gpus", "type": "ordinal", "title": "GPUs", "axis": {"labelAngle": 0}},
        "y": {"field": "rate", "type": "quantitative", "title": title, "axis": axis} | scale,
    }
    kinds = [kind for kind in ("predicted", "linear scaling") if any(row["kind"] == kind for row in rows)]
    color = {
        "field": "kind",
        "type": "nominal",
        "sort": None,
        "scale": {"domain": kinds, "range": ["var(--c1)", "var(--dim)"][: len(kinds)]},
        **({"legend": None} if len(kinds) == 1 else {}),
    }
    line = {
        "data": {"values": rows},
        "mark": {"type": "line", "aria": False, "strokeWidth": 2},
        "encoding": place | {"color": color},
    }
    points = {
        "data": {"values": [row for row in rows if row["kind"] == "predicted"]},
        "mark": {"type": "circle", "size": 90, "opacity": 1},
        "encoding": place | {"color": color, "description": {"field": "words"}},
    }
    return {"height": 240, "layer": [line, points]}


def _log_ticks(values: list[float]) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten around the values."""
    low, high = math.log10(min(values)), math.log10(max(values))
    found = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in (1, 2, 5)]
    return [tick for tick in found if 10 ** (low - 0.15) <= tick <= 10 ** (high + 0.15)]


def _plan_row(plan: Candidate, kind: str, linked: dict[str, str]) -> dict[str, Any]:
    return _point(plan.plan.describe(), plan.step_time_s, plan.peak_memory_bytes, kind, linked)


def _point(words: str, step_s: float, size_bytes: int, kind: str, linked: dict[str, str]) -> dict[str, Any]:
    shown = f"{words}: {format_seconds(step_s)}, {format_bytes(size_bytes)}"
    shown = f"Recommended: {shown}" if kind == "recommended" else shown
    return {"step": step_s, "gib": size_bytes / GIB, "kind": kind, "words": shown, "link": linked.get(words)}


def _scale(parts: Sequence[tuple[str, str, str]]) -> Spec:
    return {"domain": [part[1] for part in parts], "range": [part[2] for part in parts]}


def _limit_lines(limits: list[dict[str, Any]], axis: str) -> list[Spec]:
    """Return dashed lines where memory ends, each with its name."""
    place = {axis: {"field": "gib", "type": "quantitative"}}
    line = {
        "data": {"values": limits},
        "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5, "color": "var(--limit)"},
        "encoding": place | {"description": {"field": "name"}},
    }
    mark = {"type": "text", "align": "right", "fontSize": 12, "color": "var(--limit)", "aria": False}
    # Beside a line that stands; several do not stand on each other's names.
    names = [
        {
            "data": {"values": [limit]},
            "mark": mark | ({"dx": -5, "dy": -6 - 14 * number} if axis == "x" else {"dy": -7}),
            "encoding": place
            | {"y" if axis == "x" else "x": {"value": 0 if axis == "x" else "width"}, "text": {"field": "name"}},
        }
        for number, limit in enumerate(limits)
    ]
    return [line, *names]
