"""Results of a calibration, as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from paraplan.cli.terminal import escape, make_console
from paraplan.units import format_bandwidth, format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from paraplan.accuracy.calibration import Calibration
    from paraplan.hardware.profiles import KernelFit, MachineProfile


def print_calibration(machine: MachineProfile) -> None:
    """Print what matmuls, attention, memory and an optimizer's step reach on a calibrated machine."""
    console = make_console()
    gpu, found = machine.gpu, machine.gpu.calibration
    assert found is not None
    console.print(
        f"[bold]{escape(machine.title)}[/bold]: {len(machine.node.gpus)} ranks, measured all at once", markup=True
    )
    console.print(f"{found.source}\n", style="dim")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("matmul", "large shapes", "each adds", "fit is off by", "attention", "backward"):
        table.add_column(heading, justify="left" if heading == "matmul" else "right")
    for fit in found.kernels:
        table.add_row(
            fit.precision,
            format_flops(fit.matmul_flops_per_s),
            format_seconds(fit.matmul_launch_s),
            f"{fit.error:.0%}",
            format_flops(fit.attention_forward_flops_per_s),
            format_flops(fit.attention_backward_flops_per_s),
        )
    console.print(table)
    console.print("; ".join(_halves(fit) for fit in found.kernels), style="dim")
    rows = [
        ("copy in memory, read and write", format_bandwidth(gpu.memory_bandwidth_bytes_per_s)),
        ("norm, GELU and sum, forward and backward", format_bandwidth(found.moved_bytes_per_s)),
        ("AdamW with clipping", f"{format_seconds(_per_million(found.optimizer_s_per_parameter))} for 1 M parameters"),
        ("compute beside an all-reduce", _slowdown(found.overlap_slowdown)),
        ("memory of a rank", format_bytes(gpu.memory_bytes)),
    ]
    console.print()
    facts = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    for row in rows:
        facts.add_row(*row)
    console.print(facts)


def print_fit(fitted: Calibration) -> None:
    """Print the constants that were fitted to runs, and what the fit is worth."""
    console = make_console()
    console.print(f"[bold]Fitted to {fitted.num_runs} runs[/bold] of {escape(fitted.source)}", markup=True)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("constant", "times", "before the fit", "after it"):
        table.add_column(heading, justify="left" if heading == "constant" else "right")
    for constant in fitted.constants:
        table.add_row(
            constant.title,
            f"{constant.factor:.2f}",
            f"+- {constant.prior_log_sd:.0%}",
            f"+- {constant.log_sd:.0%}",
        )
    console.print(table)
    console.print(
        f"mean error of the step time: {fitted.error_before:.1%} before, {fitted.error_after:.1%} after, "
        f"{fitted.error_left_out:.1%} for runs left out of the fit"
    )
    if not fitted.is_worth_it:
        console.print(
            "[yellow]runs left out are predicted worse than without a fit: do not use it[/yellow]", markup=True
        )
    for reason in fitted.skipped:
        console.print(f"left out: {reason}", style="dim")


def _halves(fit: KernelFit) -> str:
    halves = (("m", fit.half_m), ("n", fit.half_n), ("k", fit.half_k))
    named = [f"{name} = {size:.0f}" for name, size in halves if size >= 1]
    return f"{fit.precision}: half the speed at {', '.join(named)}" if named else f"{fit.precision}: no size is slower"


def _per_million(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _slowdown(factor: float | None) -> str:
    return "?" if factor is None else f"takes {factor:.2f} times as long"
