"""Rows of tensors sent to the ranks that share out the experts, each its own, and gradients sent back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.torch_private import FakeTensor


def tell(group: TensorGroup, numbers: torch.Tensor) -> torch.Tensor:
    """Return what all ranks of `group` say to this one: `numbers` has an entry for each, and so has the answer."""
    told = torch.empty_like(numbers)
    dist.all_to_all_single(told, numbers.contiguous(), group=group.handle)
    return told


@dataclass(frozen=True)
class Rows:
    """How many rows go to each rank of a group, and how many come from each."""

    group: TensorGroup
    sent: Sequence[int]
    received: Sequence[int]

    @property
    def back(self) -> Rows:
        """The way back."""
        return Rows(self.group, self.received, self.sent)

    def exchange(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows that come for those of `tensors` that go, and have their gradients go back."""
        exchanged: tuple[torch.Tensor, ...] = _Exchange.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return exchanged


def row_counts(counts: torch.Tensor, total: int) -> list[int]:
    """Return `counts`, which add up to `total`, as numbers; an even load where tensors have no values."""
    if isinstance(counts, FakeTensor):
        return [(total + place) // len(counts) for place in range(len(counts))]
    numbers: list[int] = counts.tolist()
    return numbers


class _Exchange(torch.autograd.Function):
    """All tensors in one: ranks then send their gradients in one order, whatever else their graphs hold."""

    @staticmethod
    def forward(ctx: Any, rows: Rows, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.rows = rows
        return tuple(_exchanged(rows, one) for one in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        return None, *(
            _exchanged(ctx.rows.back, one) if is_needed else None
            for one, is_needed in zip(gradients, needed, strict=True)
        )


def _exchanged(rows: Rows, tensor: torch.Tensor) -> torch.Tensor:
    received = tensor.new_empty((sum(rows.received), *tensor.shape[1:]))
    dist.all_to_all_single(received, tensor.contiguous(), [*rows.received], [*rows.sent], group=rows.group.handle)
    return received
