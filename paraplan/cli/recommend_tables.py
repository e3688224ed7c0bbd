"""A recommendation as text for a terminal: the tree's decisions, the ranked plans, what was ruled out."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from paraplan.cost.workload import Workload
from paraplan.search.results import SearchResult
from paraplan.units import format_bytes, format_count, format_seconds


def print_recommendation(workload: Workload, result: SearchResult) -> None:
    """Print the answer first, then the decisions with their numbers, the ranked plans, and the rejections."""
    console = Console(highlight=False)
    model, cluster, training = workload.model, workload.cluster, workload.training
    nodes = f"{cluster.num_nodes} x {cluster.name}" if cluster.num_nodes > 1 else cluster.name
    console.print(f"[bold]{model.name}[/bold], {format_count(model.parameters.total)} parameters")
    console.print(f"{nodes}: {cluster.num_gpus} x {cluster.gpu.title}")
    console.print(
        f"global batch {training.global_batch_size} x {training.seq_length} tokens, "
        f"{training.precision}, {training.optimizer}, {training.attention} attention"
    )
    console.print(f"\nRecommended: [bold green]{result.best.plan.describe()}[/bold green]")
    if result.fastest is not None:
        gain = result.best.step.step_time_s / result.fastest.step.step_time_s - 1
        console.print(f"Outside the tree's answer, predicted {gain:.0%} faster: {result.fastest.plan.describe()}")
    console.print("\n[bold]Decision tree[/bold]")
    for decision in result.decisions:
        console.print(Padding(f"{decision.rule} [bold]{decision.outcome}[/bold]", (0, 2)))
        console.print(Padding(f"[dim]{decision.because}[/dim]", (0, 4)))
    console.print("\n[bold]Plans[/bold], best first (* = a family that the tree names)")
    console.print(_plans(result))
    if result.rejections:
        console.print("\n[bold]Ruled out[/bold]")
        console.print(_rejections(result))


def _plans(result: SearchResult) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in ("", "plan", "step", "tokens/s/GPU", "MFU", "memory"):
        is_text = title in ("", "plan")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text)
    for candidate in result.candidates:
        chosen = candidate.plan == result.best.plan
        table.add_row(
            "*" if candidate.in_tree else "",
            candidate.plan.describe(),
            format_seconds(candidate.step_time_s),
            format_count(round(candidate.tokens_per_s_per_gpu, 1)),
            f"{candidate.mfu:.1%}",
            format_bytes(candidate.peak_memory_bytes),
            style="bold green" if chosen else "",
        )
    return table


def _rejections(result: SearchResult) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for rejection in result.rejections:
        plans = "plan" if rejection.count == 1 else "plans"
        table.add_row(f"{rejection.count:,} {plans}", rejection.reason)
    return table
