"""The sections about one plan: its memory, its step, its timeline, its ranks on the machine."""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.accuracy.ranges import step_range
from paraplan.cost.estimate import MemoryEstimate, PlanEstimate
from paraplan.cost.timeline import StepTimeline, step_timeline
from paraplan.cost.workload import Workload
from paraplan.plan.files import PlannedPlacement
from paraplan.report.chart_svg import NARROW, WIDE, ChartRenderer
from paraplan.report.charts import MEMORY_PARTS, memory_chart, shown_stages
from paraplan.report.page import details, facts, figure, paragraph, section, table
from paraplan.report.plan_words import cautions, step_parts
from paraplan.report.rank_map import axis_groups, map_table
from paraplan.report.sections import Column, Row
from paraplan.report.short_text import memory_verdict
from paraplan.report.timeline_chart import shown_rows, timeline_chart
from paraplan.report.topology_svg import GroupRow, render_svg
from paraplan.units import format_bandwidth, format_bytes, format_count, format_flops, format_seconds, format_share


def workload_lines(workload: Workload) -> list[str]:
    """Return what is trained, on what, and how, a sentence each."""
    model, cluster, training = workload.whole_model or workload.model, workload.cluster, workload.training
    return [
        f"{format_count(model.parameters.total)} parameters on {cluster}",
        f"global batch {training.global_batch_size} x {training.seq_length} tokens, {training.title}",
    ]


def plan_facts(workload: Workload, estimate: PlanEstimate) -> str:
    """Return the figures of a plan that are read first."""
    step = estimate.step
    total = step.tokens_per_s_per_gpu * estimate.plan.world_size * estimate.plan.devices_per_process
    return facts(
        [
            ("step", format_seconds(step.step_time_s)),
            ("tokens/s", format_count(total)),
            ("tokens/s per GPU", format_count(step.tokens_per_s_per_gpu)),
            ("MFU", f"{step.mfu:.1%}"),
            ("peak memory", format_bytes(estimate.peak_memory_bytes)),
            ("of usable", format_share(estimate.peak_memory_bytes / estimate.usable_memory_bytes)),
        ]
    )


def plan_remarks(workload: Workload, estimate: PlanEstimate) -> str:
    """Return the range of the step with what it rests on, and what to worry about."""
    likely = step_range(workload, estimate)
    lines = []
    if likely is not None:
        ends = f"{format_seconds(likely.low_s)} to {format_seconds(likely.high_s)}"
        lines.append(paragraph(f"Step {ends}: {likely.in_words}.", style="soft"))
    words, tone = memory_verdict(workload, estimate)
    if tone != "good":
        lines.append(paragraph(f"Memory: {words}.", style="bad"))
    lines += [paragraph(f"Caution: {words}.", style="bad") for words in cautions(workload, estimate)]
    return "\n".join(lines)


def memory_section(workload: Workload, estimate: PlanEstimate, renderer: ChartRenderer) -> str:
    """Return the memory of each stage, drawn and as a table."""
    capacity = workload.cluster.gpu_memory_bytes
    spec = memory_chart(estimate, capacity_bytes=capacity)
    label = f"Memory of each pipeline stage by parts, against {format_bytes(estimate.usable_memory_bytes)} usable"
    wide, narrow = (renderer.render(spec, label=label, width=width) for width in (WIDE, NARROW))
    left_out = len(estimate.memory) - len(shown_stages(estimate.memory))
    caption = (
        f"Dashed: {format_bytes(estimate.usable_memory_bytes)} usable, {format_bytes(capacity)} on the GPU. "
        "By parts at the memory peak; what is not allocated at that moment shows 0."
        + (f" {left_out} stages in the middle are left out." if left_out else "")
    )
    fullest = max(estimate.memory, key=lambda stage: stage.total_bytes)
    sentence = (
        f"Peak {format_bytes(fullest.total_bytes)} allocated (torch.cuda.max_memory_allocated), "
        f"about {format_bytes(fullest.device_bytes)} on the device."
    )
    if estimate.host_bytes_per_node:
        sentence += f" Offload keeps {format_bytes(estimate.host_bytes_per_node)} in the memory of each machine."
    return section(
        "Memory",
        paragraph(sentence),
        figure(wide=wide, narrow=narrow, caption=caption, below=details("As a table", _memory_table(estimate.memory))),
    )


def step_section(estimate: PlanEstimate) -> str:
    """Return the parts of the step time, the largest share first to be seen."""
    step = estimate.step
    rows = []
    for title, seconds in step_parts(estimate.plan, step):
        share = seconds / step.step_time_s
        rows.append(
            f"<tr><th scope='row' class='words'>{title}</th><td class='number'>{format_seconds(seconds)}</td>"
            f"<td class='number'>{share:.1%}</td>"
            f'<td class="wide" aria-hidden="true"><span class="bar" style="width:{share * 320:.0f}px"></span></td></tr>'
        )
    hidden = step.data_parallel_wire_s - step.data_parallel_s
    beside = (
        f" Another {format_seconds(hidden)} of data-parallel communication runs beside compute." if hidden > 0 else ""
    )
    sentence = f"{format_flops(step.model_flops_per_s_per_gpu)} per GPU, MFU {step.mfu:.1%}.{beside}"
    return section(
        f"One step: {format_seconds(step.step_time_s)}",
        paragraph(sentence),
        '<div class="scroll" tabindex="0" role="region" aria-label="Parts of a step"><table>'
        "<caption>Parts of a step, on the slowest rank</caption><thead><tr><th scope='col'>part</th>"
        "<th scope='col' class='number'>time</th><th scope='col' class='number'>share</th>"
        f"<td class='wide'></td></tr></thead><tbody>{''.join(rows)}</tbody></table></div>",
    )


