"""The lines of a pasted link matrix: headers and rows, freed of whatever the way from the terminal added to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from paraplan.hardware.readers.link_words import CELL

MAX_LINE_CHARACTERS = 4096
"""Longer lines belong to no table; 64 devices take about 600 characters."""

MAX_LINES = 20_000

MAX_DEVICES = 512
"""Rows of a table beyond this number are ignored; 16 GPUs and 24 NICs are many."""

MAX_PREFIX = 64
"""A log may put a time and a name before each line."""

DEVICE = r"(?:GPU|NPU|DCU|MLU|XPU|PPU)[ _]?\d{1,3}"
_NIC = r"[A-Za-z][A-Za-z0-9_.\-]{0,30}\d"
_AFFINITY = re.compile(
    r"(?P<memory_numa>GPU\s+NU?M?A?\b(?:\s+ID?)?)"
    r"|(?P<cpu>CPU(?:\s+Aff?i?(?:\s*n?i?t?y?)?)?)"
    r"|(?P<numa>(?:NUMA|Node)(?:\s+Aff?i?(?:\s*n?i?t?y?)?)?)"
)
_HEADER_TOKEN = re.compile(rf"\s*({DEVICE}(?=\D|$)|NIC\d{{1,3}}|{_NIC}(?![\w.\-])|mlx\d_(?:[a-z]+_?)*\d+|\S+)")
_ESCAPES = re.compile(
    r"(?:\x1b|\^\[)(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07)"  # terminal control sequences, also in caret notation
    r"|\[[0-9;]{0,8}m(?=\S|$)"  # the same after a paste that lost the escape character
)
_TAGS = re.compile(r"</?(?:pre|code|br|p|div|span|b|samp)\b[^>]*>")
_MARKS = re.compile(r"^(?:\s*(?:#+|//+|;+|>+|%+|\*+(?!\w)|--+|\"+|!+|\|))+")
_ROW = re.compile(
    rf"^.{{0,{MAX_PREFIX}}}?(?<![\w-])(?P<label>{DEVICE}|NIC\d{{1,3}})\s*(?=(?:{CELL.pattern})(?![a-z]|UID))"
)
_NAMED_ROW = re.compile(rf"^\s*(?P<label>[A-Za-z][A-Za-z0-9_.\-]{{1,30}})\s+(?=(?:{CELL.pattern})(?:\s|$))")
_BARE_ROW = re.compile(rf"^\s*(?P<label>{DEVICE}|NIC\d{{1,3}})\s*(?:[A-Z]{{1,3}})?\s*$")
_WORD_PIECE = re.compile(rf"(?:{CELL.pattern}|N/A|[0-9,\-]+|V\d+|ODE|DE|IX|XB|HB|YS|OC|A)")
_LEGEND = re.compile(r"^\s*(?:NIC )?Legend\b|^\s*[-*\s]{0,8}[A-Z#\d]{1,5}\s+=\s", re.IGNORECASE)
_LABEL_PIECES = ("GPU", "NIC", "CPU", "NPU", "mlx", "GPU NUMA", "NUMA")


@dataclass(frozen=True)
class TableRow:
    """A device and the words of its row. `tail` is what follows the last word, from character `tail_start` on.

    `cell_starts` are the characters at which the words stand. `is_cut` is True where the row ends with a word and
    nothing behind it, so that the word may have lost its end.
    """

    label: str
    cells: tuple[str, ...]
    cell_starts: tuple[int, ...]
    tail: str
    tail_start: int
    is_cut: bool


@dataclass(frozen=True)
class TableHeader:
    """The devices of a header line and its affinity columns (`cpu`, `numa`, `memory_numa`), with their characters.

    `is_cut` is True where the name of the last column is not whole.
    """

    labels: tuple[str, ...] = ()
    label_starts: tuple[int, ...] = ()
    affinity: tuple[tuple[str, int], ...] = ()
    is_cut: bool = False


@dataclass
class TableLines:
    """A header, if there was one, and the rows below it. `before` is the line above: it may name the command."""

    header: TableHeader | None = None
    rows: list[TableRow] = field(default_factory=list)
    before: str = ""


def clean_lines(text: str) -> list[str]:
    """Return the lines of a text without terminal codes, tags, Markdown bars, quotation and comment marks."""
    text = text[: MAX_LINES * 200].replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ")
    text = text.replace("\u2013", "-").replace("\u200b", "").replace("\ufeff", "")
    lines = []
    for line in text.split("\n")[:MAX_LINES]:
        line = _TAGS.sub("", _ESCAPES.sub("", line[:MAX_LINE_CHARACTERS])).replace("**", "").replace("`", "")
        line = _MARKS.sub("", line.rstrip("\n")) if not line[:1].isalnum() else line
        if line.count("|") >= 1:
            line = line.strip().strip("|").replace("|", "\t")
        lines.append("".join(character for character in line if character >= " " or character == "\t"))
    return lines


def find_tables(lines: list[str]) -> list[TableLines]:
    """Return the link matrices in cleaned lines, in order; a header or a repeated label opens the next one."""
    tables: list[TableLines] = []
    current = TableLines()
    labels: set[str] = set()
    previous = ""
    for line in _joined(lines):
        header = read_header(line)
        if header and current.rows and len(header.labels) == 1 and not header.affinity:
            header = None  # a row of which only the label is left
        row = None if header else read_row(line, named=_names(current))
        if row is None and header is None and (current.header or current.rows):
            row = _read_bare_row(line)
        if header or (row and row.label in labels):
            tables.append(current)
            current, labels = TableLines(header=header, before=previous), set()
        if row and len(labels) < MAX_DEVICES:
            current.rows.append(row)
            labels.add(row.label)
        previous = line if line.strip() else previous
    tables.append(current)
    return [table for table in tables if table.rows or table.header]


def normal_label(text: str) -> str:
    """Return a label of a GPU or a numbered NIC as `GPU7`, whether it was written `GPU 07` or `GPU_7`; others as is."""
    found = re.fullmatch(r"([A-Z]{3})[ _]?(\d{1,3})", text)
    return f"{found[1]}{int(found[2])}" if found else text


def read_header(line: str) -> TableHeader | None:
    """Return the header that a line is, None for any other line.

    A header starts with a GPU label and holds nothing but labels and the names of affinity columns; labels may touch.
    """
    first = re.search(rf"(?<![\w-]){DEVICE}", line)
    if first is None or first.start() > MAX_PREFIX or any(mark in line[first.start() :] for mark in ":=(){}$"):
        return None
    affinity = tuple(
        (match.lastgroup, match.start())
        for match in _AFFINITY.finditer(line)
        if match.lastgroup and match.start() >= first.start()
    )
    end = affinity[0][1] if affinity else len(line)
    part = line[first.start() : end]
    labels: dict[str, int] = {}
    is_cut = bool(affinity) and re.search(r"(?:Affi\s*nity|\bID)\s*$", line) is None
    position = 0
    while found := _HEADER_TOKEN.match(part, position):
        word = normal_label(found[1])
        position = found.end()
        if any(piece.startswith(word) for piece in _LABEL_PIECES):
            is_cut = True
            continue
        if CELL.fullmatch(word) or not re.fullmatch(_NIC, word):
            return None
        labels.setdefault(word, first.start() + found.start(1))
    names = tuple(labels)[:MAX_DEVICES]
    return TableHeader(names, tuple(labels.values())[:MAX_DEVICES], affinity, is_cut)


def read_row(line: str, *, named: frozenset[str] = frozenset()) -> TableRow | None:
    """Return the row that a line is, None for any other line. `named` are labels known from the header."""
    found = _ROW.match(line) or _NAMED_ROW.match(line)
    if found is None or _LEGEND.match(line):
        return None
    label = normal_label(found["label"])
    row = _read_cells(line, label, found.end())
    if re.fullmatch(rf"{DEVICE}|NIC\d+", label) or label in named:
        return row
    # Prose may put a known word behind any other; a row of a named NIC has its diagonal or a digit in its name.
    looks_like_nic = re.fullmatch(_NIC, label) is not None and CELL.fullmatch(label) is None
    return row if looks_like_nic else None


def _read_cells(line: str, label: str, position: int) -> TableRow:
    cells: list[str] = []
    starts: list[int] = []
    separated = re.compile(rf"\s*({CELL.pattern})")
    while found := separated.match(line, position):
        cells.append("X" if found[1] == "x" else found[1])
        starts.append(found.start(1))
        position = found.end()
    tail = line[position:]
    return TableRow(label, tuple(cells), tuple(starts), tail, position, is_cut=not tail)


def _read_bare_row(line: str) -> TableRow | None:
    found = _BARE_ROW.match(line)
    if found is None:
        return None
    return TableRow(normal_label(found["label"]), (), (), "", len(line), is_cut=True)


def _names(table: TableLines) -> frozenset[str]:
    return frozenset(table.header.labels) if table.header else frozenset()


def _joined(lines: list[str]) -> Iterator[str]:
    """Yield the lines, with those put together again that a narrow terminal had wrapped.

    The halves are joined without a blank: a terminal breaks words anywhere, and words that touch are told apart later.
    """
    pending: str | None = None
    is_header = False
    for line in lines:
        if pending is not None:
            if _continues(line, is_header=is_header):
                pending += line
                continue
            yield pending
            pending = None
        is_header = read_header(line) is not None
        if is_header or read_row(line) is not None:
            pending = line
        else:
            yield line
    if pending is not None:
        yield pending


def _continues(line: str, *, is_header: bool) -> bool:
    """Tell whether a line is the second half of the header or of the row above it."""
    words = line.split()
    if not words or _LEGEND.match(line) or read_row(line) or _read_bare_row(line):
        return False
    if not is_header:
        return all(_WORD_PIECE.sub("", word) == "" for word in words)
    if read_header(line) and words[0] in ("GPU0", "GPU"):
        return False
    names = [re.fullmatch(rf"{DEVICE}|{_NIC}", word) or word in ("Affinity", "ID", "nity", "NUMA") for word in words]
    return (
        any(names)
        and all(re.fullmatch(r"[\w.\-]{1,30}", word) for word in words)
        and sum(map(bool, names)) * 2 >= len(words)
    )
