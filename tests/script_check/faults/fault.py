"""What the scripts beside this share: which fault one has, its place among the ranks, exchanges with a gradient.

Started as `python data.py FAULT`, or as `python data.py FAULT mended` for the same script without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FAULT = sys.argv[1]
TOKENS = 12


def has(fault: str) -> bool:
    return fault == FAULT and "mended" not in sys.argv[2:]


def batch(rows: int = 4, length: int = 6, *, reader: int = RANK, seed: list[int] | None = None) -> torch.Tensor:
    """Rows of tokens that the reader draws with a seed of its own; readers of one number draw the same."""
    generator = _GENERATORS.setdefault(reader, torch.Generator().manual_seed(10 + reader))
    return torch.randint(0, TOKENS, (rows, length), generator=generator)


_GENERATORS: dict[int, torch.Generator] = {}


def count_of(labels: torch.Tensor, group: Any = None) -> float:
    """Number of targets of all ranks of a group."""
    count = (labels >= 0).sum().float()
    dist.all_reduce(count, group=group)
    return float(count)


def sum_of_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def reduce_gradients(parameters: Iterable[nn.Parameter], group: Any = None, *, divide_by: float = 1.0) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad.div_(divide_by)


class SumBackward(torch.autograd.Function):
    """Gives what it is given, and sums its gradient over a group."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        return value

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class Gather(torch.autograd.Function):
    """Puts the parts of a group together; each gets the gradient of its own from all of them."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        context.dim, context.group = dim, group
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.group)
        size, place = dist.get_world_size(context.group), dist.get_rank(context.group)
        return gradient.chunk(size, context.dim)[place], None, None


class SumForward(torch.autograd.Function):
    """Sums what it is given over a group, and gives its gradient on."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