def timeline_section(workload: Workload, estimate: PlanEstimate, renderer: ChartRenderer) -> str:
    """Return the timeline of one step: who computes, sends and waits when."""
    timeline, plan = step_timeline(workload, estimate), estimate.plan
    label = f"Course of one step of {plan.describe()}"
    wide, narrow = (
        renderer.render(timeline_chart(timeline, width=width), label=label, width=width, is_picture=True)
        for width in (WIDE, NARROW)
    )
    left_out = len(timeline.ranks) - len(shown_rows(len(timeline.ranks)))
    caption = "Numbers are micro-batches. Communication inside a pass is drawn at its end; it runs between kernels."
    if plan.virtual_pipeline_size > 1:
        caption += " Every second chunk of a rank is paler."
    if left_out:
        caption += f" {left_out} ranks in the middle are left out."
    if len(timeline.ranks) > 1:
        worst = max(timeline.waiting_s(rank) for rank in range(len(timeline.ranks)))
        sentence = (
            f"A pipeline of {plan.pp} ranks and {plan.num_stages} stages under {plan.pipeline_schedule}, "
            f"{plan.num_microbatches} micro-batches. A rank waits {format_seconds(worst)} at most, "
            f"{worst / timeline.step_time_s:.1%} of the step."
        )
    else:
        one = (
            "1 micro-batch"
            if plan.num_microbatches == 1
            else f"{plan.num_microbatches} micro-batches one after another"
        )
        sentence = f"No pipeline: every rank does the same, {one}."
    return section(
        "Timeline of a step",
        paragraph(sentence),
        figure(wide=wide, narrow=narrow, caption=caption, below=details("As a table", _timeline_table(timeline))),
    )


def ranks_section(workload: Workload, estimate: PlanEstimate, placement: PlannedPlacement) -> str:
    """Return which ranks form groups, on the picture of a machine and as maps of all ranks."""
    plan, cluster = estimate.plan, workload.cluster
    groups = axis_groups(plan)
    per_node = min(plan.world_size, cluster.gpus_per_node)
    order = [axis for axis in plan.rank_order if getattr(plan, axis) > 1]
    slowest = ", ".join(f"{axis} {format_bandwidth(rate)}" for axis, rate in placement.slowest_bytes_per_s.items())
    mapped = [each for each in groups if max(each.group_of) > 0]
    sentences = []
    if order:
        sentences.append(f"Ranks, outermost axis first: {', '.join(order)}.")
    if slowest:
        sentences.append(f"Slowest link of each axis, per direction: {slowest}.")
    alone = [each.axis for each in groups if each not in mapped]
    if alone:
        sentences.append(f"All ranks form one group of {alone[0]}.")
    gpus = placement.local_gpus[:per_node]
    if gpus != tuple(range(len(gpus))):
        sentences.append(f"GPUs by local rank: {', '.join(map(str, gpus))} (CUDA_VISIBLE_DEVICES).")
    rows = [
        GroupRow(name=each.axis, group_of={gpu: each.group_of[rank] for rank, gpu in enumerate(gpus)})
        for each in groups
    ]
    if cluster.num_nodes > 1:
        sentences.append(f"Drawn is the first of {cluster.num_nodes} machines.")
    label = "The machine with the groups of its ranks; scrolls sideways"
    picture = render_svg(cluster.node, groups=rows) if cluster.node.gpus else ""
    maps = "".join(map_table(each, ranks_per_node=per_node) for each in mapped)
    note = (
        "Cells hold the number of the group that a rank belongs to: one number, one color, one group." if mapped else ""
    )
    return section(
        "Rank placement",
        paragraph(" ".join(sentences)) if sentences else "",
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{picture}</div>' if picture else "",
        paragraph(note, style="soft") if note else "",
        f'<div class="scroll maps" tabindex="0" role="region" aria-label="Groups of all ranks">{maps}</div>'
        if maps
        else "",
    )


def _memory_table(memory: Sequence[MemoryEstimate]) -> str:
    columns = [Column("stage"), *(Column(name, is_number=True) for _, name, _ in MEMORY_PARTS)]
    rows = [
        Row(
            (
                f"stage {stage.pipeline_stage}",
                *(format_bytes(getattr(stage, field)) for field, _, _ in MEMORY_PARTS),
                format_bytes(stage.total_bytes),
                format_bytes(stage.device_bytes),
            )
        )
        for stage in memory
    ]
    columns += [Column("total", is_number=True), Column("on the device", is_number=True)]
    return table(columns, rows, caption="Memory of a GPU by parts")


def _timeline_table(timeline: StepTimeline) -> str:
    columns = [
        Column("pipeline rank"),
        Column("in passes", is_number=True),
        Column("of it communication", is_number=True),
        Column("waiting (bubble)", is_number=True),
        Column("share of the step", is_number=True),
    ]
    rows = [
        Row(
            (
                f"rank {rank}",
                format_seconds(timeline.busy_s(rank)),
                format_seconds(timeline.sending_s(rank)),
                format_seconds(timeline.waiting_s(rank)),
                f"{timeline.waiting_s(rank) / timeline.step_time_s:.1%}",
            )
        )
        for rank in range(len(timeline.ranks))
    ]
    return table(columns, rows, caption="What each rank does in a step, before gradients are reduced")
