"""Losses that add up over micro-batches within rounding, and whose gradients do not, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from odd_models import BATCH, LENGTH, WIDTH, WORDS, Base, made
from rank_harness import RankHarness
from torch import nn

from paraplan import runtime
from paraplan.errors import ParaplanError
from paraplan.plan.parallel import ParallelPlan

pytestmark = pytest.mark.ranks

IN_PARTS = ParallelPlan(micro_batch_size=BATCH // 2, num_microbatches=2)
STAGES = IN_PARTS.replace(pp=2, pipeline_schedule="1f1b")


class _Balanced(torch.autograd.Function):
    """Adds a gradient that hangs on the mean over all tokens, as some routers of experts do."""

    @staticmethod
    def forward(context: Any, scores: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(scores)
        return scores.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (scores,) = context.saved_tensors
        return gradient + 1e-2 * gradient.mean() + 1e-3 * scores.mean(dim=(0, 1)) ** 3


class _Doubled(_Balanced):
    """Has a backward pass of its own, and the same gradients however a batch is cut."""

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2.0 * gradient


class BalancedInBackward(Base):
    function: type[torch.autograd.Function] = _Balanced

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        applied: torch.Tensor = type(self).function.apply(super().forward(tokens))
        return applied


class DoubledInBackward(BalancedInBackward):
    function = _Doubled


class Routed(Base):
    """Has a router that the loss hardly sees."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.run(self.words(tokens))
        shares = self.router(hidden).softmax(dim=-1)
        return self.head(hidden + 1e-3 * shares[..., :1]), shares


def balanced_loss(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    logits, shares = outputs
    balance = (shares > 0.4).float().mean(dim=(0, 1)) * shares.mean(dim=(0, 1))
    return plain_loss(logits, targets) + 3e-5 * balance.sum()


def balanced_sum(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    return balanced_loss(outputs, targets) * targets.numel(), targets.numel()


def plain_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def train(kind: type[Base], loss_fn: Any, plan: ParallelPlan) -> str:
    """Return the words of the refusal of a step, nothing without one."""
    job = runtime.init(plan, shows_progress=False)
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)
    try:
        engine = job.prepare(
            made(kind),
            loss_fn=loss_fn,
            optimizer=lambda held: torch.optim.SGD(held, lr=0.1),
            example_inputs=tokens,
        )
        engine.step(tokens, targets)
    except ParaplanError as refusal:
        return str(refusal)
    return ""


def test_a_small_term_that_compares_the_tokens_of_a_batch_is_refused_by_its_gradients(ranks: RankHarness) -> None:
    said = ranks.run_alone(train, Routed, balanced_loss, IN_PARTS)
    assert "gradients of two sequences together are not made up of those of each (the gradient of " in said
    assert all(
        "gradients of two sequences together" in one for one in ranks.run(train, Routed, balanced_loss, STAGES, size=2)
    )
    assert not ranks.run_alone(train, Routed, balanced_loss, ParallelPlan(micro_batch_size=BATCH))


def test_gradients_that_a_backward_pass_adds_are_compared(ranks: RankHarness) -> None:
    assert "gradients of two sequences together" in ranks.run_alone(train, BalancedInBackward, plain_loss, IN_PARTS)
    assert not ranks.run_alone(train, DoubledInBackward, plain_loss, IN_PARTS)
