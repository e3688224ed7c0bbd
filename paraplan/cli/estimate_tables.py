"""An estimate as tables and bars for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paraplan.cli.terminal import make_console
from paraplan.cli.timeline import print_timeline
from paraplan.report.notes import note_lines
from paraplan.report.plan_words import device_tool, step_parts
from paraplan.report.short_text import LABEL_WIDTH, Line, peak_in_words
from paraplan.units import format_bytes, format_count, format_flops, format_seconds, format_share, gpus

if TYPE_CHECKING:
    from paraplan.api.estimates import Estimate
    from paraplan.cost.capacity import FitRow
    from paraplan.cost.estimate import MemoryEstimate
    from paraplan.runtime.fake.run import TracedMemory  # torch, which an estimate does without

PARTS = (
    ("parameter_bytes", "parameters", "blue"),
    ("gradient_bytes", "gradients", "green"),
    ("optimizer_state_bytes", "optimizer", "yellow"),
    ("activation_bytes", "activations", "magenta"),
    ("workspace_bytes", "workspace", "cyan"),
)
TONES = {"good": "bold green", "bad": "bold red", "caution": "yellow", "dim": "dim", "": ""}


def print_lines(console: Console, lines: Sequence[Line]) -> None:
    """Print labelled lines, each in its column also where it goes on."""
    console.print(lines_table(lines))


def lines_table(lines: Sequence[Line]) -> Table:
    """Return labelled lines as they are printed."""
    table = Table.grid(padding=(0, 0))
    table.add_column(width=LABEL_WIDTH, no_wrap=True)
    table.add_column()
    for line in lines:
        table.add_row(Text(line.label, style="bold"), Text(line.text, style=TONES[line.tone]))
    return table


def print_heading(estimate: Estimate) -> None:
    """Print what is trained and on what, the plan, whether it fits, its speed, and what to know beside."""
    console = make_console()
    print_lines(console, [*estimate.lines, *note_lines(estimate.workload, estimate.plan)])


def print_estimate(estimate: Estimate, *, with_details: bool) -> None:
    """Print the memory of each stage as a bar with its parts, and the step time by parts.

    `with_details` adds what else would fit, and the timeline of a pipeline.
    """
    console = make_console()
    usable = estimate.usable_memory_bytes
    console.print(f"\n[bold]Memory per GPU[/bold], {format_bytes(usable)} usable", markup=True)
    console.print("[dim]by parts at the peak; what is not allocated at that moment shows 0[/dim]", markup=True)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("stage", justify="right")
    for _, title, color in PARTS:
        table.add_column(title, justify="right", style=color)
    table.add_column("total", justify="right", style="bold")
    shown = shown_stages(estimate.memory)
    for stage in shown:
        cells = [format_bytes(getattr(stage, name)) for name, _, _ in PARTS]
        table.add_row(str(stage.pipeline_stage), *cells, format_bytes(stage.total_bytes))
    console.print(table)
    scale = max(estimate.peak_memory_bytes, usable)
    for stage in shown:
        console.print(_bar(stage, usable, scale, width=min(60, console.width - 28)))
    fullest = max(estimate.memory, key=lambda stage: stage.total_bytes)
    if left_out := len(estimate.memory) - len(shown):
        console.print(
            f"[dim]{left_out} stages are left out; none needs more than stage {fullest.pipeline_stage}[/dim]",
            markup=True,
        )
    console.print(
        f"Peak {format_bytes(fullest.total_bytes)} allocated (torch.cuda.max_memory_allocated), about "
        f"{format_bytes(fullest.device_bytes)} {device_tool(estimate.workload)}"
    )
    result = estimate.result
    if result.host_bytes_per_node:
        known = result.host_memory_bytes
        of = "" if known is None else f" of {format_bytes(known)}"
        console.print(
            f"Host memory for offload: {format_bytes(fullest.host_bytes)} a rank, "
            f"{format_bytes(result.host_bytes_per_node)}{of} a machine"
        )
    _print_step(console, estimate)
    if with_details:
        _print_fitting(console, estimate)
    timeline = estimate.timeline if with_details else None
    if timeline is not None:
        print_timeline(console, timeline)


def print_traced(memory: Sequence[MemoryEstimate], traced: Sequence[TracedMemory]) -> None:
    """Print the predicted `memory` of all stages beside that of the runtime, run without values."""
    console = make_console()
    console.print("\n[bold]Predicted and traced[/bold], the runtime's own engine run without a GPU", markup=True)
    # Closer columns than elsewhere: it fits 80 of them.
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column("stage", justify="right")
    table.add_column("")
    for _, title, color in PARTS:
        table.add_column(title, justify="right", style=color)
    table.add_column("total", justify="right", style="bold")
    for found in traced:
        predicted = memory[found.pipeline_stage]
        for title, row in (("predicted", predicted), ("traced", found)):
            cells = [format_bytes(getattr(row, name)) for name, _, _ in PARTS]
            table.add_row(str(found.pipeline_stage), title, *cells, format_bytes(row.total_bytes))
        # A part's error is told against the peak, so that the parts' errors sum to that of the total.
        errors = [
            f"{(getattr(predicted, name) - getattr(found, name)) / found.total_bytes:+.1%}"
            for name in (*(name for name, _, _ in PARTS), "total_bytes")
        ]
        table.add_row("", "error", *errors)
    console.print(table)
    phases = ", ".join(f"stage {found.pipeline_stage} in {found.phase}" for found in traced)
    console.print(f"[dim]errors in parts of the peak; traced peaks: {phases}[/dim]", markup=True)
    console.print("[dim]without what cuBLAS keeps for itself on a GPU, which no trace sees[/dim]", markup=True)


def _print_fitting(console: Console, estimate: Estimate) -> None:
    plan = estimate.plan
    rows = estimate.capacity
    recomputes = list(dict.fromkeys(row.recompute for row in rows))
    kept = [f"{axis}{getattr(plan, axis)}" for axis in plan.degrees if axis != "dp" and getattr(plan, axis) > 1]
    kept += [f"offload {plan.offload}"] if plan.offload != "none" else []
    console.print(
        f"\n[bold]What would fit[/bold] on {gpus(rows[0].num_gpus)}{''.join(f', {word}' for word in kept)}\n"
        "[dim]the largest micro-batch that fits (and the fewest GPUs for one sequence each)[/dim]",
        markup=True,
    )
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("recompute", justify="left")
    for recompute in recomputes:
        table.add_column(recompute, justify="right", min_width=16)
    for stage in dict.fromkeys(row.zero_stage for row in rows):
        cells = [_fit_cell(row) for row in rows if row.zero_stage == stage]
        table.add_row(f"ZeRO-{stage}" if stage else "ZeRO-0 (DDP)", *cells)
    console.print(table)
    layer = estimate.largest_layer
    size = f"{layer.name}, {format_count(layer.num_parameters)} parameters"
    workload = estimate.workload
    has_ep = workload.model.num_experts > 1 and workload.framework.data_parallel.has_expert_parallel
    ways = "tp, ep or ZeRO-3" if has_ep else "tp or ZeRO-3"
    verdict = "fits on one GPU" if layer.fits else f"fits no GPU: a pipeline alone cannot train it, {ways} can"
    console.print(f"Largest layer: {size}, needs {format_bytes(layer.training_state_bytes)} to train, {verdict}")


def _fit_cell(row: FitRow) -> str:
    if row.largest_micro_batch is None and row.fewest_gpus is None:
        return "-"
    size = "-" if row.largest_micro_batch is None else str(row.largest_micro_batch)
    if row.is_open_ended:
        size += "+"
    return f"{size} ({'-' if row.fewest_gpus is None else row.fewest_gpus})"


def _print_step(console: Console, estimate: Estimate) -> None:
    step = estimate.step
    console.print(
        f"\n[bold]Step[/bold] {'at least ' if estimate.is_lower_bound else ''}{format_seconds(step.step_time_s)}, "
        f"{format_count(step.tokens_per_s_per_gpu)} tokens/s per GPU, "
        f"{format_flops(step.model_flops_per_s_per_gpu)} per GPU (MFU {step.mfu:.1%})",
        markup=True,
    )
    peak = peak_in_words(estimate.workload)
    if peak is not None:
        console.print(peak, style="dim")
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify)
    for title, seconds in step_parts(estimate.plan, step):
        table.add_row(title, format_seconds(seconds), f"{seconds / step.step_time_s:.1%}")
    console.print(table)


def shown_stages(memory: Sequence[MemoryEstimate], limit: int = 8) -> list[MemoryEstimate]:
    """Return all stages of a short pipeline; of a long one the first, the second, the fullest and the last."""
    if len(memory) <= limit:
        return list(memory)
    fullest = max(range(len(memory)), key=lambda stage: memory[stage].total_bytes)
    return [memory[stage] for stage in sorted({0, 1, fullest, len(memory) - 1})]


def _bar(stage: MemoryEstimate, usable: int, scale: int, *, width: int) -> Text:
    """Return a bar whose letters are the parts; `|` stands where the usable memory ends."""
    cells: list[tuple[str, str]] = []
    passed = 0
    for name, title, color in PARTS:
        passed += getattr(stage, name)
        cells += [(title[0], f"{color} reverse")] * (round(passed / scale * width) - len(cells))
    limit = round(usable / scale * width)
    cells += [(".", "dim")] * (limit - len(cells))
    bar = Text(f"stage {stage.pipeline_stage:>2} ")
    for index, (letter, style) in enumerate(cells):
        if index == limit:
            bar.append("|", style="bold")
        bar.append(letter, style=style)
    if len(cells) <= limit:
        bar.append("|", style="bold")
    bar.append(f" {format_share(stage.total_bytes / usable)} of usable")
    return bar
