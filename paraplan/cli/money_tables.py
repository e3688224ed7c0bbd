"""What training costs, as text for a terminal: by number of GPUs, of a run, for an amount of money, with failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from paraplan.units import format_count, format_seconds

if TYPE_CHECKING:
    from paraplan.api.recommendations import Recommendation
    from paraplan.plan.goodput import GoodputEstimate
    from paraplan.search.money import Bought
    from paraplan.search.sizes import Budget, SizeOffer


def print_money(console: Console, answer: Recommendation) -> None:
    """Print what was asked about money and failures; nothing where nothing was."""
    beside = answer.answer
    if beside.offers:
        _print_offers(console, beside.offers)
    if beside.budget is not None:
        _print_budget(console, beside.budget, beside.price_source)
    if beside.bought is not None:
        _print_bought(console, beside.bought, beside.price_source, answer.workload.model.parameters.total)
    if beside.goodput is not None:
        if beside.budget is not None:
            _print_with_failures(console, beside.budget, beside.goodput)
        _print_goodput(console, beside.goodput, step_s=answer.result.best.step.step_time_s)


def _print_offers(console: Console, offers: tuple[SizeOffer, ...]) -> None:
    console.print("\n[bold]By number of GPUs[/bold], for a billion tokens", markup=True)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("GPUs", justify="right")
    table.add_column("plan")
    for title in ("step", "GPU-hours", "cost of 1e9 tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    for offer in offers:
        cost = offer.cost_per_billion_tokens
        table.add_row(
            str(offer.num_gpus),
            offer.plan,
            format_seconds(offer.step_time_s),
            f"{offer.gpu_hours_per_billion_tokens:,.1f}",
            "" if cost is None else f"{cost:,.2f}",
        )
    console.print(table)


def _print_budget(console: Console, budget: Budget, source: str | None) -> None:
    days = budget.seconds / 86_400
    length = f"{days:,.1f} days" if days >= 2 else format_seconds(budget.seconds)
    whose = source or "in the currency of --price"
    cost = "" if budget.cost is None else f", cost of the run {_rounded(budget.cost)} ({whose})"
    console.print(
        f"\n[bold]{format_count(budget.tokens)} tokens[/bold]: {budget.steps:,.0f} steps, {length}, "
        f"{_rounded(budget.gpu_hours)} GPU-hours{cost}; steps alone, without starts, checkpoints and failures",
        markup=True,
    )


def _print_with_failures(console: Console, budget: Budget, goodput: GoodputEstimate) -> None:
    days = budget.seconds / goodput.goodput / 86_400
    cost = "" if budget.cost is None else f", cost of the run {_rounded(budget.cost / goodput.goodput)}"
    console.print(_indented(f"with failures: {days:,.3g} days{cost}"))


def _print_bought(console: Console, bought: Bought, source: str | None, parameters: int) -> None:
    """Print what an amount of money trains on, beside what was asked for or is compute-optimal."""
    console.print(
        f"\n[bold]{_rounded(bought.money)}[/bold] buy {_rounded(bought.gpu_hours)} GPU-hours at "
        f"{bought.price_per_gpu_hour:.3g} ({source or '--price'}): {format_count(bought.tokens)} tokens in "
        f"{bought.seconds / 86_400:,.3g} days, {bought.tokens / parameters:.3g} tokens a parameter",
        markup=True,
    )
    wanted, cost = format_count(bought.wanted_tokens), _rounded(bought.wanted_cost)
    words = f"the {wanted} tokens asked for cost {cost}"
    if bought.is_compute_optimal:
        words = (
            f"pretraining is compute-optimal on {wanted} tokens (20 a parameter, arXiv 2203.15556), which cost {cost}"
        )
    also = "" if bought.goodput == 1 else f"; failures leave {bought.goodput:.1%} of the time"
    console.print(_indented(f"{words}{also}"))


def _rounded(number: float) -> str:
    """Return a number with the three digits that a prediction has: `34,800`."""
    return f"{float(f'{number:.3g}'):,g}"


def _print_goodput(console: Console, goodput: GoodputEstimate, *, step_s: float) -> None:
    costs, steps = goodput.costs, max(1, round(goodput.interval_s / step_s))
    console.print(
        f"\n[bold]Expected goodput {goodput.goodput:.1%}[/bold] with a failure every {format_seconds(goodput.mtbf_s)} "
        f"and a checkpoint every {steps:,} steps ({format_seconds(goodput.interval_s)})",
        markup=True,
    )
    source = "measured" if costs.is_measured else "assumed"
    console.print(
        _indented(
            f"checkpoints take {goodput.checkpoints:.1%}, steps done again {goodput.lost:.1%}, restarts "
            f"{goodput.restarts:.1%} ({source}: {format_seconds(costs.save_s)} a checkpoint, "
            f"{format_seconds(costs.load_s)} to load it, {format_seconds(costs.restart_s)} a restart)"
        )
    )


def _indented(text: str) -> Padding:
    """Return a text two columns in, also where it goes on in a second line."""
    return Padding(text, (0, 2))
