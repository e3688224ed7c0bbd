"""Models that a loss takes values of without training them: teachers, references, target networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.script_check.batches import print_of, tensors_in
from paraplan.script_check.evidence import Sight, listed, ranks_of
from paraplan.script_check.records import CopyRecord

_MARK = "_paraplan_copy"
_UNLIKE = 0.02
"""Relative difference of how far copies moved on two ranks, above which they did not move alike."""


@dataclass(eq=False)
class Call:
    """The calls of a copy in one step: how far its parameters have moved, and whether a loss took what it gave."""

    step: int
    moved: tuple[float, float] = (0.0, 0.0)
    is_used: bool = False
    made_of: list[Any] = field(default_factory=list)
    """Readings that the copy was given."""


@dataclass
class _Copy:
    """A model that was called without gradients, with the parameters of its first call, and its calls by step."""

    number: int
    model: nn.Module
    start: list[torch.Tensor]
    calls: dict[int, Call] = field(default_factory=dict)

    def call(self, step: int) -> Call:
        """Return its calls before optimizer step `step`."""
        if step not in self.calls:
            now = [one.detach() for one in self.model.parameters()]
            if [one.shape for one in now] != [one.shape for one in self.start]:  # gathered for a while
                return Call(step)
            ways = [one.double() - other.double() for one, other in zip(now, self.start, strict=True)]
            far = sum(float(way.square().sum()) for way in ways) ** 0.5
            self.calls[step] = Call(step, (far, sum(float(way.sum()) for way in ways)))
        return self.calls[step]


class Copies:
    """The models of a process that were called without gradients, and their calls of which a loss took something."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}

    def called(self, model: nn.Module, result: Any, step: int, made_of: Sequence[Any]) -> None:
        """Note a call of `model` before optimizer step `step` with what was read, and mark what it gave."""
        call = self._call(model, step)
        call.made_of += made_of
        for _, tensor in tensors_in(result):
            setattr(tensor, _MARK, (call,))

    def _call(self, model: nn.Module, step: int) -> Call:
        if id(model) not in self._copies:
            parameters = list(model.parameters())
            if any(isinstance(one, DTensor) or one.is_meta for one in parameters):
                return Call(step)
            with torch.no_grad():
                start = [one.detach().clone() for one in parameters]
            self._copies[id(model)] = _Copy(len(self._copies), model, start)
        with torch.no_grad():
            return self._copies[id(model)].call(step)

    def records(self) -> tuple[CopyRecord, ...]:
        """Return the calls of which a loss took something."""
        return tuple(
            CopyRecord(
                number=copy.number,
                name=type(copy.model).__name__,
                start=print_of([("", one) for one in copy.start]),
                step=call.step,
                moved=call.moved,
            )
            for copy in self._copies.values()
            for call in copy.calls.values()
            if call.is_used
        )


def hand_on(given: Sequence[torch.Tensor], result: Any) -> None:
    """Mark `result` as made of what copies gave, where some of `given` is."""
    calls = tuple(dict.fromkeys(call for tensor in given for call in getattr(tensor, _MARK, ())))
    for _, tensor in tensors_in(result) if calls else ():
        setattr(tensor, _MARK, calls)


def use(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Note that a model or a loss takes `tensors`; return what the copies were given that these come from."""
    calls = [call for tensor in tensors for call in getattr(tensor, _MARK, ())]
    for call in calls:
        call.is_used = True
    return [reading for call in calls for reading in call.made_of]


def is_given(tensor: torch.Tensor) -> bool:
    """Whether a copy gave a tensor, so that it comes from more than its marks say."""
    return hasattr(tensor, _MARK)


def unlike_copies(sight: Sight, step: int) -> tuple[list[int], str] | None:
    """Return on which ranks a copy has moved otherwise than on rank 0 before `step`, and what that means."""
    tables = [
        {(one.number, one.name, one.start): one.moved for one in process.record.copies if one.step == step}
        for process in sight.ranks
    ]
    for copy in tables[0]:
        ways = [table.get(copy) for table in tables]
        moved = [way for way in ways if way is not None]
        if len(moved) < len(ways):  # it is in parts, or other models on other ranks
            continue
        far = max(way[0] for way in moved)
        unlike = [
            rank
            for rank, way in enumerate(moved)
            if max(abs(one - other) for one, other in zip(way, moved[0], strict=True)) > _UNLIKE * far
        ]
        if not unlike:
            continue
        still = [rank for rank, way in enumerate(moved) if way[0] == 0]
        text = f"the loss takes values of a {copy[1]} that is not trained, as a teacher or a target network, and "
        if still:
            others = [rank for rank in range(len(moved)) if rank not in still]
            text += f"that moved since the start on {ranks_of(others)} and stands still on {ranks_of(still)}: it is "
            return unlike, text + "updated there alone; update it on all ranks alike, or broadcast it"
        far_each = ", ".join(f"{way[0]:.3g}" for way in moved)
        text += f"that moved by {far_each} on ranks {listed(range(len(moved)))}: each updates its own by other values"
        return unlike, text
    return None
