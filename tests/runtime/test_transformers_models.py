"""Tiny models of transformers, unmodified, with their layers split: loss, norm and every gradient of one process."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from tiny_transformers import FAMILIES, TOKENS, VOCABULARY, build

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan

pytestmark = pytest.mark.ranks

BATCH = 8
# A norm over all heads; latent attention that its own plan leaves whole; an activation that is an autograd.Function.
LARGELY_WHOLE = {"olmo2", "deepseek_v3", "bloom"}


def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def compare(families: list[str], plan: ParallelPlan, more: dict[str, Any]) -> dict[str, tuple[float, str, float]]:
    """Return for each family the largest relative error, where it lies, and the share of the parameters held here."""
    logging.disable()
    job = runtime.init(plan)
    return {family: _compare_one(family, job, more) for family in families}


def _compare_one(family: str, job: runtime.Job, more: dict[str, Any]) -> tuple[float, str, float]:
    plan = job.plan
    torch.manual_seed(0)
    model = build(family, **more)
    with torch.no_grad():
        for parameter in model.parameters():  # so that biases and norms take part too
            parameter.add_(torch.randn_like(parameter) * 0.05)
    reference = copy.deepcopy(model)
    tokens = torch.randint(1, VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected_loss = loss_fn(reference(input_ids=inputs), targets)
    expected_loss.backward()
    expected = {name: value.grad for name, value in reference.named_parameters() if value.grad is not None}
    engine = job.prepare(
        model, loss_fn=loss_fn, optimizer=lambda held: torch.optim.SGD(held, lr=0.0), max_grad_norm=1e9, verify="off"
    )
    share = slice(*(BATCH // plan.dp * (job.mesh.coordinate("dp") + step) for step in (0, 1)))
    loss = engine.step({"input_ids": inputs[share]}, targets[share])
    norm = torch.nn.utils.get_total_norm(expected.values())
    errors = {
        "loss": abs(loss / expected_loss - 1).item(),
        "norm": abs(engine.grad_norm / norm - 1).item(),
    }
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, parameter in engine.parameters.items():
        if name in expected:
            difference = (engine.whole(name, parameter.grad) - expected[name]).abs().max()
            # Biases of keys have a gradient of nothing but rounding.
            errors[name] = (difference / max(expected[name].abs().max(), 1e-3 * largest)).item()
    worst = max(errors, key=lambda name: errors[name])
    held = sum(parameter.numel() for parameter in engine.parameters.values())
    return errors[worst], worst, held / sum(parameter.numel() for parameter in reference.parameters())


def assert_equal(families: list[str], plan: ParallelPlan, ranks: RankHarness, **more: Any) -> list[dict[str, Any]]:
    by_rank = ranks.run(compare, families, plan, more, size=plan.world_size, timeout_s=200.0)
    for found in by_rank:
        for family, (error, where, _) in found.items():
            assert error < 1e-5, f"{family}: {where}"
    return by_rank


def test_unmodified_models_compute_the_same_with_split_layers(ranks: RankHarness) -> None:
    # Others are split with their tokens, below, or as one of these: fused and separate projections, groups of heads,
    # norms of queries, biases, parallel branches, rotary, learned and sloped positions, tied and scaled logits, stacked
    # experts, shared ones, latent attention that its own plan leaves whole.
    families = ["gemma2", "gpt2", "mpt", "qwen2_moe", "deepseek_v3", "bert"]  # the rest of these are bundled or alike
    families += with_all([family for family in FAMILIES if family not in families])
    plan = ParallelPlan(tp=2, micro_batch_size=BATCH)
    for found in assert_equal(families, plan, ranks):
        for family, (_, _, share) in found.items():
            # Half of the layers' parameters, and the embedding, the norms and the head.
            assert family in LARGELY_WHOLE or share < 0.61, (family, share)


def test_unmodified_models_compute_the_same_with_split_tokens(ranks: RankHarness) -> None:
    plan = ParallelPlan(tp=2, sequence_parallel=True, micro_batch_size=BATCH, recompute="full")
    families = ["falcon", "gpt_oss"]  # parallel branches, experts and sinks
    families += with_all(["qwen3", "olmo2", "gpt2", "deepseek_v3", "llama", "gemma2", "gpt_neox", "qwen2_moe"])
    assert_equal(families, plan, ranks)


@pytest.mark.with_all  # the plan with split tokens in place of replicas, below, and of other models in three dimensions
def test_unmodified_models_compute_the_same_in_three_dimensions(ranks: RankHarness) -> None:
    plan = ParallelPlan(
        dp=2, tp=2, pp=2, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=2
    )
    assert_equal(["gpt2", "llama", "qwen2", "qwen3", "mixtral"], plan, ranks)


def test_unmodified_models_compute_the_same_with_some_tokens_on_each_rank(ranks: RankHarness) -> None:
    """Rotary and learned positions, two heads of keys to four of queries, and experts that see tokens one by one.

    Four ranks for two heads of queries to one of keys, which ranks repeat and then gather; the kinds of positions, and
    masks of both directions, with two ranks.
    """
    options = {"micro_batch_size": BATCH}
    families = ["llama", "gemma3_text", "olmo2", "phi3", "stablelm", "gpt_neox", "gpt2", "falcon", "olmoe", "bert"]
    # Learned positions are bert's too, and gpt2 is checked with split tokens in test_plan_rank.
    four, two = ["gemma3_text"], ["bert", *with_all(["olmoe", "gpt2", "olmo2"])]
    few = {"num_attention_heads": 2, "num_key_value_heads": 1}
    assert_equal(four, ParallelPlan(cp=4, recompute="selective", **options), ranks, **few)
    for family in with_all([one for one in families if one not in four]):
        assert_equal([family], ParallelPlan(cp=4, **options), ranks)
    assert_equal(two, ParallelPlan(cp=2, **options), ranks)
    plan = ParallelPlan(cp=2, tp=2, sequence_parallel=True, recompute="full", **options)
    # Own models stand there in test_plan_equality; attention with sinks runs on all tokens, which ranks of tp share.
    for family in with_all(["gpt_oss", *families, "bloom"]):
        assert_equal([family], plan, ranks)
    plan = ParallelPlan(cp=2, pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=BATCH // 2)
    for family in with_all(["gpt2", "mixtral", "llama", "qwen2"]):  # own models stand there in test_plan_equality
        assert_equal([family], plan, ranks)


@pytest.mark.with_all  # as above: eight ranks of an own model, in half precision, are in test_context_parallel
def test_unmodified_models_compute_the_same_with_tokens_layers_and_stages_split(ranks: RankHarness) -> None:
    plan = ParallelPlan(
        cp=2, tp=2, pp=2, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=4
    )
    assert_equal(["llama", "qwen2", "gpt2", "mixtral"], plan, ranks)
