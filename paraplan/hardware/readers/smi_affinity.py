"""The affinity columns behind a row of `nvidia-smi topo -m`: CPUs, NUMA node, and the node of the GPU's own memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paraplan.hardware.readers.smi_lines import TableHeader, TableRow

_LIST = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
_VALUE = re.compile(r"N/A|[0-9,\-]+")
_TYPED_NUMA = re.compile(r"\bNUMA\s*(?:node\s*)?(\d+)", re.IGNORECASE)
_STANDARD = ("cpu", "numa", "memory_numa")


@dataclass(frozen=True)
class Affinity:
    """Affinity of a GPU: a list of CPU ranges, a NUMA node or list of nodes, the node of the GPU's memory.

    `is_cut` is True where the row breaks off inside the first of them, which is then not to be trusted.
    """

    cpu: str | None = None
    numa: str | None = None
    memory_numa: int | None = None
    is_cut: bool = False

    @property
    def numa_node(self) -> int | None:
        """The node, or the first of a list: nodes behind the first have memory but no CPUs, or hold the rest."""
        return int(re.split("[,-]", self.numa)[0]) if self.numa else None


def read_affinity(row: TableRow, header: TableHeader | None, *, ends_early: bool = False) -> Affinity:
    """Return what stands behind the last link word of a row; columns that are empty, N/A or cut are None.

    `ends_early` says that the text ends with this row, which has less behind its words than the rows above.
    """
    typed = _TYPED_NUMA.search(row.tail)
    if typed:
        return Affinity(numa=typed[1])
    kinds = tuple(kind for kind, _ in header.affinity) if header and header.affinity else _STANDARD
    values = _by_tabs(row.tail, kinds) or _by_words(row, header, kinds)
    if _is_cut(row, header, values, ends_early=ends_early):
        return Affinity(is_cut=True)
    memory = values.get("memory_numa")
    return Affinity(
        cpu=_as_list(values.get("cpu")),
        numa=_as_list(values.get("numa")),
        memory_numa=int(memory) if memory and memory.isdigit() else None,
    )


def _is_cut(row: TableRow, header: TableHeader | None, values: dict[str, str], *, ends_early: bool) -> bool:
    """Tell whether the row's only value ends a line that was cut there.

    It was where the header is cut too or ends before this column, and where the header has further columns that the
    rows above fill.
    """
    filled = [kind for kind, value in values.items() if value]
    if len(filled) != 1 or header is None or not row.tail[-1:].isalnum():
        return False
    more_follows = ends_early and [kind for kind, _ in header.affinity][-1:] != filled
    return header.is_cut or not header.affinity or more_follows


def _as_list(value: str | None) -> str | None:
    if not value or len(value) > 1024 or not _LIST.fullmatch(value):
        return None
    numbers = [int(number) for part in value.split(",") for number in part.split("-")]
    return value if numbers == sorted(numbers) else None  # a list that runs backwards lost its end


def _by_tabs(tail: str, kinds: tuple[str, ...]) -> dict[str, str] | None:
    """Return the fields below the names of their columns, None where the tabs do not fit those columns.

    The last column stands one tab further right than its number, for the name of the one before it is long.
    """
    fields = [field.strip() for field in tail.split("\t")[1:]]
    if not fields or any(len(_VALUE.findall(field)) > 1 for field in fields):
        return None
    values = {kind: field for kind, field in zip(kinds, fields, strict=False) if kind != "memory_numa"}
    if "memory_numa" in kinds:
        behind = [field for field in fields[kinds.index("memory_numa") :] if field]
        values["memory_numa"] = behind[-1] if behind else ""
    return values if sorted(filter(None, values.values())) == sorted(filter(None, fields)) else None


def _by_words(row: TableRow, header: TableHeader | None, kinds: tuple[str, ...]) -> dict[str, str]:
    """Give the words to the columns in order; where there are fewer words than columns, by the kind of each word."""
    words: list[tuple[str, int]] = []
    for match in _VALUE.finditer(row.tail):
        if words and words[-1][0][-1] in ",-":
            words[-1] = (words[-1][0] + match[0], words[-1][1])  # a list that a narrow terminal had broken
        else:
            words.append((match[0], row.tail_start + match.start()))
    texts = [word for word, _ in words]
    if not words or len(words) >= len(kinds):
        return dict(zip(kinds, texts, strict=False))
    if header is None or not header.affinity:
        only_numa = len(texts) == 2 and texts[0].isdigit() and texts[1] == "N/A"
        return {"numa": texts[0]} if only_numa else dict(zip(kinds, texts, strict=False))
    last = {}
    if kinds[-1] == "memory_numa" and texts[-1] == "N/A":
        last, texts = {"memory_numa": "N/A"}, texts[:-1]
    unglued = unglue_numa(texts[0]) if len(texts) == 1 and kinds[:2] == ("cpu", "numa") else None
    if unglued:
        return dict(zip(kinds, unglued, strict=False)) | last
    if texts and kinds[0] == "cpu" and texts[0].isdigit() and not _is_in_cpu_column(row, header, words[0][1]):
        texts = ["", *texts]
    return dict(zip(kinds, texts, strict=False)) | last


def _is_in_cpu_column(row: TableRow, header: TableHeader, start: int) -> bool:
    """Tell whether a number stands below "CPU Affinity" and not right of it, below an empty column's neighbour.

    Where words do not stand below their names at all, it is a NUMA node: of the two, CPUs are what containers hide.
    """
    offsets = [cell - label for cell, label in zip(row.cell_starts, header.label_starts, strict=False)]
    if not offsets or max(offsets) - min(offsets) > 2:
        return False
    return start < header.affinity[0][1] + min(offsets) + 4


def unglue_numa(text: str) -> tuple[str, str] | None:
    """Return CPU list and NUMA node of a word in which the blank between them was lost, None if it is a plain list.

    Hyper-threads come as ranges of one width, so `0-45,92-1370` can only be `0-45,92-137` and `0`.
    """
    ranges = re.findall(r"(\d+)-(\d+)", text)
    if len(ranges) < 2 or not _LIST.fullmatch(text):
        return None
    widths = [int(last) - int(first) for first, last in ranges]
    if len(set(widths)) == 1 or len(set(widths[:-1])) != 1 or not text.endswith(ranges[-1][1]):
        return None
    for digits in (1, 2):
        first, last = ranges[-1][0], ranges[-1][1][:-digits]
        if last and int(last) - int(first) == widths[0]:
            return text[:-digits], text[-digits:]
    return None
