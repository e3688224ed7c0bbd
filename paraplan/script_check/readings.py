"""Readings of a script: values with what they were made of, and what one process is given in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paraplan.script_check.batches import joined, tensors_in, with_tensors

Place = tuple[str, int]
"""Where something was read, and the how-many-th time."""


NOWHERE: Place = ("", -1)
"""The place of numbers, which are made of something and are nothing that is read."""


@dataclass
class Reading:
    """The result of one call: its tensors with the names of their keys, and the values that it was made of."""

    at: Place
    tensors: list[tuple[str, torch.Tensor]]
    made_of: tuple[Reading, ...] = ()
    print: str = ""
    is_used: bool = False
    is_end: bool = False
    num_steps: int = 0
    num_parts: int = 1
    """Number of tensors in it."""

    def places(self) -> list[Place]:
        """Return where that was read of which this was made."""
        return [place for one in self.made_of for place in ([one.at] if one.at != NOWHERE else one.places())]

    def use(self) -> None:
        """Note that a model or a loss takes what this was, and so all that it was made of."""
        waiting = [self]
        while waiting:
            reading = waiting.pop()
            if not reading.is_used:
                reading.is_used = True
                waiting += reading.made_of


@dataclass
class Replay:
    """The inputs of one process in place of its own values: at each place and time those of the ranks it stands for."""

    read: dict[Place, list[list[tuple[str, torch.Tensor]]]]
    ended: set[Place]
    width: int
    """Number of ranks that it stands for."""
    times_a_batch: dict[str, int] | None = None
    """How often a batch reads at each place, where the ranks' batches come one after another and not all at once."""

    def at(self, place: Place, value: Any) -> Any:
        """Return what is read at `place` in the structure of `value`, which is what the script itself read there."""
        name, number = place
        rank = None
        if self.times_a_batch is not None:
            times = self.times_a_batch.get(name, 1)
            batch, within = divmod(number, times)
            batch, rank = divmod(batch, self.width)
            number = batch * times + within
        parts = self.read.get((name, number))
        if parts is None:
            return value
        parts = parts if rank is None else parts[rank : rank + 1]
        num_leaves = len(list(tensors_in(value)))
        if any(len(part) != num_leaves for part in parts):
            return value
        return with_tensors(
            value, iter([joined([part[leaf][1] for part in parts], parts[0][leaf][0]) for leaf in range(num_leaves)])
        )

    def drawn(self, place: Place, value: torch.Tensor) -> torch.Tensor:
        """Return what ranks drew in place of `value`: for all samples, or the first rank's where they draw for none."""
        of_all: torch.Tensor = self.at(place, value)
        if of_all.shape == value.shape:
            return of_all
        first = self.read[place][0][0][1] if place in self.read else value
        return first if first.shape == value.shape else value

    def ends(self, place: Place) -> bool:
        """Whether the loader that is read at `place` ended this time on the ranks."""
        return self.times_a_batch is None and place in self.ended


@dataclass(frozen=True)
class Given:
    """The values given to one process in place of its own: parameters at the start, inputs, and rates of each step."""

    start: dict[str, torch.Tensor]
    replay: Replay
    rates: tuple[dict[str, dict[str, float]], ...]
