"""Tokens with the experts that each goes to, as pairs in the order of the experts.

One way copies the tokens, the other sums what comes back; each is the gradient of the other. Neither adds to memory
that several pairs share, so that sums are the same each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Pairs:
    """Pairs sorted by expert: `order` has the number of each, `inverse` where each went. A token has `num_each`."""

    order: torch.Tensor
    inverse: torch.Tensor
    num_each: int

    @classmethod
    def of(cls, chosen: torch.Tensor, *, num_each: int) -> Pairs:
        """Return the pairs of tokens with the experts `chosen`, of which each token has `num_each` in a row."""
        order = torch.argsort(chosen, stable=True)
        numbers = torch.arange(len(order), device=order.device)
        return cls(order, torch.empty_like(order).scatter_(0, order, numbers), num_each)

    def spread(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a row of `tokens` for each pair."""
        rows: torch.Tensor = _Way.apply(tokens, self, True)  # type: ignore[no-untyped-call]
        return rows

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the `rows` of each token."""
        tokens: torch.Tensor = _Way.apply(rows, self, False)  # type: ignore[no-untyped-call]
        return tokens

    def copied(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what `spread` does, without a graph."""
        return tokens[self.order // self.num_each]

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what `collect` does, without a graph."""
        return rows[self.inverse].view(-1, self.num_each, rows.shape[-1]).sum(1)


class _Way(torch.autograd.Function):
    """`spread` or `collect`, each of which is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, pairs: Pairs, spreads: bool) -> torch.Tensor:
        ctx.pairs, ctx.spreads = pairs, spreads
        return pairs.copied(rows) if spreads else pairs.summed(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        made = ctx.pairs.summed if ctx.spreads else ctx.pairs.copied
        return made(gradients[0]), None, None
