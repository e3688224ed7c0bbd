"""How errors of runs of one source go together: `profiles/shared_errors.json`, and what knowing runs of it is worth.

All rows that `scripts/trust_table.py` scores, known and unseen sources, four rows of a source or more. The spreads are
the most likely ones; nothing is chosen by hand. `scripts/pages.py` writes them, and the table of `docs/accuracy.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from marked import TextOf, between
from trust_table import KNOWN, LATER, PAGE, RUNS, first_ratios, poor_rows, validated

from paraplan.accuracy.ranges import Errors, Ratio, errors_by_evidence
from paraplan.accuracy.run_prediction import RunPrediction
from paraplan.accuracy.shared_errors import (
    FEWEST_ROWS,
    LeftOut,
    SharedErrorsFile,
    SourceErrors,
    fit_shared_errors,
    left_out,
)
from paraplan.cost.correction import SharedErrors

SPREADS = RUNS.parent / "shared_errors.json"
START, END = "<!-- history -->\n", "<!-- /history -->"
BAD = 0.15
"""Mean error from which on a source begins badly."""
MOST_KNOWN = 3
Range = tuple[float, float]


def times_by_source() -> list[SourceErrors]:
    """Return the errors of step times of each source: of later ones those of the first predictions of it."""
    known, poor = validated(KNOWN).scored.rows, poor_rows(LATER)
    later = [row for _, row in validated(LATER, everything=True).rows if row.id not in poor]
    rows = [row for row in (*(row for _, row in known), *later) if row.step_time_error is not None and row.plain]
    first = first_ratios(rows)
    ranges = {
        source: errors_by_evidence(each for each in first.values() if each[1][0] != source)
        for source in {row.source for row in rows}
    }

    def facts(row: RunPrediction) -> tuple[float, Range]:
        kind, (_, ratio) = first.get(row.id, ("measured", (row.source, 1 / (1 + (row.step_time_error or 0.0)))))
        return math.log(ratio), ranges[row.source][kind].range

    return by_source([(row, *facts(row)) for row in rows])


def peaks_by_source() -> list[SourceErrors]:
    """Return the errors of the peaks that allocators reported."""
    tables = (*validated(KNOWN).rows, *validated(LATER, everything=True).rows)
    rows = [row for _, row in tables if row.memory_error is not None and row.plain is not None]
    rows = [row for row in rows if row.memory_reading in ("max_allocated", "max_reserved")]
    ratios: list[Ratio] = [(row.source, 1 / (1 + (row.memory_error or 0.0))) for row in rows]
    ranges = {
        source: Errors.of([each for each in ratios if each[0] != source]).range
        for source in {row.source for row in rows}
    }
    return by_source([(row, math.log(ratio), ranges[row.source]) for row, (_, ratio) in zip(rows, ratios, strict=True)])


def by_source(facts: Sequence[tuple[RunPrediction, float, Range]]) -> list[SourceErrors]:
    """Return the logarithms of measured / predicted of rows and their ranges by source, of those with four or more."""
    groups: dict[str, list[tuple[RunPrediction, float, Range]]] = {}
    for fact in facts:
        groups.setdefault(fact[0].source, []).append(fact)
    return [
        SourceErrors(
            source=source,
            kinds=tuple(row.plain.kind for row, _, _ in each if row.plain is not None),
            sizes=tuple(row.plain.sizes for row, _, _ in each if row.plain is not None),
            logs=tuple(log for _, log, _ in each),
            ranges=tuple(ends for _, _, ends in each),
        )
        for source, each in sorted(groups.items())
        if len(each) >= FEWEST_ROWS
    ]


def table(title: str, sources: Sequence[SourceErrors], shared: SharedErrors) -> list[str]:
    """Return the rows of the table for one quantity: all sources, and those that begin badly."""
    bad = [source for source in sources if fmean(abs(math.expm1(-log)) for log in source.logs) >= BAD]
    return [
        _line(
            f"{title}, {len(chosen)} sources{what}",
            [left_out(chosen, shared, known=known) for known in range(MOST_KNOWN + 1)],
        )
        for what, chosen in (("", sources), (f" that begin {BAD:.0%} off or more", bad))
        if chosen
    ]


def _line(title: str, found: Sequence[LeftOut]) -> str:
    cells = [f"{each.error:.1%} ({each.coverage:.0%} in x{each.width:.2f})" for each in found]
    return f"| {title} | {' | '.join(cells)} |"


def pages(text_of: TextOf) -> dict[Path, str]:
    """Return the page and the spreads of today; `text_of` reads what they were."""
    times, peaks = times_by_source(), peaks_by_source()
    found = SharedErrorsFile(
        step_time=fit_shared_errors(times),
        memory=fit_shared_errors(peaks),
        source="measured tables in profiles/runs, by scripts/shared_errors.py",
    )
    lines = [
        "",
        "| known rows of a source | 0 | 1 | 2 | 3 |",
        "| --- | --: | --: | --: | --: |",
        *table("step time", times, found.step_time),
        *table("peak memory", peaks, found.memory),
        "",
        *(_spread(title, shared) for title, shared in (("step times", found.step_time), ("peaks", found.memory))),
        "",
    ]
    return {
        PAGE: between(text_of(PAGE), START, END, "\n".join(lines) + "\n"),
        SPREADS: found.to_json() + "\n",
    }


def _spread(title: str, shared: SharedErrors) -> str:
    return (
        f"Of {title}: s = {shared.log_sd:g}, L = {shared.doublings:g} doublings, e = {shared.own_log_sd:g}, "
        f"n0 = {shared.prior_runs:g} runs.\n"
    )
