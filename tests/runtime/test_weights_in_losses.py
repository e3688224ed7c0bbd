"""Losses that compute with weights: those of the model, and trained ones of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from odd_models import BATCH, LENGTH, WORDS, Base, made
from rank_harness import RankHarness
from torch import nn

from paraplan import runtime
from paraplan.errors import ParaplanError
from paraplan.plan.parallel import ParallelPlan

pytestmark = pytest.mark.ranks

DDP = ParallelPlan(dp=2, micro_batch_size=BATCH // 2)


PIPELINE = ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=BATCH // 2, num_microbatches=2)


def train(plan: ParallelPlan, *, penalizes: bool = False, weighs: bool = False, compares: bool = False) -> str | float:
    """Return the loss of a step, or the words of the refusal."""
    job = runtime.init(plan, shows_progress=False)
    model, weights = made(Base), nn.Parameter(torch.ones(WORDS))

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy((outputs * weights).flatten(0, 1), targets.flatten())
        if compares:  # with values of its own
            first = model.layers[0].norm.weight
            return loss + (first - torch.ones(len(first))).square().sum()
        return loss + 0.1 * sum(one.square().sum() for one in model.parameters()) if penalizes else loss

    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator).chunk(job.dp, dim=1)[job.dp_rank]
    try:
        engine = job.prepare(
            model,
            loss_fn=loss_fn,
            optimizer=lambda held: torch.optim.SGD([*held, weights] if weighs else held, lr=0.1),
            verify="auto" if compares else "off",
        )
        return engine.step(tokens, targets).item()
    except ParaplanError as refusal:
        return str(refusal)


def test_a_penalty_of_weights_that_nothing_verifies_is_refused_where_ranks_have_parts_of_them(
    ranks: RankHarness,
) -> None:
    expected = ranks.run_alone(penalized, ParallelPlan(micro_batch_size=BATCH))
    assert ranks.run(penalized, DDP, size=2) == [pytest.approx(expected, rel=1e-5)] * 2
    for plan in (ParallelPlan(tp=2, micro_batch_size=BATCH), DDP.replace(zero_stage=1)):
        assert all("loss_fn computes with " in said for said in ranks.run(penalized, plan, size=2))
    sharded = ranks.run(penalized, DDP.replace(zero_stage=3), size=2)
    assert all("a weight of the model, of which ranks have shards" in said for said in sharded)


def penalized(plan: ParallelPlan) -> str | float:
    return train(plan, penalizes=True)


def test_a_weight_that_another_stage_holds_is_refused_in_a_loss(ranks: RankHarness) -> None:
    assert isinstance(ranks.run_alone(compared, ParallelPlan(micro_batch_size=BATCH)), float)
    said = ranks.run(compared, PIPELINE, size=2)
    assert "pp=2: the loss, or a hook, computes with a parameter that another pipeline stage holds" in str(said)


def compared(plan: ParallelPlan) -> str | float:
    return train(plan, compares=True)


class Keeping(Base):
    """Keeps its hidden states, for its loss."""

    def run(self, hidden: torch.Tensor, *beside: object) -> torch.Tensor:
        self.kept = super().run(hidden)
        return self.kept


def kept_losses(plan: ParallelPlan) -> list[float]:
    """Return the losses of steps, by what the model has kept of its pass beside its outputs."""
    job, model = runtime.init(plan, shows_progress=False), made(Keeping)

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten()) + 0.1 * model.kept.square().mean()

    engine = job.prepare(model, loss_fn=loss_fn, optimizer=lambda held: torch.optim.SGD(held, lr=0.1))
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator).chunk(job.dp, dim=1)[job.dp_rank]
    return [engine.step(tokens, targets).item() for _ in range(4)]


def test_what_a_model_keeps_of_its_pass_is_read_by_a_loss_also_where_a_step_is_checked(ranks: RankHarness) -> None:
    expected = ranks.run_alone(kept_losses, ParallelPlan(micro_batch_size=BATCH))
    assert ranks.run(kept_losses, DDP.replace(zero_stage=3), size=2) == [pytest.approx(expected, rel=1e-5)] * 2


def test_trained_weights_of_a_loss_are_refused_under_plans_of_several_ranks(ranks: RankHarness) -> None:
    assert isinstance(ranks.run_alone(weighed, ParallelPlan(micro_batch_size=BATCH)), float)
    for said in ranks.run(weighed, DDP, size=2):
        assert "the optimizer has a parameter of shape [17] that is not among those it was given" in said


def weighed(plan: ParallelPlan) -> str | float:
    return train(plan, weighs=True)
