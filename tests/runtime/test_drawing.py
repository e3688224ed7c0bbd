"""Random numbers under tp: each rank its own for its parts, all the same for whole tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rank_harness import RankHarness
from torch import nn

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.split.forms import tensor_group
from paraplan.runtime.split.layers import BlockSplit, LayerRole
from paraplan.runtime.split.regions import split_block

pytestmark = pytest.mark.ranks

TWO_PARTS = ParallelPlan(tp=2, micro_batch_size=12)
DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda given: torch.randint_like(given, 1000),
    "bernoulli": lambda given: torch.bernoulli(given / 2),
    "bernoulli_": lambda given: given.clone().bernoulli_(0.5),
    "normal_": lambda given: given.clone().normal_(),
    "uniform_": lambda given: given.clone().uniform_(),
    "exponential_": lambda given: given.clone().exponential_(),
    "geometric_": lambda given: given.clone().geometric_(0.2),
    "rrelu": lambda given: F.rrelu(-given, training=True),
    "dropout": lambda given: F.dropout(given, 0.5),
    "dropout1d": lambda given: F.dropout1d(given[None], 0.5),
    "dropout2d": lambda given: F.dropout2d(given[:, :, None, None], 0.5),
    "dropout3d": lambda given: F.dropout3d(given[:, :, None, None, None], 0.5),
    "alpha_dropout": lambda given: F.alpha_dropout(given, 0.5, training=True),
    "gumbel_softmax": lambda given: F.gumbel_softmax(given, dim=-1),
    "multinomial": lambda given: torch.multinomial(given, 8),
    "poisson": lambda given: torch.poisson(given * 9),
}


class Drawing(nn.Module):
    """Draws by `draw` between its column layer and its row layer, and behind them."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(24, 48), nn.Linear(48, 24), draw
        self.seen: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.up(hidden)
        self.seen.append(self.draw(torch.ones(64, 24)))
        outer = self.down(inner)
        self.seen.append(self.draw(torch.ones(64, 24)))
        return outer


def _drawn() -> dict[str, list[torch.Tensor]]:
    """Return by function what it draws for a part and for a whole, and the same from the same state again."""
    job = runtime.init(TWO_PARTS)
    found = {}
    for name, draw in DRAWS.items():
        block = Drawing(draw)
        roles = {"up": LayerRole("column", (48,)), "down": LayerRole("row", (48,))}
        split_block(block, BlockSplit(roles, {}, draws=True), tensor_group(job.mesh), None)
        for _ in range(2):  # as recompute needs it
            torch.manual_seed(3)
            block(torch.ones(2, 24))
        found[name] = block.seen
    return found


def test_every_function_that_draws_gives_ranks_their_own_numbers_for_parts(ranks: RankHarness) -> None:
    first, second = ranks.run(_drawn, size=2)
    for name in DRAWS:
        part, whole, *again = first[name]
        assert not torch.equal(part, second[name][0]), name
        assert torch.equal(whole, second[name][1]), name
        assert torch.equal(part, again[0]), name
        assert torch.equal(whole, again[1]), name
