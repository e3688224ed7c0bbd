"""Output of `paraplan validate`: tables of errors by group, the worst rows, sweeps, and what was skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paraplan.cli.terminal import escape
from paraplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from paraplan.accuracy.run_prediction import RunPrediction
    from paraplan.accuracy.scoring import ErrorSummary, FitScore, Score, SweepScore
    from paraplan.accuracy.why import SourceFactors


def print_scores(
    console: Console,
    step_time: Score,
    memory: Score,
    rows: Mapping[str, RunPrediction],
    *,
    brief: bool = False,
) -> None:
    """Print both errors by source and, unless `brief`, by GPU, framework and parallelism, with the worst rows."""
    for title, figures in (("Step time", step_time), ("Peak memory", memory)):
        if not figures.all_rows.rows:
            continue
        console.print(_table(f"{title} by source", "source", figures.by_source, figures))
        console.print()
        if figures.by_reading:
            console.print(_table(f"{title} by what was read", "reading", figures.by_reading))
            console.print()
        if brief:
            continue
        groups = {"GPU": figures.by_gpu, "framework": figures.by_framework, "parallelism": figures.by_parallelism}
        for name, group in groups.items():
            console.print(_table(f"{title} by {name}", name, group))
            console.print()
        console.print(f"[bold]Worst rows, {escape(title.lower())}[/bold]", markup=True)
        worst = Table.grid()
        for identity in figures.worst:
            error, what = _row(rows[identity], is_time=figures is step_time)
            if console.is_terminal:
                worst.add_row(f"  {error}  ", what)
            else:
                console.print(f"  {error}  {what}", soft_wrap=True)
        if worst.row_count:
            console.print(worst)
        console.print()


def print_sweeps(console: Console, sweeps: SweepScore, batch_sweeps: SweepScore) -> None:
    """Print whether the best plan of each sweep is found, of one model and machine and of one batch too."""
    for what, found in (("one model on one set of GPUs", sweeps), ("one batch", batch_sweeps)):
        if found.sweeps:
            _print_sweeps(console, what, found)


def print_fits(console: Console, fits: FitScore) -> None:
    """Print for how many runs it was predicted whether they run or run out of memory; nothing without such runs."""
    if fits.out_of_memory:
        failed = f"of {fits.out_of_memory} runs that ran out of memory {fits.out_of_memory_predicted} were predicted to"
        ran = f", of {fits.ran} that ran {fits.ran - fits.ran_predicted} too" if fits.ran else ""
        others = f"; {fits.ended_otherwise} more failed, where one with no less on each GPU ran"
        console.print(f"Fits or not: {failed}{ran}{others if fits.ended_otherwise else ''}\n")


def print_factors(console: Console, found: Sequence[SourceFactors]) -> None:
    """Print for each source the one factor that would explain most of its errors, and what would be left of them."""
    for quantity in ("step time", "peak memory"):
        rows = [one for one in found if one.quantity == quantity]
        if not rows:
            continue
        table = Table(
            title=f"What one factor would explain: {quantity}", title_justify="left", box=None, pad_edge=False
        )
        for name in ("source", "rows", "error", "factor", "times", "error then"):
            table.add_column(name, justify="left" if name in ("source", "factor") else "right", overflow="fold")
        for one in rows:
            best = one.best
            cells = (best.title, f"{best.scale:.2g}", f"{best.error:.1%}") if best else ("none", "", "")
            table.add_row(one.source or "not stated", str(one.runs), f"{one.error:.1%}", *cells)
        console.print(table)
        console.print()


def print_skipped(console: Console, skipped: Sequence[RunPrediction], *, scored: int, total: int) -> None:
    """Print how many rows were scored and skipped, and the reasons."""
    share = len(skipped) / max(1, total)
    console.print(f"{scored} rows scored of {total}, {len(skipped)} skipped ({share:.1%})")
    for reason, count in Counter(row.skipped for row in skipped).most_common(10):
        console.print(f"  {count} x {reason}", style="dim", markup=False)


def _table(title: str, heading: str, groups: Mapping[str, ErrorSummary], whole: Score | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    table.add_column(heading, overflow="fold", max_width=58)
    for name in ("rows", "MAPE", "median", "worst", "bias"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in groups.items():
        table.add_row(name or "not stated", *_cells(summary))
    if whole is not None:
        table.add_row("all rows", *_cells(whole.all_rows), style="bold")
        mean = f"{whole.mean_of_sources or 0:.1%}"
        table.add_row("mean of the sources", str(len(whole.by_source)), mean, "", "", "")
    return table


def _cells(summary: ErrorSummary) -> list[str]:
    shares = (summary.mape, summary.median_ape, summary.max_ape)
    return [str(summary.rows), *(f"{share or 0:.1%}" for share in shares), f"{summary.bias or 0:+.1%}"]


def _row(row: RunPrediction, *, is_time: bool) -> tuple[str, str]:
    """Return the error of a row, and what is off."""
    if is_time:
        error, predicted, measured = row.step_time_error, row.predicted_step_time_s, row.measured_step_time_s
        shown = f"{format_seconds(predicted or 0)} for {format_seconds(measured or 0)}"
    else:
        error, predicted, measured = row.memory_error, row.predicted_peak_memory_bytes, row.measured_peak_memory_bytes
        shown = f"{format_bytes(predicted or 0)} for {format_bytes(measured or 0)}"
    return f"{error or 0:+.0%}", f"{row.id}: {shown}; {row.plan} on {row.gpu}"


def _print_sweeps(console: Console, what: str, sweeps: SweepScore) -> None:
    worst = max(sweeps.sweeps, key=lambda sweep: sweep.top1_regret)
    count, plans = len(sweeps.sweeps), sum(sweep.rows for sweep in sweeps.sweeps)
    console.print(
        f"[bold]{count} sweep{'s' if count != 1 else ''} of {escape(what)}[/bold], {plans} plans by the time of a "
        f"sequence: rank correlation {sweeps.rank_correlation or 0:.2f}; the plan with the best prediction is "
        f"{sweeps.top1_regret or 0:.1%} slower than the best measured, {worst.top1_regret:.1%} at worst",
        markup=True,
    )
    console.print(f"  {worst.name}", style="dim")
    console.print()
