"""Experts that are modules in a list, called one by one, of which each rank holds some.

The code that calls them runs twice: first to see with what, and then with what the experts of all ranks have made of
that, which travels in between. What it draws and writes it draws and writes once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.experts.exchange import Rows, row_counts, tell
from paraplan.runtime.experts.layers import ExpertLoad, listed_experts
from paraplan.runtime.shards.group import TensorGroup

Expert = Callable[..., torch.Tensor]


@dataclass(eq=False)
class _Calls:
    """Calls of `experts` at home: `rows` by the number of the expert, call by call, and the `answers`."""

    name: str
    experts: list[nn.Module]
    rows: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    answers: Iterator[torch.Tensor] | None = None
    is_open: bool = False

    def expert(self, number: int) -> Expert:
        """Return what stands at home for an expert."""

        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
                raise UnsupportedPlanError(
                    f"ep: experts of {self.name} are called with more than one tensor", hint="use ep=1 for this model"
                )
            if self.answers is not None:
                answer = next(self.answers, None)
                if answer is not None and answer.shape[:-1] == args[0].shape[:-1]:
                    return answer
                raise UnsupportedPlanError(
                    f"ep: {self.name} calls its experts otherwise when it runs again", hint="use ep=1 for this model"
                )
            self.rows.append((number, args[0]))
            device = args[0].device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else args[0].dtype
            return torch.zeros_like(args[0], dtype=dtype)

        return call


class ListedExperts:
    """The forward pass of a module that calls the experts of `container`. `inner` is its own.

    `runs_all`: experts without rows run on none, because ranks gather them together.
    """

    def __init__(
        self,
        name: str,
        holder: nn.Module,
        container: nn.Module,
        group: TensorGroup,
        load: ExpertLoad,
        *,
        runs_all: bool,
    ) -> None:
        experts = [*listed_experts(container).values()]
        self._calls = _Calls(name, experts)
        self._holder = holder
        self._inner = holder.forward
        self._group = group
        self._load = load
        self._runs_all = runs_all
        self._num_local = len(experts) // group.size
        first = self._num_local * group.index
        self._experts = experts[first : first + self._num_local]
        container.__class__ = _dealing(type(container))
        container.__dict__["_calls"] = self._calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns with the experts of all ranks."""
        calls = self._calls
        device = next(self._holder.parameters()).device
        devices = [device] if device.type != "cpu" else []
        buffers = [(buffer, buffer.clone()) for buffer in self._holder.buffers()]
        calls.rows, calls.answers, calls.is_open = [], None, True
        try:
            with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
                self._inner(*args, **kwargs)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            calls.is_open = False
            calls.answers = iter(self._answers())
            calls.is_open = True
            return self._inner(*args, **kwargs)
        finally:
            calls.rows, calls.answers, calls.is_open = [], None, False

    def _answers(self) -> list[torch.Tensor]:
        """Return what experts make of the noted rows, in the order of the calls. Every rank of the group calls it."""
        noted, group = self._calls.rows, self._group
        order = sorted(range(len(noted)), key=lambda place: noted[place][0])
        lengths = [noted[place][1].numel() // max(noted[place][1].shape[-1], 1) for place in order]
        there = torch.zeros(group.size * self._num_local, dtype=torch.int64)
        for place, length in zip(order, lengths, strict=True):
            there[noted[place][0]] += length
        device = next(self._experts[0].parameters()).device
        coming = tell(group, there.to(device)).view(group.size, -1)
        self._load.add(self._calls.name, there.to(device))
        numbers = row_counts(coming.reshape(-1), sum(lengths))
        table = [numbers[start : start + self._num_local] for start in range(0, len(numbers), self._num_local)]
        sent = [sum(there[start : start + self._num_local].tolist()) for start in range(0, len(there), self._num_local)]
        ways = Rows(group, sent, [sum(row) for row in table])
        rows = [noted[place][1].reshape(-1, noted[place][1].shape[-1]) for place in order]
        width = self._width(rows, device)
        (states,) = ways.exchange(torch.cat(rows) if rows else torch.zeros(0, width, device=device))
        (back,) = ways.back.exchange(self._run(states, table))
        answers: list[torch.Tensor | None] = [None] * len(noted)
        for place, answer in zip(order, torch.split(back, lengths), strict=True):
            answers[place] = answer.reshape(*noted[place][1].shape[:-1], -1)
        return [answer for answer in answers if answer is not None]

    def _run(self, states: torch.Tensor, table: list[list[int]]) -> torch.Tensor:
        """Return what the experts of this rank make of `states`, where `table` has the rows of each, by rank."""
        parts = torch.split(states, [count for row in table for count in row])
        made: list[list[torch.Tensor]] = []
        for number, expert in enumerate(self._experts):
            own = [*parts[number :: self._num_local]]
            counts = [len(part) for part in own]
            if sum(counts) or self._runs_all:
                made.append([*torch.split(expert(torch.cat(own)), counts)])
            else:
                made.append(own)
        outputs = torch.cat([made[number][rank] for rank in range(len(table)) for number in range(self._num_local)])
        if not outputs.requires_grad and torch.is_grad_enabled():  # other ranks send gradients back
            outputs = outputs + sum((one * 0.0).sum() for one in self._experts[0].parameters())
        return outputs

    def _width(self, rows: list[torch.Tensor], device: torch.device) -> int:
        """Return the width of the rows that travel, as the ranks have it that send some."""
        own = torch.full((self._group.size,), rows[0].shape[-1] if rows else 0, device=device)
        return max(row_counts(tell(self._group, own), 0))


def _dealing(kind: type[Any]) -> type[Any]:
    """Return a subclass of a container that hands out stand-ins for its experts while their calls are noted."""

    def get(self: Any, key: Any) -> Any:
        found = kind.__getitem__(self, key)
        experts = self._calls.experts
        return self._calls.expert(experts.index(found)) if self._calls.is_open and found in experts else found

    def all_of(self: Any) -> list[Any]:
        return [get(self, key) for key in (self.keys() if isinstance(self, nn.ModuleDict) else range(len(self)))]

    own: dict[str, Any] = {"__getitem__": get}
    if issubclass(kind, nn.ModuleList):
        own["__iter__"] = lambda self: iter(all_of(self))
    else:
        own["values"] = all_of
        own["items"] = lambda self: [*zip(self.keys(), all_of(self), strict=True)]
    return type(kind.__name__, (kind,), own)
