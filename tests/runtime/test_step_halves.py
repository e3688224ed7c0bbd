"""`engine.backward` and `engine.update`, the halves of `engine.step`; and what evaluation leaves as it was."""

from __future__ import annotations

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import TOKENS, VOCABULARY, Decoder, loss_fn

from paraplan import runtime
from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.engine import Engine

BATCH = 8


def engine_of(plan: ParallelPlan) -> Engine:
    torch.manual_seed(0)
    return runtime.init(plan, shows_progress=False).prepare(
        Decoder(2),
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        max_grad_norm=0.5,
        example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
    )


def batch_of(plan: ParallelPlan) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[:3, 2:] = -100
    size = BATCH // plan.dp
    place = torch.distributed.get_rank() if plan.dp > 1 else 0
    return inputs[place * size : (place + 1) * size], targets[place * size : (place + 1) * size]


def in_halves(plans: list[ParallelPlan]) -> list[tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Return losses and parameters of two steps in halves, and the gradients between the first two."""
    results = []
    for plan in plans:
        engine, losses, between = engine_of(plan), [], {}
        for _ in range(2):
            engine.backward(*batch_of(plan))  # dropped by the one that follows
            losses.append(engine.backward(*batch_of(plan)).item())
            between = between or {name: engine.whole(name, one.grad).clone() for name, one in engine.parameters.items()}
            engine.update()
        assert engine.num_steps == 2
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
        results.append((losses, {name: engine.whole(name).clone() for name in engine.parameters}, between))
    return results


PLANS = [
    ParallelPlan(dp=2, micro_batch_size=2, num_microbatches=2),
    *with_all([ParallelPlan(dp=2, micro_batch_size=4, zero_stage=3)]),
    ParallelPlan(tp=2, micro_batch_size=4, num_microbatches=2),
]


@pytest.mark.ranks
def test_two_halves_are_a_step_with_the_gradients_of_the_batch_between_them(ranks: RankHarness) -> None:
    torch.manual_seed(0)
    model, plain = Decoder(2), ParallelPlan(micro_batch_size=BATCH)
    inputs, targets = batch_of(plain)
    loss_fn(model(inputs), targets).backward()
    engine = engine_of(plain)
    losses = [engine.step(inputs, targets).item() for _ in range(2)]
    alone = in_halves([plain, ParallelPlan(micro_batch_size=2, num_microbatches=4)])
    for results in [alone, *ranks.run(in_halves, PLANS, size=2)]:
        for found, parameters, between in results:
            assert found == pytest.approx(losses, rel=1e-5)
            for name, one in model.named_parameters():
                torch.testing.assert_close(between[name], one.grad, rtol=1e-4, atol=1e-6)
                torch.testing.assert_close(parameters[name], engine.parameters[name].detach(), rtol=1e-4, atol=1e-6)


def test_the_second_half_needs_the_first() -> None:
    plan = ParallelPlan(micro_batch_size=BATCH)
    engine = engine_of(plan)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"engine\.update without engine\.backward before it"):
            engine.update()
        engine.step(*batch_of(plan))


def test_evaluation_leaves_frozen_modules_in_evaluation() -> None:
    plan = ParallelPlan(micro_batch_size=BATCH)
    engine = engine_of(plan)
    frozen = engine.module.layers[0].eval()
    engine.eval_step(*batch_of(plan))
    assert not any(module.training for module in frozen.modules())
    assert engine.module.training
    assert all(isinstance(module, nn.Module) and module.training for module in engine.module.layers[1].modules())
