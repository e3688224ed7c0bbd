"""Attention of every kind over split tokens: written out, with sinks, chunks and windows, latent, and any mask."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from tiny_transformers import TOKENS, VOCABULARY, build
from torch import nn
from training_cases import HIDDEN, AttentionLayer, GroupedLayer, Transformer

from paraplan import runtime
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stack import StackSettings
from paraplan.plan.training import TrainingSpec

pytestmark = pytest.mark.ranks

BATCH = 4
MORE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 4},
    "llama4_text": {"attention_chunk_size": 4, "no_rope_layers": [1, 0]},
    "deepseek_v3": {"num_key_value_heads": 4},
}
ON_ALL_TOKENS = ("bloom", "gpt_oss", "mpt")
"""Families with attention that is neither torch's nor one of transformers' own."""


class _Said(logging.Handler):
    """Keeps what is said of cp: parts that have the tokens of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        logger = logging.getLogger("paraplan.runtime.assembly")
        logger.handlers, logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("cp="):
            self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def off(job: runtime.Job, model: nn.Module, inputs: Any, targets: torch.Tensor) -> tuple[float, str]:
    """Return the largest relative error of loss, norm and gradients against one process, and where it lies."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    alone: Any = copy.deepcopy(model)
    expected_loss = loss_fn(alone(**inputs) if isinstance(inputs, dict) else alone(inputs), targets)
    expected_loss.backward()
    expected = {name: held.grad for name, held in alone.named_parameters() if held.grad is not None}
    engine = job.prepare(
        model,
        loss_fn=loss_fn,
        optimizer=lambda held: torch.optim.SGD(held, lr=0.0),
        max_grad_norm=1e9,
        verify="off",  # the comparison with one process is the test
        example_inputs=inputs,
    )
    errors = {"loss": abs(engine.step(inputs, targets) / expected_loss - 1).item()}
    norm = torch.nn.utils.get_total_norm(expected.values())
    errors["norm"] = abs(engine.grad_norm / norm - 1).item()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, parameter in engine.parameters.items():
        if name in expected:
            difference = (engine.whole(name, parameter.grad) - expected[name]).abs().max()
            errors[name] = (difference / max(expected[name].abs().max(), 1e-3 * largest)).item()
    where = max(errors, key=lambda name: errors[name])
    return errors[where], where


def of_families(
    families: list[str],
    plan: ParallelPlan | PlanFile,
    more: Callable[[], dict[str, torch.Tensor]],
    attention: str | None,
) -> dict[str, tuple[float, str]]:
    """Return the largest error of each family, with inputs beside the tokens; None leaves attention to the family.

    Those of `ON_ALL_TOKENS` alone have a part that runs on the tokens of all ranks.
    """
    said = _Said()
    torch.manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    job, found = runtime.init(plan), {}
    for family in families:
        torch.manual_seed(0)
        model: Any = build(family, **MORE.get(family, {}))
        if attention is not None:
            model.set_attn_implementation(attention)
        found[family] = off(job, model, {"input_ids": tokens[:, :-1].contiguous()} | more(), tokens[:, 1:])
        if job.is_main:
            assert bool(said.take()) == (family in ON_ALL_TOKENS), family
    return found


def assert_right(found: list[dict[str, tuple[float, str]]]) -> None:
    for by_family in found:
        for family, (error, where) in by_family.items():
            assert error < 1e-5, f"{family}: {where}"


def nothing_more() -> dict[str, torch.Tensor]:
    return {}


def packed() -> dict[str, torch.Tensor]:
    """Three documents in every sequence, one of them over the border between two ranks."""
    return {"position_ids": torch.tensor([0, 1, 0, 1, 2, 3, 0, 1]).repeat(BATCH, 1)}


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, 3:] = mask[2, 5:] = 0
    return {"attention_mask": mask}


def blocks() -> dict[str, torch.Tensor]:
    """A mask of all pairs of tokens: those of one document, of which the sequences have different ones."""
    documents = torch.tensor([[0] * 8, [0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1, 1, 1]])
    allowed = (documents[:, :, None] == documents[:, None]).tril()
    return {"attention_mask": torch.zeros(allowed.shape).masked_fill(~allowed, -1e9)[:, None]}


def test_decoders_of_every_kind_of_attention_train_over_split_tokens(ranks: RankHarness) -> None:
    plan = ParallelPlan(cp=2, micro_batch_size=BATCH)
    families = ["gpt_oss", "deepseek_v3", *with_all(["llama4_text", "mistral"])]  # windows, as the first one's
    assert_right(ranks.run(of_families, families, plan, nothing_more, None, size=2))
    # Learned positions are met with masks, below; latent attention is written out as others are, once it has its heads.
    # GPT-2 gives its blocks masks by their place, others by name.
    families = ["gpt2", "gemma2", *with_all(["llama", "deepseek_v3"])]
    assert_right(ranks.run(of_families, families, plan, nothing_more, "eager", size=2))


@pytest.mark.with_all  # two ranks split the heads and the tokens of these, and four both of others, in other tests
def test_heads_and_tokens_are_split_together(ranks: RankHarness) -> None:
    plan = ParallelPlan(cp=2, tp=2, sequence_parallel=True, recompute="full", micro_batch_size=BATCH)
    families = ["gpt_oss", "llama4_text"]
    assert_right(ranks.run(of_families, families, plan, nothing_more, None, size=4))


@pytest.mark.parametrize("more", [packed, padded, blocks])
def test_masks_of_documents_and_of_padding_hold_over_split_tokens(ranks: RankHarness, more: Any) -> None:
    plan = ParallelPlan(cp=2, micro_batch_size=BATCH)
    families = {packed: ["llama"], padded: ["llama4_text"], blocks: ["gpt_oss"]}[more]
    # A mask is cut before attention reads it, whatever its kind: each kind is met by another kind of attention.
    all_families = ["gpt_oss", "deepseek_v3"] if more is blocks else ["llama", "gpt_oss", "llama4_text", "gpt2"]
    families = with_all(all_families) or families
    assert_right(ranks.run(of_families, families, plan, more, None, size=2))


CHUNKED = TrainingSpec(
    global_batch_size=BATCH, seq_length=TOKENS, precision="fp32", loss="chunked", stack=StackSettings(mlp_tile=3)
)
"""Feed-forward layers over tiles that do not divide the tokens, and the loss over chunks."""


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(cp=2, micro_batch_size=BATCH, recompute="full"),
        ParallelPlan(tp=2, micro_batch_size=BATCH, sequence_parallel=True),
        *with_all(  # whole layers of whole sequences
            [
                ParallelPlan(dp=2, zero_stage=3, micro_batch_size=BATCH),
                ParallelPlan(pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=BATCH // 2),
                ParallelPlan(tp=2, micro_batch_size=BATCH),
                ParallelPlan(dp=2, micro_batch_size=BATCH),
                ParallelPlan(cp=2, tp=2, micro_batch_size=BATCH, sequence_parallel=True),
            ]
        ),
    ],
    ids=lambda plan: plan.describe(),
)
def test_layers_over_tiles_and_losses_over_chunks_are_those_of_all_tokens(ranks: RankHarness, plan: Any) -> None:
    file = PlanFile(plan=plan, training=CHUNKED)
    # A head of its own, and the embedding's.
    families = with_all(["llama", "gpt2", "gemma2", "deepseek_v3"]) or ["llama" if plan.tp > 1 else "gpt2"]
    assert_right(ranks.run(of_families, families, file, nothing_more, None, size=plan.world_size))


class Filled(AttentionLayer):
    """Keys put together in a tensor made for them: of each token, and what all have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Parameter(torch.randn(1, 4, 1, 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        query, key, value = self.qkv(self.attention_norm(hidden)).view(batch, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4)
        keys = key.new_empty(batch, 4, tokens, 4)
        keys[..., :2].copy_(key[..., :2])
        keys[..., 2:].copy_(self.common.expand(batch, -1, tokens, -1))
        scores = torch.cat([query @ keys.mT, self.common[..., :1].expand(batch, -1, tokens, 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :-1]
        hidden = hidden + self.out((weights @ value).transpose(1, 2).reshape(batch, tokens, width))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


def _of_layers(plan: ParallelPlan) -> dict[str, tuple[float, str]]:
    tokens = torch.randint(24, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    job, found = runtime.init(plan), {}
    for layer in (GroupedLayer, Filled):
        torch.manual_seed(0)
        model = Transformer(layer, num_layers=2)
        found[layer.__name__] = off(job, model, tokens, tokens.roll(1))
    return found


def test_written_out_attention_is_split_by_heads(ranks: RankHarness) -> None:
    assert HIDDEN == 16
    assert_right(ranks.run(_of_layers, ParallelPlan(tp=2, micro_batch_size=BATCH), size=2))


class Apart(nn.Module):
    """A block whose attention, written out, is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Filled()
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.out(self.attention(hidden))


def _of_modules(plan: ParallelPlan) -> dict[str, tuple[float, str]]:
    tokens = torch.randint(24, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    return {"apart": off(runtime.init(plan), Transformer(Apart, num_layers=2), tokens, tokens.roll(1))}


def test_a_module_of_attention_that_is_written_out_has_the_tokens_of_all_ranks(ranks: RankHarness) -> None:
    assert_right(ranks.run(_of_modules, ParallelPlan(cp=2, micro_batch_size=BATCH), size=2))
