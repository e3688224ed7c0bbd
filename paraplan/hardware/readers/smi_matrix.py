"""From the rows of a pasted link matrix to one word for each pair of devices.

A matrix says everything twice: cell (a, b) repeats (b, a), and the diagonal shows which column a row has reached. That
is what damaged tables are put right with, in place of rules for each kind of damage.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum

from paraplan.hardware.readers.link_words import SELF_WORDS, parse_link_word
from paraplan.hardware.readers.smi_lines import DEVICE, TableLines, TableRow

_GPU_LABEL = re.compile(rf"(?:{DEVICE})")


class _Trust(IntEnum):
    """How much a cell is worth: one at a cut may have lost its end, one of a short row may stand a column off."""

    AT_A_CUT = 0
    OF_A_SHORT_ROW = 1
    OF_A_WHOLE_ROW = 2


@dataclass
class LinkMatrix:
    """Labels of the columns (None where the table does not tell), and the word of each unordered pair of labels."""

    columns: list[str | None]
    words: dict[frozenset[str], str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def gpu_labels(self) -> list[str]:
        """Labels of the GPUs, by number."""
        labels = {label for label in self.columns if label and _GPU_LABEL.fullmatch(label)}
        return sorted(labels, key=gpu_number)

    @property
    def nic_labels(self) -> list[str]:
        """Labels of the NICs, in the order of the table."""
        return [label for label in self.columns if label and not _GPU_LABEL.fullmatch(label)]

    def word(self, first: str, second: str) -> str | None:
        """Return the word of a pair, None where it is not known."""
        return self.words.get(frozenset((first, second)))


def gpu_number(label: str) -> int:
    """Return the index that a GPU's label ends with."""
    found = re.search(r"\d+$", label)
    return int(found[0]) if found else 0


def read_matrix(table: TableLines) -> LinkMatrix:
    """Return the matrix of a table; what was cut, shifted or contradictory is said in its warnings."""
    matrix = LinkMatrix(columns=_find_columns(table))
    votes: dict[frozenset[str], list[tuple[_Trust, str]]] = {}
    for row in table.rows:
        _collect(row, matrix, votes)
    for pair, cast in votes.items():
        matrix.words[pair] = _decide(pair, cast, matrix.warnings)
    _say_what_was_cut(table, matrix)
    return matrix


def _find_columns(table: TableLines) -> list[str | None]:
    """Return the label of each column, from the header and from where each row has its diagonal."""
    on_diagonal = {
        position: row.label for row in table.rows for position, word in enumerate(row.cells) if word in SELF_WORDS
    }
    width = max((len(row.cells) for row in table.rows), default=0)
    if table.header and table.header.labels:
        labels = list(table.header.labels)
        shifts = Counter(position - labels.index(label) for position, label in on_diagonal.items() if label in labels)
        shift = shifts.most_common(1)[0][0] if shifts else 0
        columns: list[str | None] = [*([None] * shift), *labels] if shift > 0 else [*labels[-shift if shift else 0 :]]
    else:
        columns = [None] * width
    for position, label in on_diagonal.items():
        if position < len(columns) and columns[position] is None:
            columns[position] = label
    _name_unlabelled_gpus(columns, table.rows)
    columns = [label if label not in columns[:position] else None for position, label in enumerate(columns)]
    known = {label for label in columns if label}
    # Devices whose rows are there but whose columns were cut off come last: a table's rows follow its columns.
    return columns + [row.label for row in table.rows if row.label not in known]


def _name_unlabelled_gpus(columns: list[str | None], rows: list[TableRow]) -> None:
    """Name columns that only GPUs can have: those up to the last direct link, GPUs being listed before NICs."""
    numbered = all(
        label is None or not _GPU_LABEL.fullmatch(label) or gpu_number(label) == position
        for position, label in enumerate(columns)
    )
    if not numbered:
        return
    last = -1
    for position, label in enumerate(columns):
        words = [parse_link_word(row.cells[position]) for row in rows if position < len(row.cells)]
        if (label and _GPU_LABEL.fullmatch(label)) or any(word and word.link_type.is_fast for word in words):
            last = position
    for position in range(last + 1):
        columns[position] = columns[position] or f"GPU{position}"


def _collect(row: TableRow, matrix: LinkMatrix, votes: dict[frozenset[str], list[tuple[_Trust, str]]]) -> None:
    diagonal = [position for position, word in enumerate(row.cells) if word in SELF_WORDS]
    column = matrix.columns.index(row.label)
    if len(diagonal) > 1 or (diagonal and diagonal[0] != column):
        matrix.warnings.append(f"row {row.label} is shifted against its header; it is read from the other rows")
        return
    trust = _Trust.OF_A_WHOLE_ROW if diagonal else _Trust.OF_A_SHORT_ROW
    for position, (word, label) in enumerate(zip(row.cells, matrix.columns, strict=False)):
        if label is None or label == row.label or word in SELF_WORDS:
            continue
        at_cut = row.is_cut and position == len(row.cells) - 1
        votes.setdefault(frozenset((row.label, label)), []).append((_Trust.AT_A_CUT if at_cut else trust, word))


def _decide(pair: frozenset[str], cast: list[tuple[_Trust, str]], warnings: list[str]) -> str:
    """Return the word of the most trusted cell of a pair; of equals that differ, the slower one, and say so."""
    best = max(trust for trust, _ in cast)
    words = {word for trust, word in cast if trust == best}
    if len(words) == 1:
        word = words.pop()
        # `NV1` at a cut may have been `NV12`: the link is known, its width is not.
        return "NV" if best is _Trust.AT_A_CUT and re.fullmatch(r"NV\d", word) else word
    first, second = sorted(pair)
    warnings.append(f"{first} and {second} are linked by {' and by '.join(sorted(words))}; the slower one is used")
    return max(words, key=_slowness)


def _slowness(word: str) -> tuple[int, int]:
    link = parse_link_word(word)
    if link is None:
        return (-1, 0)
    return (link.link_type.distance, -(link.nvlink_count or 0))


def _say_what_was_cut(table: TableLines, matrix: LinkMatrix) -> None:
    rows = {row.label for row in table.rows}
    lost_rows = [label for label in matrix.columns if label and label not in rows]
    if lost_rows:
        matrix.warnings.append(f"the table is cut: no row for {_listed(lost_rows)}")
    width = max((len(row.cells) for row in table.rows), default=0)
    lost_columns = [label for label in matrix.columns[width:] if label and label in rows]
    if lost_columns and table.rows:
        matrix.warnings.append(f"the table is cut: no column for {_listed(lost_columns)}")
    short = [row.label for row in table.rows if len(row.cells) < min(width, len(matrix.columns))]
    if short:
        matrix.warnings.append(f"the table is cut: cells are missing in the row of {_listed(short)}")
    if table.rows and table.header is None:
        matrix.warnings.append("the table has no header; its columns are named after its rows")


def _listed(labels: list[str]) -> str:
    return ", ".join(labels) if len(labels) <= 4 else f"{labels[0]} to {labels[-1]} ({len(labels)} devices)"
