"""`paraplan estimate --html`: what one plan costs, on one page."""

from __future__ import annotations

from html import escape

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.workload import Workload
from paraplan.plan.placement.place import place
from paraplan.plan.placement.traffic import axis_traffic
from paraplan.report.chart_svg import ChartRenderer
from paraplan.report.page import page, paragraph
from paraplan.report.plan_sections import (
    memory_section,
    plan_facts,
    plan_remarks,
    ranks_section,
    step_section,
    timeline_section,
    workload_lines,
)
from paraplan.report.plan_words import plan_in_words
from paraplan.units import format_bytes, gpus


def estimate_page(workload: Workload, estimate: PlanEstimate) -> str:
    """Return the page of one plan. Raises `UsageError` where the charting library is not installed."""
    renderer = ChartRenderer()
    plan = estimate.plan
    placement = place(plan, workload.cluster, traffic=axis_traffic(plan, workload.training, workload.model))
    over = estimate.peak_memory_bytes - estimate.usable_memory_bytes
    if estimate.fits:
        verdict = '<span class="good">fits</span>'
    elif over > 0:
        verdict = f'<span class="bad">does not fit, {format_bytes(over)} too much on a GPU</span>'
    else:
        verdict = '<span class="bad">does not fit in the host\'s memory</span>'
    head = [
        f"<h1>{escape(workload.model.name)} on {gpus(plan.world_size * plan.devices_per_process)}</h1>",
        *(paragraph(line, style="soft") for line in workload_lines(workload)),
        f'<p class="plan">{escape(plan.describe())}: {verdict}</p>',
        paragraph(f"{plan_in_words(workload, plan)}."),
        plan_facts(workload, estimate),
        plan_remarks(workload, estimate),
    ]
    return page(
        title=f"{workload.model.name} on {gpus(plan.world_size * plan.devices_per_process)}: {plan.describe()}",
        head="\n".join(head),
        sections=[
            memory_section(workload, estimate, renderer),
            step_section(estimate),
            timeline_section(workload, estimate, renderer),
            ranks_section(workload, estimate, placement),
        ],
    )
