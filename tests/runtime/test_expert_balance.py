"""Balancing losses that a mixture of experts computes itself: of the tokens of all ranks, as in one process."""

from __future__ import annotations

import copy
import logging
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from tiny_transformers import TOKENS, VOCABULARY, build

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec
from paraplan.runtime.expert_balance import without_balance
from paraplan.runtime.fake.run import trace_memory

pytestmark = pytest.mark.ranks

BATCH, WEIGHT = 8, 0.5  # of the balance, which is 0.001 to 0.02 in training: too little to see a wrong one by
PLANS = {
    "replicas": ParallelPlan(dp=2, micro_batch_size=4),
    "shards of weights and experts": ParallelPlan(dp=2, ep=2, zero_stage=3, micro_batch_size=4),
    "some tokens": ParallelPlan(cp=2, micro_batch_size=BATCH),
    "tokens, experts and layers": ParallelPlan(dp=2, cp=2, ep=2, tp=2, micro_batch_size=4),
}


def balanced(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten()) + WEIGHT * outputs.aux_loss


def batch_of(*, padded: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Sequences of unlike lengths, with more of the targets among the first."""
    tokens = torch.randint(1, VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = {"input_ids": tokens[:, :-1]}, tokens[:, 1:].clone()
    if padded:
        lengths = torch.tensor([8, 8, 7, 8, 3, 2, 5, 4])
        mask = torch.arange(TOKENS) < lengths[:, None]
        inputs["attention_mask"] = mask.long()
        targets[~mask] = -100
    return inputs, targets


def train(family: str, plan: ParallelPlan, padded: bool) -> tuple[float, float, float, list[str]]:
    """Return the errors of the loss, in evaluation and in training, and of the worst gradient, and what was said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paraplan").addHandler(handler)
    torch.manual_seed(0)
    model = build(family, output_router_logits=True)
    reference = copy.deepcopy(model)
    inputs, targets = batch_of(padded=padded)
    expected = balanced(reference(**inputs), targets)
    expected.backward()
    gradients = {name: one.grad for name, one in reference.named_parameters() if one.grad is not None}
    job = runtime.init(plan, shows_progress=False)
    engine = job.prepare(
        model,
        loss_fn=balanced,
        optimizer=lambda held: torch.optim.SGD(held, lr=0.0),
        example_inputs={name: one[:2] for name, one in inputs.items()},
    )
    size = BATCH // plan.dp
    rows = slice(size * job.mesh.coordinate("dp"), size * (job.mesh.coordinate("dp") + 1))
    own = {name: one[rows] for name, one in inputs.items()}, targets[rows]
    losses = engine.eval_step(*own), engine.step(*own)
    largest = max(one.abs().max() for one in gradients.values())
    worst = max(
        ((engine.whole(name, one.grad) - gradients[name]).abs().max() / largest).item()
        for name, one in engine.parameters.items()
        if name in gradients
    )
    evaluated, trained = (abs(loss.item() / expected.item() - 1) for loss in losses)
    return evaluated, trained, worst, said


@pytest.mark.parametrize(
    "name",
    ["shards of weights and experts", *with_all([one for one in PLANS if one != "shards of weights and experts"])],
)
def test_the_balance_is_that_of_the_tokens_of_all_ranks(name: str, ranks: RankHarness) -> None:
    plan = PLANS[name]
    families = ["mixtral", *with_all(["qwen3_moe", "olmoe", "gpt_oss"])]
    for family in families:
        for padded in (False, True)[: 1 if plan.cp > 1 else 2]:
            for evaluated, trained, worst, said in ranks.run(train, family, plan, padded, size=plan.world_size):
                assert max(evaluated, trained, worst) < 1e-5, (family, padded)
                assert not [line for line in said if "compares samples" in line]


def test_micro_batches_are_balanced_one_by_one_and_the_run_says_so(ranks: RankHarness) -> None:
    plan = ParallelPlan(dp=2, num_microbatches=2, micro_batch_size=2)
    found = ranks.run(train, "mixtral", plan, False, size=2)
    assert any("compares samples" in line for line in found[0][3])


@pytest.mark.parametrize(
    "plan", [*with_all([ParallelPlan(dp=2)]), ParallelPlan(cp=2)], ids=lambda plan: plan.describe()
)
def test_a_run_without_values_balances_too(plan: ParallelPlan) -> None:
    training = TrainingSpec(global_batch_size=plan.global_batch_size, seq_length=TOKENS, precision="fp32")
    made = trace_memory(partial(build, "qwen3_moe", output_router_logits=True), plan=plan, training=training)
    assert made.activation_bytes > 0


@pytest.mark.parametrize("own", ["raises", "computes something else"])
def test_another_function_of_that_name_is_left_alone(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral")

    def function(gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None) -> torch.Tensor:
        if own == "raises":
            raise RuntimeError("other logits are meant")
        return gate_logits[0].sum()

    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "load_balancing_loss_func", function)
    with without_balance(model):
        assert module.load_balancing_loss_func is function
    monkeypatch.undo()
    with without_balance(model):
        assert module.load_balancing_loss_func is not function
        assert module.load_balancing_loss_func((torch.ones(4, 2),), 2, 1) == 0.0
