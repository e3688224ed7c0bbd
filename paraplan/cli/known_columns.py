"""Tables of what is known: columns without any value are left out, many rows that are alike are one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TypeVar

from rich.table import Table
from rich.text import Text

MOST_ALIKE = 16
"""More equal rows in a line are shown as one: racks have 72 GPUs."""
UNKNOWN = "?"

_Item = TypeVar("_Item")
_Row = tuple[str | None, ...]


def known_columns(
    columns: dict[str, Callable[[_Item], str | None]], items: tuple[_Item, ...], *, unknown: str = UNKNOWN
) -> Table:
    """Return a table without the columns that have no value at all; many equal rows are one."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    known = {name: [cell(item) for item in items] for name, cell in columns.items()}
    known = {name: values for name, values in known.items() if any(value is not None for value in values)}
    rows = _without_repeats(list(zip(*known.values(), strict=True)))
    for name in known:
        table.add_column(name, overflow="fold", no_wrap=name not in ("name", "CPUs", "nearest GPUs"))
    for row in rows:
        table.add_row(*(Text(unknown if value is None else value) for value in row))
    return table


def _without_repeats(rows: list[_Row]) -> list[_Row]:
    """Return rows that begin with a number, more than 16 neighbors that differ in it alone as one: `0-71`."""
    shown: list[_Row] = []
    for _, group in groupby(rows, key=lambda row: row[1:]):
        members = list(group)
        if len(members) > MOST_ALIKE:
            shown.append((f"{members[0][0]}-{members[-1][0]}", *members[0][1:]))
        else:
            shown += members
    return shown
