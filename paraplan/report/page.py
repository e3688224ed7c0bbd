"""A report as one HTML file: the pieces that its sections are made of. No script, and nothing from elsewhere."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from html import escape

from paraplan import __version__
from paraplan.report.sections import Column, Row, Section, Table

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A browser that honours it loads nothing, whatever a name or a path in the report may hold."""


_MANY_COLUMNS = 5
"""A table of so many is one card a row on a phone, where it would be cut off."""


def page(*, title: str, head: str, sections: Sequence[str]) -> str:
    """Return a whole document; `head` stands above the sections, all of them HTML."""
    style = importlib.resources.files("paraplan.report").joinpath("page.css").read_text()
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta name="generator" content="paraplan {__version__}">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            f"<header>\n{head}\n</header>",
            "<main>",
            *(section for section in sections if section),
            "</main>",
            f"<footer><p>paraplan {__version__}. Every time and size here is predicted, not measured. "
            "How far to trust them: <code>paraplan explain cost-model</code>, <code>paraplan explain memory</code>."
            "</p></footer>",
            "</body>",
            "</html>",
            "",
        ]
    )


def section(title: str, *parts: str) -> str:
    """Return a section with a heading of the second order; `parts` are HTML, empty ones are left out."""
    return "\n".join(["<section>", f"<h2>{escape(title)}</h2>", *(part for part in parts if part), "</section>"])


def paragraph(text: str, *, style: str = "") -> str:
    """Return a paragraph of plain text."""
    return f"<p{f' class={style!r}' if style else ''}>{escape(text)}</p>"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the figures that are read first, each with its name."""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{rows}</dl>'


def sections_html(sections: Sequence[Section]) -> list[str]:
    """Return sections that the terminal has too."""
    return [_section_html(each) for each in sections]


def _section_html(each: Section) -> str:
    about = each.about.lstrip(" ,:")
    items = "".join(
        f"<li>{escape(one.question)} <strong>{escape(one.outcome)}</strong>"
        f'<br><span class="soft">{escape(one.because)}</span></li>'
        for one in each.decisions
    )
    return section(
        each.title,
        paragraph(f"{about[0].upper()}{about[1:]}.") if about else "",
        f'<ol class="path">{items}</ol>' if items else "",
        *map(paragraph, each.before),
        table_html(each.table) if each.table is not None else "",
        *map(paragraph, each.after),
    )


def table_html(shown: Table) -> str:
    """Return a table of a section."""
    return table(shown.columns, shown.rows, caption=shown.caption)


def table(columns: Sequence[Column], rows: Sequence[Row], *, caption: str) -> str:
    """Return a table that scrolls by itself where a page is narrow; its first column heads the rows."""
    head = "".join(f"<th scope='col'{_number(column)}>{escape(column.title)}</th>" for column in columns)
    body = "".join(_row(columns, row) for row in rows)
    kind = ' class="cards"' if len(columns) >= _MANY_COLUMNS else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{kind}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def figure(*, wide: str, narrow: str, caption: str, below: str = "") -> str:
    """Return a chart in two widths, of which a page shows the one that suits it. `below` is HTML."""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>{words}{below}</figure>'


def details(summary: str, *parts: str) -> str:
    """Return parts that are folded away."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def code(text: str) -> str:
    """Return lines to copy."""
    return f'<pre class="scroll" tabindex="0"><code>{escape(text)}</code></pre>'


def _number(column: Column) -> str:
    return " class='number'" if column.is_number else ""


def _kind(column: Column) -> str:
    return _number(column) or " class='words'"


def _row(columns: Sequence[Column], row: Row) -> str:
    first, *rest = row.cells
    anchor = f' id="{row.anchor}"' if row.anchor else ""
    chosen = ' class="chosen"' if row.is_chosen else ""
    cells = "".join(
        f'<td{_kind(column)} data-title="{escape(column.title)}">{_cell(text)}</td>'
        for column, text in zip(columns[1:], rest, strict=True)
    )
    head = f"<th scope='row'{_kind(columns[0])}>{escape(first)}</th>"
    return f"<tr{anchor}{chosen}>{head}{cells}</tr>"


def _cell(text: str) -> str:
    first, _, second = text.partition("\n")
    return escape(first) + (f'<br><span class="soft">{escape(second)}</span>' if second else "")
