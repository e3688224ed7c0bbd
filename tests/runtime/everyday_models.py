"""Models as many people write them: experts picked by a mask, layers of one's own, skips to the start."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from odd_models import WIDTH, Base, Block
from torch import nn


class PickedExperts(Block):
    """Each token goes to two of the experts; the tokens of an expert are found by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(hidden).flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1).topk(2)
        total = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if rows.numel():
                total[rows] += shares[rows, place, None] * expert(tokens[rows])
        return super().forward(hidden + total.view(hidden.shape))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given)
        return given.clamp(min=0) ** 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (given,) = ctx.saved_tensors
        return 2 * gradient * given.clamp(min=0)


class OwnActivation(Block):
    """An activation with a gradient of its own, between layers that tp could split; two others that it does split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + self.down(_Square.apply(self.up(hidden))))


class Ternary(nn.Linear):
    """A linear layer of weights -1, 0 and 1, times the mean size of all."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        scale = self.weight.abs().mean()
        rounded = (self.weight / scale).round().clamp(-1, 1) * scale
        return F.linear(given, self.weight + (rounded - self.weight).detach(), self.bias)


class OwnLinear(Block):
    """Layers that look at all of their weights, and two others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Ternary(WIDTH, 2 * WIDTH), Ternary(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + self.down(F.relu(self.up(hidden))))


class Mixed(Block):
    """The hidden state and the embedding, each with a trained weight that is an entry of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.tensor([1.0, 0.1]))

    def forward(self, hidden: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return super().forward(self.shares[0] * hidden + self.shares[1] * start)


class ManyExperts(Base):
    block = PickedExperts


class OwnActivations(Base):
    block = OwnActivation


class OwnLinears(Base):
    block = OwnLinear


class SkipsToTheStart(Base):
    """Every block reads the embedding too."""

    block = Mixed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        start = F.layer_norm(self.words(tokens), (WIDTH,))
        return self.head(self.run(start, start))
