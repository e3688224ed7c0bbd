"""Sections of an answer as values, which the terminal and the page both render: they cannot say different things."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paraplan.plan.goodput import GoodputEstimate
from paraplan.search.comparison import Comparison, Explanation, part_words
from paraplan.search.money import Bought
from paraplan.search.recommendation import Recommendation
from paraplan.search.results import Decision, Rejection
from paraplan.search.sizes import Budget, SizeOffer
from paraplan.search.what_helps import Help
from paraplan.units import (
    DAYS_OF_A_YEAR,
    format_bytes,
    format_count,
    format_days,
    format_digits,
    format_run,
    format_seconds,
)


class Column(NamedTuple):
    """A column of a table; numbers stand on the right."""

    title: str
    is_number: bool = False


class Row(NamedTuple):
    """A row of a table as text, in which a second line of a cell tells less.

    `anchor` is the name under which charts link to it.
    """

    cells: tuple[str, ...]
    anchor: str | None = None
    is_chosen: bool = False


class Table(NamedTuple):
    """A table with the words that a screen reader says for it."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str


class Section(NamedTuple):
    """A title, the sentence that goes on from it with its first mark, and what stands under both."""

    title: str
    about: str = ""
    decisions: tuple[Decision, ...] = ()
    before: tuple[str, ...] = ()
    """Lines above the table."""
    table: Table | None = None
    after: tuple[str, ...] = ()
    """Lines below the table."""


def answer_sections(answer: Recommendation, *, verbose: bool = True) -> list[Section]:
    """Return what an answer holds beside its plan and the table of plans; `verbose` adds what nobody asked for."""
    more = [*_rejections(answer.result.rejections), *_helps(answer.helps)] if verbose else []
    asked = [*_explanation(answer.explanation), *_comparison(answer.comparison), *money_sections(answer)]
    return [*more, *asked]


def tree_sections(decisions: Sequence[Decision]) -> list[Section]:
    """Return the questions of the decision tree with their outcomes."""
    return [Section("Decision tree", decisions=tuple(decisions))] if decisions else []


def _rejections(rejections: Sequence[Rejection]) -> list[Section]:
    """Return why plans were left out, and how many."""
    rows = tuple(Row((f"{each.count:,} {'plan' if each.count == 1 else 'plans'}", each.reason)) for each in rejections)
    columns = (Column("plans", is_number=True), Column("reason"))
    return [Section("Ruled out", table=Table(columns, rows, "Why plans were left out"))] if rows else []


def _helps(helps: Sequence[Help]) -> list[Section]:
    """Return the changes of options, machines and nodes that make a step faster or smaller."""
    rows = tuple(
        Row(
            (
                f"{format_seconds(one.step_time_s)} ({one.change_in_words})",
                f"{format_bytes(one.peak_memory_bytes)} ({_signed(-one.saved_bytes, format_bytes)})",
                f"{'' if one.keeps_training else '* '}{one.options}\n"
                + ("the same plan" if one.is_same_plan else one.plan.describe()),
            )
        )
        for one in helps
    )
    columns = (Column("step", is_number=True), Column("memory", is_number=True), Column("change, and the plan with it"))
    mark = "* trains other parameters, with other arithmetic, or on other machines"
    after = () if all(one.keeps_training for one in helps) else (mark,)
    table = Table(columns, rows, "Changes of options, machines and nodes")
    return [Section("What would help", ", most time saved first", table=table, after=after)] if rows else []


def _explanation(explanation: Explanation | None) -> list[Section]:
    """Return the two best plans beside each other, part by part."""
    if explanation is None:
        return []
    steps = [(part_words(each.name), each.best_s, each.second_s) for each in explanation.parts]
    steps = [each for each in steps if each[1] or each[2]]
    steps.append(("step", explanation.best_step_s, explanation.second_step_s))
    rows = [
        Row((name, format_seconds(best), format_seconds(second), _signed(second - best, format_seconds)))
        for name, best, second in steps
    ]
    rows[-1] = rows[-1]._replace(is_chosen=True)
    rows.append(
        Row(("memory", format_bytes(explanation.best_memory_bytes), format_bytes(explanation.second_memory_bytes), ""))
    )
    columns = (Column(""), *(Column(title, is_number=True) for title in ("best", "second", "difference")))
    return [
        Section(
            "Why the best beats the second",
            before=(f"best:   {explanation.best}", f"second: {explanation.second}"),
            table=Table(columns, tuple(rows), "Both plans by parts of the step"),
            after=(explanation.because,),
        )
    ]


def _comparison(comparison: Comparison | None) -> list[Section]:
    """Return what changed from an earlier plan, and why."""
    if comparison is None:
        return []
    lines = [f"before: {comparison.before}", f"now:    {comparison.now}"]
    lines += [f"{change.field}: {change.before} -> {change.now}" for change in comparison.changes]
    if comparison.then_step_s is not None:
        lines.append(f"the earlier plan was predicted to take {format_seconds(comparison.then_step_s)} a step")
    return [Section("Beside the earlier plan", before=(*lines, *comparison.because))]


