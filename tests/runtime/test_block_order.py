"""Ranks that compute every block together and run other blocks than each other are refused, not trained wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from odd_models import BATCH, LENGTH, WORDS, Base, loss_of, made
from rank_harness import RankHarness

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan

pytestmark = pytest.mark.ranks


class LayerDrop(Base):
    """Leaves blocks out by numbers that each rank draws for itself."""

    def run(self, hidden: torch.Tensor, *beside: Any) -> torch.Tensor:
        for layer in self.layers:
            if not self.training or random.random() < 0.5:  # noqa: S311
                hidden = layer(hidden)
        return hidden


class SwapsLate(Base):
    """Takes its blocks in another order from the tenth pass in training on, on odd ranks."""

    num_passes = 0

    def run(self, hidden: torch.Tensor, *beside: Any) -> torch.Tensor:
        self.num_passes += self.training and torch.is_grad_enabled()
        swaps = self.num_passes > 9 and torch.distributed.get_rank() % 2
        for layer in reversed(self.layers) if swaps else self.layers:
            hidden = layer(hidden)
        return hidden


class LeavesOutLate(Base):
    """Leaves its last block out from the third pass in training on, on odd ranks."""

    num_passes = 0

    def run(self, hidden: torch.Tensor, *beside: Any) -> torch.Tensor:
        self.num_passes += self.training and torch.is_grad_enabled()
        for layer in self.layers[: -1 if self.num_passes > 2 and torch.distributed.get_rank() % 2 else None]:
            hidden = layer(hidden)
        return hidden


class PythonNoise(Base):
    """Scales hidden states by numbers of Python's own, in training."""

    def run(self, hidden: torch.Tensor, *beside: Any) -> torch.Tensor:
        return super().run(hidden * (1.0 + random.random() * self.training))  # noqa: S311


def train(kind: type[Base], plan: ParallelPlan, num_steps: int, verify: Any = "off") -> tuple[int, str]:
    job = runtime.init(plan, shows_progress=False)
    random.seed(job.world.rank)
    engine = job.prepare(
        made(kind),
        loss_fn=loss_of,
        optimizer=lambda held: torch.optim.SGD(held, lr=0.1),
        example_inputs=torch.zeros(2, LENGTH, dtype=torch.long),
        verify=verify,
    )
    generator = torch.Generator().manual_seed(5)
    for step in range(num_steps):
        tokens, targets = torch.randint(WORDS, (2, BATCH // plan.dp, LENGTH), generator=generator)
        try:
            engine.step(tokens, targets)
        except UnsupportedPlanError as refusal:
            return step, str(refusal)
    return num_steps, ""


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (ParallelPlan(dp=2, zero_stage=3, micro_batch_size=BATCH // 2), "with zero_stage=3"),
        (ParallelPlan(cp=2, micro_batch_size=BATCH), "with cp=2"),
    ],
    ids=["zero", "cp"],
)
def test_blocks_that_one_rank_leaves_out_are_named_before_anything_is_gathered(
    ranks: RankHarness, plan: ParallelPlan, words: str
) -> None:
    for _, said in ranks.run(train, LayerDrop, plan, 3, size=2):
        assert "in one forward pass ranks enter " in said
        assert words in said


def test_passes_that_verify_a_plan_are_not_those_that_are_compared(ranks: RankHarness) -> None:
    plan = ParallelPlan(dp=2, zero_stage=3, micro_batch_size=BATCH // 2)
    for step, said in ranks.run(train, LeavesOutLate, plan, 4, "auto", size=2):
        assert step == 1  # whose check makes two passes more
        assert "ranks enter none of the blocks that are left and layers.3" in said


def test_an_order_that_changes_later_is_found_in_the_next_call(ranks: RankHarness) -> None:
    plan = ParallelPlan(dp=2, zero_stage=1, micro_batch_size=BATCH // 2)
    for step, said in ranks.run(train, SwapsLate, plan, 12, size=2):
        assert step == 10
        assert "ranks 0 and 1 have run other blocks in the last call" in said


def test_replicas_run_each_their_own_blocks(ranks: RankHarness) -> None:
    plan = ParallelPlan(dp=2, micro_batch_size=BATCH // 2)
    assert all(not said for _, said in ranks.run(train, LayerDrop, plan, 3, size=2))


def test_numbers_of_pythons_own_are_the_same_on_ranks_that_hold_one_copy_or_refused(ranks: RankHarness) -> None:
    for _, said in ranks.run(train, PythonNoise, ParallelPlan(tp=2, micro_batch_size=BATCH), 1, size=2):
        assert "draws random numbers by Python's random or NumPy, and ranks 0 and 1" in said
