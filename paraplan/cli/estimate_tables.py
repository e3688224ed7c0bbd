"""An estimate as tables and bars for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paraplan.cost.estimate import MemoryEstimate, PlanEstimate
from paraplan.cost.fitting import largest_layer, what_fits
from paraplan.cost.workload import Workload
from paraplan.units import format_bytes, format_count, format_flops, format_seconds

if TYPE_CHECKING:  # torch, which an estimate does without
    from paraplan.runtime.fake_run import TracedMemory

PARTS = (
    ("parameter_bytes", "parameters", "blue"),
    ("gradient_bytes", "gradients", "green"),
    ("optimizer_state_bytes", "optimizer", "yellow"),
    ("activation_bytes", "activations", "magenta"),
    ("workspace_bytes", "workspace", "cyan"),
)
STEP_PARTS = (
    ("compute_s", "forward and backward"),
    ("recompute_s", "recompute"),
    ("tensor_parallel_s", "tensor-parallel all-reduce"),
    ("pipeline_bubble_s", "pipeline bubble"),
    ("pipeline_send_s", "pipeline send"),
    ("data_parallel_s", "data-parallel, not hidden"),
    ("optimizer_s", "optimizer"),
)


def print_estimate(workload: Workload, estimate: PlanEstimate) -> None:
    """Print the memory of each stage as a bar with its parts, and the step time by parts."""
    console = Console()
    console.print(f"\n[bold]Memory per GPU[/bold], {format_bytes(estimate.usable_memory_bytes)} usable")
    scale = max(estimate.peak_memory_bytes, estimate.usable_memory_bytes)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("stage", justify="right")
    for _, title, color in PARTS:
        table.add_column(title, justify="right", style=color)
    table.add_column("total", justify="right", style="bold")
    for stage in _distinct(estimate.memory):
        cells = [format_bytes(getattr(stage, name)) for name, _, _ in PARTS]
        table.add_row(str(stage.pipeline_stage), *cells, format_bytes(stage.total_bytes))
    console.print(table)
    for stage in _distinct(estimate.memory):
        console.print(_bar(stage, scale, width=min(60, console.width - 20)))
    fullest = max(estimate.memory, key=lambda stage: stage.total_bytes)
    console.print(
        f"{format_bytes(fullest.total_bytes)} as torch counts what is allocated, "
        f"{format_bytes(fullest.device_bytes)} as nvidia-smi shows it"
        + (f"; {format_bytes(fullest.host_bytes)} of host memory for each rank" if fullest.host_bytes else "")
    )
    _print_fitting(console, workload, estimate)
    _print_step(console, estimate)


def print_traced(estimate: PlanEstimate, traced: Sequence[TracedMemory]) -> None:
    """Print the memory of stages as predicted beside that of the runtime, run without values."""
    console = Console()
    console.print("\n[bold]Predicted and traced[/bold], the runtime's own engine run without a GPU")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("")
    for _, title, color in PARTS:
        table.add_column(title, justify="right", style=color)
    table.add_column("total", justify="right", style="bold")
    for memory in traced:
        predicted = estimate.memory[memory.pipeline_stage]
        for title, row in (("predicted", predicted), (f"traced, {memory.phase}", memory)):
            cells = [format_bytes(getattr(row, name)) for name, _, _ in PARTS]
            table.add_row(str(memory.pipeline_stage), title, *cells, format_bytes(row.total_bytes))
        error = predicted.total_bytes / memory.total_bytes - 1
        table.add_row("", "error", *[""] * len(PARTS), f"{error:+.1%}")
    console.print(table)


def _print_fitting(console: Console, workload: Workload, estimate: PlanEstimate) -> None:
    rows = what_fits(workload, estimate.plan)
    layer = largest_layer(workload)
    verdict = "fits" if layer.fits else "does not fit"
    console.print(
        f"\n[bold]What would fit[/bold] on {rows[0].num_gpus} GPUs, tp, pp and cp as they are. The largest layer, "
        f"{layer.name}, trains in {format_bytes(layer.training_state_bytes)} and {verdict} alone."
    )
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("ZeRO", "recompute", "largest micro-batch", "fewest GPUs"):
        table.add_column(heading, justify="right")
    for row in rows:
        size, gpus = row.largest_micro_batch, row.fewest_gpus
        table.add_row(str(row.zero_stage), row.recompute, str(size or "none"), str(gpus or "?"))
    console.print(table)


def _print_step(console: Console, estimate: PlanEstimate) -> None:
    step = estimate.step
    console.print(
        f"\n[bold]Step[/bold] {format_seconds(step.step_time_s)}, "
        f"{format_count(step.tokens_per_s_per_gpu)} tokens/s per GPU, "
        f"{format_flops(step.model_flops_per_s_per_gpu)} per GPU (MFU {step.mfu:.1%})"
    )
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    for name, title in STEP_PARTS:
        seconds = getattr(step, name)
        if seconds > 0:
            table.add_row(title, format_seconds(seconds), f"{seconds / step.step_time_s:.1%}")
    console.print(table)


def _distinct(memory: tuple[MemoryEstimate, ...], limit: int = 8) -> list[MemoryEstimate]:
    """Return all stages of a short pipeline; of a long one the first, the second and the last."""
    return list(memory) if len(memory) <= limit else [memory[0], memory[1], memory[-1]]


def _bar(stage: MemoryEstimate, scale: int, *, width: int) -> Text:
    bar = Text(f"stage {stage.pipeline_stage:>2} ")
    drawn = 0
    passed = 0
    for name, title, color in PARTS:
        passed += getattr(stage, name)
        cells = round(passed / scale * width) - drawn
        bar.append(title[0] * cells, style=f"{color} reverse")
        drawn += cells
    bar.append("." * max(0, width - drawn), style="dim")
    bar.append(f" {stage.total_bytes / scale:.0%}")
    return bar