def money_sections(answer: Recommendation) -> list[Section]:
    """Return what was asked about money and failures; nothing where nothing was."""
    sections = []
    if answer.offers:
        sections.append(Section("By number of GPUs", ", for a billion tokens", table=size_table(answer.offers)))
    if answer.budget is not None:
        sections.append(_budget(answer.budget, answer.price_source, answer.goodput))
    if answer.bought is not None:
        sections.append(_bought(answer.bought, answer.price_source, answer.workload.model.parameters.total))
    if answer.goodput is not None:
        sections.append(_goodput(answer.goodput, step_s=answer.result.best.step.step_time_s))
    return sections


def size_table(offers: Sequence[SizeOffer], *, now: int | None = None) -> Table:
    """Return the best plan by number of GPUs and what a billion tokens cost; the row of `now` GPUs is marked."""
    has_price = any(offer.cost_per_billion_tokens is not None for offer in offers)
    columns = [Column("GPUs", is_number=True), Column("plan")]
    columns += [Column(title, is_number=True) for title in ("step", "GPU-hours", "cost of 1e9 tokens")[: 2 + has_price]]
    rows = []
    for offer in offers:
        cost = offer.cost_per_billion_tokens
        cells = (str(offer.num_gpus), offer.plan, format_seconds(offer.step_time_s))
        hours = f"{offer.gpu_hours_per_billion_tokens:,.1f}"
        price = ("" if cost is None else f"{cost:,.2f}",) if has_price else ()
        rows.append(Row((*cells, hours, *price), is_chosen=offer.num_gpus == now))
    return Table(tuple(columns), tuple(rows), "Best plan by number of GPUs, for a billion tokens")


def _budget(budget: Budget, source: str | None, goodput: GoodputEstimate | None) -> Section:
    days = budget.seconds / 86_400
    length = f"{days:,.1f} days" if days >= 2 else format_seconds(budget.seconds)
    length += f", {format_run(budget.seconds)}" * (days >= DAYS_OF_A_YEAR)
    whose = source or "in the currency of --price"
    cost = "" if budget.cost is None else f", cost of the run {_rounded(budget.cost)} ({whose})"
    failing: tuple[str, ...] = ()
    if goodput is not None:
        more = "" if budget.cost is None else f", cost of the run {_rounded(budget.cost / goodput.goodput)}"
        failing = (f"with failures: {format_days(days / goodput.goodput)}{more}",)
    return Section(
        f"{format_count(budget.tokens)} tokens",
        f": {budget.steps:,.0f} steps, {length}, {_rounded(budget.gpu_hours)} GPU-hours{cost}; steps alone, without "
        "starts, checkpoints and failures",
        after=failing,
    )


def _bought(bought: Bought, source: str | None, parameters: int) -> Section:
    """Return what an amount of money trains on, beside what was asked for or is compute-optimal."""
    wanted, cost = format_count(bought.wanted_tokens), _rounded(bought.wanted_cost)
    words = f"the {wanted} tokens asked for cost {cost}"
    if bought.is_compute_optimal:
        words = (
            f"pretraining is compute-optimal on {wanted} tokens (20 a parameter, arXiv 2203.15556), which cost {cost}"
        )
    also = "" if bought.goodput == 1 else f"; failures leave {bought.goodput:.1%} of the time"
    return Section(
        f"What {_rounded(bought.money)} buy",
        f": {_rounded(bought.gpu_hours)} GPU-hours at {bought.price_per_gpu_hour:.3g} ({source or '--price'}): "
        f"{format_count(bought.tokens)} tokens in {format_days(bought.seconds / 86_400)}, "
        f"{format_digits(bought.tokens / parameters)} tokens a parameter",
        after=(f"{words}{also}",),
    )


def _goodput(goodput: GoodputEstimate, *, step_s: float) -> Section:
    costs, steps = goodput.costs, max(1, round(goodput.interval_s / step_s))
    source = "measured" if costs.is_measured else "assumed"
    return Section(
        f"Expected goodput {goodput.goodput:.1%}",
        f" with a failure every {format_seconds(goodput.mtbf_s)} and a checkpoint every {steps:,} steps "
        f"({format_seconds(goodput.interval_s)})",
        after=(
            f"checkpoints take {goodput.checkpoints:.1%}, steps done again {goodput.lost:.1%}, restarts "
            f"{goodput.restarts:.1%} ({source}: {format_seconds(costs.save_s)} a checkpoint, "
            f"{format_seconds(costs.load_s)} to load it, {format_seconds(costs.restart_s)} a restart)",
        ),
    )


def _rounded(number: float) -> str:
    """Return a number with the three digits that a prediction has: `34,800`."""
    return f"{float(f'{number:.3g}'):,g}"


def _signed(value: float, in_words: Callable[[float], str]) -> str:
    return f"{'+' if value >= 0 else '-'}{in_words(abs(value))}"
