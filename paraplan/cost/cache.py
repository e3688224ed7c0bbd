"""The costs of cuts that were priced before: each is priced once for a workload, however many tables ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paraplan.cost.plan_table import Floats

Cut = tuple[int, ...]


class KnownCuts:
    """Cuts by their numbers, a row each, and what is known of them in columns. Columns grow by doubling."""

    def __init__(self) -> None:
        self.rows: dict[Cut, int] = {}
        self._columns: dict[str, Floats] = {}

    def missing(self, cuts: Sequence[Cut]) -> list[int]:
        """Return the positions of the cuts that are not known."""
        return [position for position, cut in enumerate(cuts) if cut not in self.rows]

    def add(self, cuts: Sequence[Cut], columns: Mapping[str, Floats]) -> None:
        """Keep columns of cuts that are not known yet, an entry a cut."""
        first = len(self.rows)
        self.rows.update((cut, first + position) for position, cut in enumerate(cuts))
        for name, column in columns.items():
            known = self._columns.get(name)
            if known is None:
                self._columns[name] = column
                continue
            if len(known) < len(self.rows):
                more = np.zeros((2 * len(self.rows) - len(known), *known.shape[1:]))
                known = np.concatenate([known, more])
                self._columns[name] = known
            known[first : len(self.rows)] = column

    def columns(self) -> dict[str, Floats]:
        """Return all columns, a row a cut."""
        return {name: column[: len(self.rows)] for name, column in self._columns.items()}
