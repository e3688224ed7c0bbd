"""The plans that no other plan beats in both time and memory."""

from __future__ import annotations

import numpy as np

from paraplan.search.survey import Priced

NOTICEABLE = 0.99
"""A plan joins the front where it takes less than this share of the memory of the one before it."""


def pareto_front(priced: Priced) -> list[int]:
    """Return the rows of the front, the fastest first: each next one is slower and needs less memory, noticeably so."""
    rows: list[int] = []
    for row in np.lexsort((priced.peak_bytes, priced.seconds)):
        if not rows or priced.peak_bytes[row] < NOTICEABLE * priced.peak_bytes[rows[-1]]:
            rows.append(int(row))
    return rows
