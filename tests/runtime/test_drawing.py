"""Random numbers under tp: each rank its own for its parts, all the same for whole tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rank_harness import RankHarness
from torch import nn
from training_cases import HIDDEN, TOKENS, Transformer

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import SplitTensor
from paraplan.runtime.split import tensor_parallel
from paraplan.runtime.split.tensor_parallel import tensor_group
from paraplan.runtime.structure.blocks import find_blocks
from paraplan.runtime.structure.model_structure import ModelStructure

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


def _drawn() -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return by function what it draws for this rank's part, twice (the second call is remembered), and for a whole."""
    job = runtime.init(TWO_PARTS)
    group = tensor_group(job.mesh)
    found = {}
    for name, draw in DRAWS.items():
        torch.manual_seed(3)
        split = SplitTensor(torch.ones(32, 24), Sharding(dim=0, segments=(64,), size=2), group, "layer")
        parts = [draw(split) for _ in range(2)]
        assert all(isinstance(part, SplitTensor) for part in parts), name
        found[name] = (parts[0].local, parts[1].local, draw(torch.ones(32, 24)))
    return found


def test_every_function_that_draws_gives_ranks_their_own_numbers_for_parts(ranks: RankHarness) -> None:
    first, second = ranks.run(_drawn, size=2)
    for name in DRAWS:
        for part, other in zip(first[name][:2], second[name][:2], strict=True):
            assert not torch.equal(part, other), name
        assert not torch.equal(first[name][0], first[name][1]), name
        assert torch.equal(first[name][2], second[name][2]), name


class Noisy(nn.Module):
    """Adds noise between two layers, in the shape of what lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(hidden))
        return hidden + self.down(inner * torch.rand(inner.shape))


class Quiet(Noisy):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.dropout(self.down(F.gelu(self.up(hidden))), 0.1, self.training)


def _split_directly() -> list[bool]:
    job = runtime.init(TWO_PARTS)
    example = torch.zeros(2, TOKENS, dtype=torch.long)
    found = []
    for layer in (Noisy, Quiet):
        model = Transformer(layer)
        structure = ModelStructure(model, find_blocks(model), example)
        split = tensor_parallel.find_tensor_split(structure, mesh=job.mesh, sequence_parallel=False)
        found.append(next(iter(split.blocks.values())).use_local_output)
    return found


def test_code_that_draws_in_the_shape_of_a_part_sees_whole_shapes(ranks: RankHarness) -> None:
    assert ranks.run(_split_directly, size=2) == [[False, True]] * 2
