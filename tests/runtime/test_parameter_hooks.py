"""Hooks on parameters, and weights that forward passes write: as in one process, or refused."""

from __future__ import annotations

import pytest
import torch
from odd_models import BATCH, LENGTH, WIDTH, WORDS, Base, loss_of, made
from rank_harness import RankHarness
from torch import nn

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan

pytestmark = pytest.mark.ranks

ALONE = ParallelPlan(micro_batch_size=BATCH)
DDP = ParallelPlan(dp=2, micro_batch_size=BATCH // 2)
ZERO = DDP.replace(zero_stage=3)


class Masked(Base):
    """Trains half of the rows of its table."""

    def __init__(self) -> None:
        super().__init__()
        mask = (torch.arange(WORDS) % 2)[:, None]
        self.words.weight.register_hook(lambda gradient: gradient * mask)


class Normed(Base):
    """Divides a gradient by its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient / gradient.norm())


class StepsInBackward(Base):
    """Trains a weight as soon as its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(self.step)

    @staticmethod
    def step(held: torch.Tensor) -> None:
        held.data.sub_(held.grad)


class MaxNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, max_norm=1.0)


class Clamped(Base):
    """Keeps a weight positive where it is used: the same on all ranks that write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.scale.data.clamp_(0.1)
        return self.head(self.run(self.words(tokens) * self.scale))


class Decayed(Base):
    """Decays a weight in each pass in training."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.layers[1].inner.weight.data.mul_(0.99)
        return super().forward(tokens)


def train_all(kinds: list[type[Base]], plan: ParallelPlan) -> list[str | list[float]]:
    """Return the losses of each model, or the words of the refusal."""
    job = runtime.init(plan, shows_progress=False)
    return [train(job, kind) for kind in kinds]


def train(job: runtime.Job, kind: type[Base]) -> str | list[float]:
    generator = torch.Generator().manual_seed(5)
    losses = []
    try:
        engine = job.prepare(
            made(kind),
            loss_fn=loss_of,
            optimizer=lambda held: torch.optim.SGD(held, lr=0.2),
            example_inputs=torch.zeros(2, LENGTH, dtype=torch.long),
        )
        for _ in range(2):
            batch = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)
            tokens, targets = batch.chunk(job.dp, dim=1)[job.dp_rank]
            losses.append(engine.step(tokens, targets).item())
    except UnsupportedPlanError as refusal:
        return str(refusal)
    return losses


def test_what_hooks_and_writes_do_under_replicas_is_that_of_one_process_or_refused(ranks: RankHarness) -> None:
    sound, wrong = [Masked, Clamped], [Normed, StepsInBackward, MaxNorm, Decayed]
    expected = ranks.run_alone(train_all, sound, ALONE)
    for found in ranks.run(train_all, sound + wrong, DDP, size=2):
        assert found[:2] == [pytest.approx(losses, rel=1e-5) for losses in expected]
        normed, steps, max_norm, decayed = found[2:]
        assert "head.weight has a hook on its gradient (register_hook, not linear in the gradient)" in normed
        assert "head.weight has a hook on its gradient (register_post_accumulate_grad_hook)" in steps
        assert "words has max_norm=1: it writes the rows" in max_norm
        assert "the model writes layers.1.inner.weight, which is trained, in its forward pass" in decayed


def test_hooks_on_weights_and_writes_to_them_are_refused_where_ranks_have_shards(ranks: RankHarness) -> None:
    for masked, clamped, max_norm in ranks.run(train_all, [Masked, Clamped, MaxNorm], ZERO, size=2):
        assert "words.weight has a hook on its gradient (register_hook)" in masked
        assert "the model writes scale, which is trained" in clamped
        assert "words has max_norm=1" in max_norm


def test_one_process_keeps_its_hooks(ranks: RankHarness) -> None:
    assert not any(
        isinstance(one, str) for one in ranks.run_alone(train_all, [Normed, StepsInBackward, MaxNorm], ALONE)
    )
