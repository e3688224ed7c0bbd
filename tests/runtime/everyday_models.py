"""Models as many people write them: experts picked by a mask, layers of one's own, skips to the start."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from odd_models import LENGTH, WIDTH, WORDS, Base, Block
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


class ScaledWeights(Block):
    """Weights that hooks compute before each pass and keep as attributes, as vocoders have it, and two other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            nn.utils.weight_norm(self.inner)  # the newer one makes a parametrization

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + self.down(F.relu(self.up(hidden))))


class Mixed(Block):
    """The hidden state and the embedding, each with a trained weight that is an entry of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.tensor([1.0, 0.1]))

    def forward(self, hidden: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return super().forward(self.shares[0] * hidden + self.shares[1] * start)


class Reader(Block):
    """Attends to a sequence of as many tokens as the hidden state has, some of them hidden from some."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        query, value = (
            layer(given).unflatten(-1, (2, -1)).transpose(1, 2)
            for layer, given in ((self.query, hidden), (self.value, memory))
        )
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        read = F.scaled_dot_product_attention(query, value, value, attn_mask=mask)
        return super().forward(hidden + read.transpose(1, 2).flatten(2))


class Positions(nn.Embedding):
    """A table that is read by the shape of the tokens, not by their numbers."""

    def forward(self, shape: torch.Size) -> torch.Tensor:
        _, tokens = shape
        return super().forward(torch.arange(tokens, device=self.weight.device))


class ManyExperts(Base):
    block = PickedExperts


class OwnActivations(Base):
    block = OwnActivation


class OwnLinears(Base):
    block = OwnLinear


class KeptWeights(Base):
    block = ScaledWeights


class SkipsToTheStart(Base):
    """Every block reads the embedding too."""

    block = Mixed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        start = F.layer_norm(self.words(tokens), (WIDTH,))
        return self.head(self.run(start, start))


class ReadsMemory(Base):
    """Every token attends to trained vectors; positions come from a table that has as many rows as there are words."""

    block = Reader

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.positions = Positions(WORDS, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        memory = self.memory.expand(len(tokens), -1, -1)
        return self.head(self.run(self.words(tokens) + self.positions(tokens.shape), memory))


class MemoryReads(ReadsMemory):
    """The trained vectors attend to the tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.run(self.memory.expand(len(tokens), -1, -1), self.words(tokens)))


class InADict(Base):
    """Blocks hand on their hidden state in a dict."""

    class Named(Block):
        def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return given | {"hidden": Block.forward(self, given["hidden"])}

    block = Named

    def run(self, hidden: torch.Tensor, *beside: Any) -> torch.Tensor:
        given = {"hidden": hidden}
        for layer in self.layers:
            given = layer(given)
        return given["hidden"]


class Padded(Base):
    """Layers of torch's that are told which tokens are padding: none."""

    @staticmethod
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, padding = self.words(tokens), torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=padding)
        return self.head(hidden)
