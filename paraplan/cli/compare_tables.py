"""A comparison of two steps as text for a terminal."""

from __future__ import annotations

from rich.table import Table

from paraplan.cli.terminal import escape, make_console
from paraplan.report.step_profile import StepProfile
from paraplan.report.timeline_chart import COLLECTIVE_WORDS
from paraplan.report.trace_comparison import PartDifference, TraceComparison
from paraplan.units import format_seconds


def print_comparison(comparison: TraceComparison) -> None:
    """Print the parts of both steps side by side, the collectives, and the largest differences in words."""
    console = make_console()
    predicted, measured = comparison.predicted, comparison.measured
    console.print(f"[bold]rank {measured.rank}[/bold]: {escape(_origin(measured))}", markup=True)
    for line in _remarks(predicted, measured):
        console.print(line, style="yellow")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for title in ("predicted", "measured", "difference", ""):
        table.add_column(title, justify="right", no_wrap=True)
    for part in comparison.parts:
        _add(table, part)
        if part.name == "compute" and measured.optimizer_s is not None:
            optimizer = PartDifference(
                name="  of it the optimizer's step",
                predicted_s=predicted.optimizer_s or 0.0,
                measured_s=measured.optimizer_s,
                sums=False,
            )
            _add(table, optimizer)
    step = PartDifference(name="step", predicted_s=predicted.step_s, measured_s=measured.step_s, sums=True)
    _add(table, step, style="bold")
    console.print()
    console.print(table)
    if comparison.collectives:
        console.print("\n[bold]Collectives[/bold], whole: also what compute hides", markup=True)
        console.print(_collectives(comparison))
    console.print("\n[bold]Largest differences[/bold]", markup=True)
    findings = Table.grid(padding=(0, 1))
    for finding in comparison.findings or ("none above 2 % of a step",):
        findings.add_row("  -", finding)
    console.print(findings)
    if measured.communication_s:
        console.print(
            "A collective waits for its slowest rank: what is predicted as idle can show as communication.",
            style="dim",
        )


def _collectives(comparison: TraceComparison) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for title in ("predicted", "measured", "difference", ""):
        table.add_column(title, justify="right", no_wrap=True)
    for part in comparison.collectives:
        _add(table, part.replace(name=COLLECTIVE_WORDS.get(part.name, part.name)))
    return table


def _add(table: Table, part: PartDifference, *, style: str = "") -> None:
    sign = "+" if part.difference_s >= 0 else "-"
    ratio = part.measured_s / part.predicted_s if part.predicted_s else 0.0
    share = f"x {ratio:,.0f}" if ratio >= 10 else f"{ratio - 1:+.0%}" if part.predicted_s else ""
    table.add_row(
        part.name,
        format_seconds(part.predicted_s),
        format_seconds(part.measured_s),
        f"{sign}{format_seconds(abs(part.difference_s))}",
        share,
        style=style,
    )


def _origin(measured: StepProfile) -> str:
    device = "kernels of its GPU" if measured.on_gpu else "operators of its CPU"
    steps = "1 step" if measured.steps == 1 else f"mean of {measured.steps} steps"
    return f"{measured.source}, {steps}, {device}"


def _remarks(predicted: StepProfile, measured: StepProfile) -> list[str]:
    """Return what makes the two hard to compare."""
    found = []
    if measured.world_size is not None and measured.world_size != predicted.world_size:
        found.append(f"predicted for {predicted.world_size} ranks, measured on {measured.world_size}")
    if not measured.on_gpu:
        found.append("the run was on CPUs; compare it with a prediction for them (paraplan calibrate)")
    return found
