"""Buffers of models that ranks change by their own rows, or otherwise than one process does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paraplan.script_check.evidence import Process, Sight, distance

_TOLERANCE = 1e-3


class _Buffer(NamedTuple):
    """A buffer at some time: on ranks and in one process, and what it was on ranks at first."""

    ranks: Sequence[torch.Tensor]
    alone: torch.Tensor
    starts: Sequence[torch.Tensor]

    @property
    def is_changed(self) -> bool:
        return any(not torch.equal(value, start) for value, start in zip(self.ranks, self.starts, strict=True))

    @property
    def is_spread(self) -> bool:
        return max(distance(value, self.ranks[0], 0.0) for value in self.ranks) > _TOLERANCE

    @property
    def is_wrong(self) -> bool:
        return max(distance(value, self.alone, 0.0) for value in self.ranks) > _TOLERANCE

    def are_shares(self, groups: Sequence[Sequence[int]]) -> bool:
        """Whether each rank counts its own, and these together are what one process counts."""
        total = torch.stack([self.ranks[group[0]].double() for group in groups]).sum(0)
        return distance(total, self.alone, 0.0) <= _TOLERANCE


def wrong_buffer(sight: Sight, step: int) -> str:
    """Return which buffer explains that gradients part in `step`, and how it goes wrong; "" for none.

    Those that each rank changes by values of its own; and such as are alike on ranks and other than in one process,
    where that was so before gradients parted.
    """
    shares = {
        name for name, one in _buffers(sight, "buffer/1").items() if one.is_spread and one.are_shares(sight.groups)
    }
    for earlier, when in ((earlier, when) for earlier in range(1, step + 1) for when in ("held", "buffer")):
        for name, one in _buffers(sight, f"{when}/{earlier}").items():
            if name in shares or not one.is_changed or not one.is_wrong:
                continue
            if one.is_spread:
                return (
                    f"the buffer {name} has other values on each rank: each updates it by its own rows, and what is "
                    "computed with it is another on each. Reduce what it is made of over the ranks, or broadcast it"
                )
            if when == "held" or earlier < step:
                return _otherwise(name, one, earlier)
    return ""


def other_buffer(sight: Sight) -> str:
    """Return which buffer ranks change alike and otherwise than one process does, "" for none.

    It may be meant, as where rows of a rank are counted.
    """
    for step in range(1, len(sight.alone.record.steps) + 1):
        for name, one in _buffers(sight, f"buffer/{step}").items():
            if one.is_changed and one.is_wrong and not one.is_spread:
                return _otherwise(name, one, step)
    return ""


def _otherwise(name: str, one: _Buffer, step: int) -> str:
    return (
        f"the buffer {name} is the same on all ranks, and another than in one process, in step {step}{_how_far(one)}: "
        "it is made of one rank's rows alone, or of some more than once"
    )


def unlike_held(sight: Sight) -> tuple[str, str] | None:
    """Return which buffer a script computes with outside of its models, and that it is another on each rank.

    None where it computes with none.
    """
    for place, time in sight.by_rank:
        parents = [_parents(process, place, time) for process in sight.ranks]
        for key in (key for key in sight.ranks[0].tensors if key.startswith("buffer/")):
            held = [process.tensors.get(key) for process in sight.ranks]
            is_held = all(
                value is not None and any(torch.equal(value, one) for one in of)
                for value, of in zip(held, parents, strict=True)
            )
            if is_held and any(not torch.equal(value, held[0]) for value in held if value is not None is not held[0]):
                return key.split("/", 2)[2], (
                    "the loss is made with the buffer's values, which are others on each rank: what one rank computes "
                    "is not sent to the others, or each computes its own. Broadcast it, or reduce what it is made of"
                )
    return None


def _parents(process: Process, place: str, time: int) -> list[torch.Tensor]:
    """Return the tensors of which what was read at a place was made."""
    source = process.source(place)
    parents = source.made_of[time] if source is not None and time < len(source.made_of) else ()
    return [tensor for at in parents if process.source(at[0]) is not None for _, tensor in process.reading(*at)]


def _how_far(one: _Buffer) -> str:
    start = one.starts[0].double()
    ways = one.ranks[0].double() - start, one.alone.double() - start
    size = float(ways[1].norm())
    return f", where it changed {float(ways[0].norm()) / size:.3g} times as far" if size > 0 else ""


def _buffers(sight: Sight, when: str) -> dict[str, _Buffer]:
    """Return the buffers of one shape in all processes before (`held/2`) or after (`buffer/2`) a step's passes."""
    found = {}
    for name, expected in sight.alone.of(when).items():
        key = f"{when}/{name}"
        values = [process.tensors[key] for process in sight.ranks if key in process.tensors]
        starts = [process.tensors.get(f"buffer/0/{name}", expected) for process in sight.ranks]
        if len(values) == len(starts) and all(one.shape == expected.shape for one in (*values, *starts)):
            found[name] = _Buffer(values, expected, starts)
    return found
