"""`paraplan recommend --html`: the answer, why it is the answer, and what else there is, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from paraplan.cost.loading import loading_of
from paraplan.cost.workload import Workload
from paraplan.report.chart_svg import HALF, NARROW, WIDE, ChartRenderer
from paraplan.report.charts import cost_chart, plans_chart, throughput_chart
from paraplan.report.page import (
    code,
    details,
    facts,
    figure,
    page,
    paragraph,
    section,
    sections_html,
    table,
    table_html,
)
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
from paraplan.report.ranked_rows import table_rows, words_of
from paraplan.report.sections import Column, Row, answer_sections, size_table, tree_sections
from paraplan.search.failure import NothingFitsError
from paraplan.search.offers import LeverOffer, offers_beside
from paraplan.search.recommendation import Recommendation
from paraplan.search.results import Candidate, Decision, SearchResult
from paraplan.search.sizes import SizeOffer
from paraplan.units import format_bytes, format_count, format_seconds, gpus

_MOST_ROWS = 12


def recommendation_page(answer: Recommendation, *, sizes: Sequence[SizeOffer], commands: Mapping[str, str]) -> str:
    """Return the page of a recommendation. `sizes` are the best plans on other numbers of GPUs.

    Raises `UsageError` where the charting library is not installed.
    """
    renderer = ChartRenderer()
    result, workload = answer.result, answer.workload
    best = result.best
    return page(
        title=f"{workload.model.name} on {gpus(workload.cluster.num_gpus)}: {best.plan.describe()}",
        head=_head(answer),
        sections=[
            *sections_html(tree_sections(result.decisions)),
            _plans(result, renderer),
            memory_section(workload, best, renderer),
            step_section(best),
            timeline_section(workload, best, renderer),
            ranks_section(workload, best, answer.placement),
            _sizes(workload, sizes, renderer, with_table=not answer.offers),
            _levers(answer.levers, workload.framework.told_as),
            *sections_html(answer_sections(answer)),
            _commands(commands),
        ],
    )


def nothing_fits_page(workload: Workload, error: NothingFitsError, decisions: Sequence[Decision]) -> str:
    """Return the page for a workload that no plan fits: what was lacking and what would help."""
    renderer = ChartRenderer()
    nearest = error.nearest
    needed, usable, where = nearest.peak_memory_bytes, nearest.usable_memory_bytes, ""
    if needed <= usable and nearest.fits:
        loading = loading_of(workload, nearest)
        needed, where = (needed if loading is None else loading.gpu_bytes), " while weights are loaded"
    elif needed <= usable:
        needed, usable, where = nearest.host_bytes_per_node, nearest.host_memory_bytes or 0, " on the host"
    head = [
        f"<h1>{escape(workload.model.name)}: no plan fits</h1>",
        *(paragraph(line, style="soft") for line in workload_lines(workload)),
        f'<p class="plan bad">Nearest: {escape(nearest.plan.describe())}</p>',
        facts(
            [
                (f"needed{where}", format_bytes(needed)),
                ("usable", format_bytes(usable)),
                ("too much", format_bytes(needed - usable)),
            ]
        ),
    ]
    return page(
        title=f"{workload.model.name} on {gpus(workload.cluster.num_gpus)}: no plan fits",
        head="\n".join(head),
        sections=[
            _levers(error.offers, workload.framework.told_as),
            *sections_html(tree_sections(decisions)),
            memory_section(workload, nearest, renderer),
        ],
    )


def _head(answer: Recommendation) -> str:
    result, workload = answer.result, answer.workload
    lines = [
        f"<h1>{escape(workload.model.name)} on {gpus(workload.cluster.num_gpus)}</h1>",
        *(paragraph(line, style="soft") for line in workload_lines(workload)),
    ]
    if answer.framework is not None:
        words = f"Predicted for {workload.framework.told_as}, which paraplan does not launch."
        lines.append(paragraph(words, style="bad"))
    if answer.found is not None:
        lines.append(paragraph(f"Found {answer.found}."))
    if answer.chosen is not None:
        lines.append(paragraph(f"{answer.chosen.in_words}."))
    if answer.idle is not None:
        lines.append(paragraph(f"The plan {answer.idle}."))
    if answer.mixed is not None:
        lines.append(paragraph(f"Several kinds of GPU: {answer.mixed}."))
    lines.append(f'<p class="plan">Recommended: <span class="good">{escape(result.best.plan.describe())}</span></p>')
    lines.append(paragraph(f"{plan_in_words(workload, result.best.plan)}."))
    if result.remark is not None:
        lines.append(paragraph(f"{result.remark[0].upper()}{result.remark[1:]}."))
    if result.plain_reason is not None:
        lines.append(paragraph(f"It is {result.plain_reason.in_words}."))
    lines += [plan_facts(workload, result.best), plan_remarks(workload, result.best)]
    return "\n".join(lines)


def _plans(result: SearchResult, renderer: ChartRenderer) -> str:
    """Return all plans by time and memory, the ranked ones as a table, and those that none beats."""
    ranked = table_rows(result.candidates[:_MOST_ROWS], result)
    anchors: dict[str, str] = {}
    for number, each in enumerate([*ranked, *result.front]):
        anchors.setdefault(each.plan.describe(), f"plan-{number}")
    links = {words: f"#{anchor}" for words, anchor in anchors.items()}
    cloud = [*result.cloud, *result.candidates]
    parts = []
    if result.front:
        spec = plans_chart(result.best, cloud=cloud, front=result.front, linked=links)
        label = "Plans by step time and peak memory; those that no plan beats in both lead to their row in a table"
        wide, narrow = (renderer.render(spec, label=label, width=width) for width in (WIDE, NARROW))
        caption = (
            f"{result.plans_considered:,} plans considered, {result.plans_priced:,} priced by memory and "
            f"{result.times_priced:,} by time: the others cannot be among the best. "
            "Only the fastest plan in each area of the chart is drawn."
        )
        parts.append(figure(wide=wide, narrow=narrow, caption=caption, below=_reading(result, links)))
    parts.append(
        _plan_table(
            ranked,
            result,
            anchors,
            "Best plan of each choice of axes and ZeRO stage (* = suggested by Hugging Face's guide)",
        )
    )
    if result.front:
        fronted = _plan_table(result.front, result, anchors, "No plan beats these in both time and memory")
        parts.append(details(f"The {len(result.front)} Pareto-optimal plans, as a table", fronted))
    return section("Plans", *parts)


def _reading(result: SearchResult, links: Mapping[str, str]) -> str:
    """Return the line under the chart that says which plan the pointer or the focus is on, by style sheet alone."""
    rules, words = [], []
    shown = {result.best.plan.describe(): (result.best.step.step_time_s, result.best.peak_memory_bytes)}
    shown |= {each.plan.describe(): (each.step_time_s, each.peak_memory_bytes) for each in result.front}
    for plan, (seconds, size) in shown.items():
        if plan not in links:
            continue
        name = links[plan].removeprefix("#")
        rules.append(f'figure:has(a[href="#{name}"]:is(:hover,:focus)) .of-{name}{{display:inline}}')
        words.append(f'<span class="of-{name}">{escape(plan)}: {format_seconds(seconds)}, {format_bytes(size)}</span>')
    hint = "Point at a plan, or step from one to the next with the Tab key; Enter leads to its row."
    return f"<style>{''.join(rules)}</style><p class='reading' aria-hidden='true'>{hint}<br>{''.join(words)}</p>"


def _plan_table(plans: Sequence[Candidate], result: SearchResult, anchors: dict[str, str], caption: str) -> str:
    columns = [
        Column("plan"),
        Column("step", is_number=True),
        Column("vs. recommended", is_number=True),
        Column("tokens/s per GPU", is_number=True),
        Column("MFU", is_number=True),
        Column("memory", is_number=True),
    ]
    rows = []
    for each in plans:
        words = words_of(each)
        is_chosen = each.plan == result.best.plan
        difference = each.step_time_s / result.best.step.step_time_s - 1
        rows.append(
            Row(
                (
                    f"{words} *" if each.in_tree else words,
                    format_seconds(each.step_time_s),
                    "recommended" if is_chosen else f"{difference:+.1%}",
                    format_count(each.tokens_per_s_per_gpu),
                    f"{each.mfu:.1%}",
                    format_bytes(each.peak_memory_bytes) + ("" if each.fits else " (does not fit)"),
                ),
                anchor=anchors.pop(each.plan.describe(), None),
                is_chosen=is_chosen,
            )
        )
    return table(columns, rows, caption=caption)


def _sizes(workload: Workload, sizes: Sequence[SizeOffer], renderer: ChartRenderer, *, with_table: bool) -> str:
    if len(sizes) < 2:
        return ""
    has_price = sizes[0].cost_per_billion_tokens is not None
    now, tokens = workload.cluster.num_gpus, workload.training.tokens_per_step
    charts = (
        (throughput_chart(sizes, tokens_per_step=tokens, now=now), "Tokens per second by number of GPUs"),
        (cost_chart(sizes, has_price=has_price), "Cost of a billion tokens by number of GPUs"),
    )
    figures = [
        figure(
            wide=renderer.render(spec, label=label, width=HALF),
            narrow=renderer.render(spec, label=label, width=NARROW),
            caption="",
        )
        for spec, label in charts
    ]
    sentence = (
        f"The best plan on each number of GPUs for the same batch of {workload.training.global_batch_size} sequences: "
        "with more GPUs each has less of it. Sizes on which nothing fits are left out."
    )
    return section(
        "Scaling",
        paragraph(sentence),
        f'<div class="pair">{"".join(figures)}</div>',
        table_html(size_table(sizes, now=now)) if with_table else "",
    )


def _levers(offers: Sequence[LeverOffer], framework: str) -> str:
    """Return what levers and machines make of a workload that is short of memory, in their order."""
    if not offers:
        return ""
    priced = [one for one in offers if one.lacking is None]
    finds = any(one.found for one in priced)
    rows = [
        Row(
            (
                one.options if one.keeps_training else f"* {one.options}",
                *([one.found or ""] if finds else []),
                format_bytes(one.peak_memory_bytes or 0) if one.fits else f"{_needs(one)}: too large",
                one.step_in_words if one.fits else "",
                one.plan or "",
            )
        )
        for one in priced
    ]
    columns = [
        Column("change"),
        *([Column("finds")] if finds else []),
        Column("memory", is_number=True),
        Column("step", is_number=True),
        Column("plan"),
    ]
    caption = "Cheapest first; * trains other parameters, with other arithmetic, or on other data"
    lacking = [words for words in offers_beside(offers, framework=framework) if words.startswith("not in ")]
    return section(
        "What makes it fit" if not finds else "What finds more",
        table(columns, rows, caption=caption) if rows else "",
        *(paragraph(f"{words}.") for words in lacking),
    )


def _needs(one: LeverOffer) -> str:
    peak, usable = one.peak_memory_bytes or 0, one.usable_memory_bytes or 0
    return format_bytes(peak if peak > usable else one.host_bytes_per_node or 0)


def _commands(commands: Mapping[str, str]) -> str:
    if not commands:
        return ""
    lines = [
        details(name, code(text)) if name != next(iter(commands)) else code(text) for name, text in commands.items()
    ]
    return section("Run it", paragraph("With the plan file that -o plan.json writes:"), *lines)
