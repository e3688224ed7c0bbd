"""Sections of an answer for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paraplan.report.sections import Section
from paraplan.report.sections import Table as SectionTable


def print_sections(console: Console, sections: Sequence[Section]) -> None:
    """Print sections that the page of `--html` has too, each under its title."""
    for section in sections:
        console.print()
        console.print(Text.assemble((section.title, "bold"), section.about))
        for decision in section.decisions:
            console.print(Padding(Text.assemble(decision.question, " ", (decision.outcome, "bold")), (0, 2)))
            console.print(Padding(Text(decision.because, style="dim"), (0, 4)))
        for line in section.before:
            console.print(Padding(line, (0, 2)))
        if section.table is not None:
            console.print(_drawn(section.table))
        for line in section.after:
            console.print(Padding(line, (0, 2)))


def _drawn(table: SectionTable) -> Table:
    drawn = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in table.columns:
        drawn.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=column.is_number)
    for row in table.rows:
        lines = [cell.partition("\n") for cell in row.cells]
        cells = [Text.assemble(first, end, (second, "dim")) for first, end, second in lines]
        drawn.add_row(*cells, style="bold" if row.is_chosen else "")
    return drawn
