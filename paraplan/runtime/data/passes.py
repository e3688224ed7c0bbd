"""Which pass over a data set comes next: a loop over the same data is the next pass, whatever object it goes over."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MOST = 16  # of data that cannot be referred to weakly, as a list, and would be kept


@dataclass
class Passes:
    """The `number` of the pass that the next loop begins, from 0, and the steps of a stream's passes before it."""

    number: int = 0
    num_steps: int = 0


class DataPasses:
    """The passes over each data set that a job has been given, by the data and how it is read."""

    def __init__(self) -> None:
        self._known: list[tuple[Callable[[], Any], tuple[Any, ...], Passes]] = []

    def of(self, dataset: object, *settings: object) -> Passes:
        """Return the passes over `dataset`, read with `settings`: the same ones for the same object."""
        self._known = [one for one in self._known if one[0]() is not None][-_MOST:]
        for refer, known, passes in self._known:
            if refer() is dataset and known == settings:
                return passes
        passes = Passes()
        self._known.append((_reference(dataset), settings, passes))
        return passes


def _reference(dataset: object) -> Callable[[], Any]:
    try:
        return weakref.ref(dataset)
    except TypeError:
        return lambda: dataset
