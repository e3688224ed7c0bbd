"""Some of the plans that were priced, for a picture of them: the front of time and memory, and how all of them lie."""

from __future__ import annotations

import numpy as np

from paraplan.cost.plan_table import Floats, Ints
from paraplan.search.evaluation import Priced

NOTICEABLE = 0.99
"""A plan joins the front where it takes less than this share of the memory of the one before it."""
_CELLS = 16
"""A picture is divided into so many cells each way."""


def pareto_front(priced: Priced) -> list[int]:
    """Return the rows of the front, the fastest first: each next one is slower and needs less memory, noticeably so."""
    rows: list[int] = []
    for row in np.lexsort((priced.peak_bytes, priced.seconds)):
        if not rows or priced.peak_bytes[row] < NOTICEABLE * priced.peak_bytes[rows[-1]]:
            rows.append(int(row))
    return rows


def spread(priced: Priced) -> list[int]:
    """Return the rows of plans that show how all of them lie: of each cell of time and memory the fastest plan."""
    time, memory = np.log(priced.seconds), np.log(np.maximum(priced.peak_bytes, 1.0))
    cell = _cell(time) * _CELLS + _cell(memory)
    order = np.argsort(priced.seconds, kind="stable")
    _, firsts = np.unique(cell[order], return_index=True)
    return [int(row) for row in order[np.sort(firsts)]]


def _cell(values: Floats) -> Ints:
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / max(high - low, 1e-12) * _CELLS
    return np.minimum(scaled.astype(np.int64), _CELLS - 1)
