"""A recommendation as text for a terminal: the tree's decisions, the ranked plans, what was ruled out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paraplan.cli.estimate_tables import lines_table, print_estimate, print_lines
from paraplan.cli.section_tables import print_sections
from paraplan.cli.terminal import command_in_lines, make_console
from paraplan.report.notes import note_lines
from paraplan.report.ranked_rows import table_rows, words_of
from paraplan.report.sections import answer_sections, money_sections, tree_sections
from paraplan.report.short_text import Line, lever_lines
from paraplan.units import format_bandwidth, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from paraplan.api.recommendations import Recommendation
    from paraplan.search.results import Candidate

_EQUAL = 1.02


MOST_LINES = 22
"""Lines of the short answer."""
_ROWS = 5
"""Plans of its table, where there is room for them; all of `--top` with -v."""
_LEFT_OUT = ("Samples", "Loading", "", "Offload", "Lever", "Faster", "Roomier", "Mixed")
"""Labels of lines that the short answer leaves to -v where it would be too long, in this order; "" is what goes on. The
first lever stays, or the first change that is faster where there is none."""
_LEFT_OUT_LAST = ("Faster", "Lever", "Why", "Why not")
"""Labels of lines that go where that is not enough, all of them: what decided against a simpler plan goes last."""


def print_answer(
    answer: Recommendation, *, plan_path: Path | None, seconds: float, verbose: bool, shown_rows: int | None
) -> None:
    """Print the answer and the first plans in at most `MOST_LINES`; `verbose` adds the tree, all plans and all parts.

    `shown_rows` is how many plans were asked for, None for as many as there is room for. Cautions are always printed.
    """
    console = make_console()
    beside = answer.answer
    before = []
    if beside.framework is not None:
        before = [Text(f"Predicted for {beside.workload.framework.told_as}, which paraplan does not launch.", "yellow")]
    notes = note_lines(answer.workload)
    end = _end(answer, plan_path, seconds, verbose=verbose)
    console.print(*before, end="\n" * len(before))
    if verbose:
        print_lines(console, [*answer.lines, *notes, *lever_lines(beside), *_details(answer)])
        print_sections(console, tree_sections(answer.result.decisions))
        _print_plans(console, answer, None)
    else:
        with console.capture() as money:
            print_sections(console, money_sections(beside))
        room = MOST_LINES - (money.get() + end).count("\n") - 1 - _height(console, *before)
        _print_short(console, answer, [*answer.lines, *notes], room, shown_rows)
    if answer.result.front:
        count = len(answer.result.front)
        console.print(
            f"\n[bold]{count} Pareto-optimal plans[/bold]: none is better in both time and memory", markup=True
        )
        console.print(_plans(answer.result.front, answer))
    print_sections(console, answer_sections(beside, verbose=verbose))
    if verbose:
        print_estimate(answer.best, with_details=True)
    typer.echo(end)


def _print_short(
    console: Console, answer: Recommendation, lines: list[Line], room: int, shown_rows: int | None
) -> None:
    """Print lines and the first plans in `room` lines: fewer plans, and what tells least is left out."""
    result = answer.result
    short = result.best.plan.describe()
    lines = [line for line in lines if line.text != short]  # a row of the table
    plans = [one for one in without_equals(result.candidates, result.best.plan) if one.fits]
    rows = [
        tuple(one for one in table_rows(plans[:most], result) if one.fits)
        for most in ([shown_rows] if shown_rows else range(_ROWS, -1, -1))
    ]
    tables = [_short_plans(each, answer) for each in rows]
    stays = "Lever" if any(line.label == "Lever" for line in lines) else "Faster"
    first = next((line for line in lines if line.label == stays), None)
    with_fastest = tables[-2:][0]
    for labels, kept, least in ((_LEFT_OUT, first, with_fastest), (_LEFT_OUT_LAST, None, tables[-1])):
        for label in labels:
            if _height(console, lines_table(lines), least) < room:
                break
            lines = [line for line in lines if line.label != label or line.tone in ("bad", "caution") or line is kept]
    print_lines(console, lines)
    place = next((at for at, each in enumerate(tables) if _height(console, lines_table(lines), each) < room), -1)
    console.print()
    console.print(tables[place])
    if any(answer.is_lower_bound(one.plan) for one in rows[place]):
        console.print("   [dim]+ at least so long: see the caution[/dim]", markup=True)


def _height(console: Console, *drawn: Any) -> int:
    return sum(len(console.render_lines(each, pad=False)) for each in drawn)


def _details(answer: Recommendation) -> list[Line]:
    """Return what the words of a plan leave out: stages, order of ranks, GPUs."""
    plan, placement = answer.best.plan, answer.answer.placement
    lines = []
    if plan.stage_blocks is not None:
        lines.append(Line("Stages", f"blocks of each: {'-'.join(map(str, plan.stage_blocks))}", "dim"))
    if plan.world_size > 1 and placement.slowest_bytes_per_s:
        order = [axis for axis in plan.rank_order if getattr(plan, axis) > 1]
        slowest = ", ".join(f"{axis} {format_bandwidth(rate)}" for axis, rate in placement.slowest_bytes_per_s.items())
        lines.append(Line("Ranks", f"outermost axis first: {', '.join(order)}; slowest link of each: {slowest}", "dim"))
        if placement.local_gpus != tuple(range(len(placement.local_gpus))):
            visible = ",".join(map(str, placement.local_gpus))
            lines.append(Line("GPUs", f"by local rank: {visible} (CUDA_VISIBLE_DEVICES)", "dim"))
    return lines


def _print_plans(console: Console, answer: Recommendation, most: int | None) -> None:
    result = answer.result
    marks = "> = recommended, * = suggested by Hugging Face's guide"
    console.print(f"\n[bold]Plans[/bold], {_order(answer)} first ({marks})", markup=True)
    shown = without_equals(result.candidates, result.best.plan)
    rows = table_rows(shown[:most], result)
    console.print(_plans(rows, answer))
    if any(answer.is_lower_bound(one.plan) for one in rows):
        console.print("   [dim]+ at least so long, at most so fast: see the caution[/dim]", markup=True)
    if most is None and (hidden := len(result.candidates) - len(shown)):
        plans = "similar plan" if hidden == 1 else "similar plans"
        console.print(f"   [dim]{hidden} {plans} with context parallelism not shown (--json)[/dim]", markup=True)


def _order(answer: Recommendation) -> str:
    return "least memory" if answer.result.objective == "memory" else "fastest"


def _end(answer: Recommendation, plan_path: Path | None, seconds: float, *, verbose: bool) -> str:
    """Return how much was searched, and the command that runs the plan, on a terminal in lines that a shell takes."""
    searched, words = f"\n{answer.result.plans_considered:,} plans in {seconds:.2f} s", answer.commands(plan_path)
    more = "." if verbose else "; -v shows more, the decision tree and all parts."
    framework = "TRL" if answer.workload.training.task != "sft" else answer.answer.framework
    use, how = ("run it", "launch") if framework is None else (f"export it for {framework}", "export")
    profile = answer.workload.framework
    if framework and profile.tool and profile.export_target not in profile.alias_targets:
        use = f"export what {profile.tool} passes on to {profile.title}"
    if not words:
        by_trl = answer.workload.training.learns_from.is_run_by_trl
        named = profile.task_tools or framework if by_trl else "what trains so"
        by_hand = f"paraplan writes no configuration of {named}: give it the values of the plan by hand."
        return f"{searched}{more}\n{by_hand}"
    way = f"Written to {plan_path}; to {use}:" if plan_path is not None else f"Write it with -o plan.json, then {use}:"
    return f"{searched}{more}\n{way}\n  {command_in_lines(words[how], sys.stdout)}"


def _short_plans(candidates: tuple[Candidate, ...], answer: Recommendation) -> Table:
    """Return plans by step time and memory: what a choice between them needs."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column(f"plans, {_order(answer)} first")
    for title in ("step", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    for candidate in candidates:
        chosen = candidate.plan == answer.result.best.plan
        table.add_row(
            ">" if chosen else "",
            words_of(candidate) + ("" if candidate.fits else ": too large"),
            format_seconds(candidate.step_time_s) + "+" * answer.is_lower_bound(candidate.plan),
            format_bytes(candidate.peak_memory_bytes),
            style="bold green" if chosen else "" if candidate.fits else "dim",
        )
    return table


def _plans(candidates: tuple[Candidate, ...], answer: Recommendation) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in ("", "plan", "step", "tok/s/GPU", "MFU", "memory"):
        is_text = title in ("", "plan")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text)
    for candidate in candidates:
        chosen = candidate.plan == answer.result.best.plan
        table.add_row(
            (">" if chosen else " ") + ("*" if candidate.in_tree else ""),
            words_of(candidate) + ("" if candidate.fits else ": too large"),
            format_seconds(candidate.step_time_s) + "+" * answer.is_lower_bound(candidate.plan),
            format_count(candidate.tokens_per_s_per_gpu),
            f"{candidate.mfu:.1%}",
            format_bytes(candidate.peak_memory_bytes),
            style="bold green" if chosen else "" if candidate.fits else "dim",
        )
    return table


def without_equals(candidates: tuple[Candidate, ...], chosen: object) -> tuple[Candidate, ...]:
    """Return candidates without those that are another one with cp for dp, and less than 2 % apart from it."""
    kept: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: one.plan.cp):
        is_equal = any(
            _without_cp(one.plan) == _without_cp(other.plan)
            and one.plan.cp > other.plan.cp
            and one.step_time_s > other.step_time_s / _EQUAL
            for other in kept
        )
        if not is_equal or one.plan == chosen:
            kept.append(one)
    return tuple(one for one in candidates if one in kept)


def _without_cp(plan: Any) -> tuple[object, ...]:
    of_data = {"dp": plan.dp * plan.cp, "cp": 1}
    return *(plan.degrees | of_data).items(), plan.zero_stage, plan.offload, plan.recompute
