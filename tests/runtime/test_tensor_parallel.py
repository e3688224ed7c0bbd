"""Splitting the layers of blocks: what is refused and why, dropout, and clipping."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from torch import nn
from training_cases import HIDDEN, TOKENS, AttentionLayer, Decoder, TokenPairs, Transformer, loss_fn

from paraplan import runtime
from paraplan.errors import ParaplanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checks.references import Verify
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.split.layers import BlockSplit, LayerRole
from paraplan.runtime.split.regions import split_block

TWO_PARTS = ParallelPlan(tp=2, micro_batch_size=12)
TOKENS_SPLIT = TWO_PARTS.replace(sequence_parallel=True)


def prepared(model: nn.Module, plan: ParallelPlan, *, verify: Verify = "auto") -> runtime.Engine:
    return runtime.init(plan).prepare(
        model,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
        verify=verify,
    )


class ThreeHeads(AttentionLayer):
    def __init__(self) -> None:
        super().__init__(num_heads=3)
        self.qkv, self.out = nn.Linear(HIDDEN, 36), nn.Linear(12, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, tokens, 3, 3, 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value)
        return hidden + self.out(attended.transpose(1, 2).reshape(batch, tokens, 12))


class NoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)


class Normed(AttentionLayer):
    """A norm over all heads stands behind the projection, so ranks would have to bring theirs together."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_norm = nn.LayerNorm(HIDDEN)
        self.mixing = nn.Linear(HIDDEN, HIDDEN)
        nn.utils.parametrizations.weight_norm(self.down)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + self.inner_norm(self.mixing(hidden)))


class Secretive(AttentionLayer):
    """Changes a gradient by the mean of all of it where no torch function shows it, so that only numbers do."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        heads = self.up(hidden).view(batch, tokens, 4, width)  # sizes of the whole, which plain parts do not have
        if heads.requires_grad:
            heads.register_hook(lambda gradient: gradient - gradient.mean())
        return hidden + self.down(heads.flatten(2))


def _refusals() -> list[str]:
    cases = [
        (Transformer(ThreeHeads), TWO_PARTS),
        (Transformer(NoLinear), TWO_PARTS),
        (nn.Bilinear(2, 2, 2), TWO_PARTS),
        (Transformer(Secretive), TWO_PARTS),
    ]
    said = []
    for model, plan in cases:
        with pytest.raises(ParaplanError) as refusal:
            prepared(model, plan)
        said.append(str(refusal.value))
    return said


@pytest.mark.ranks
def test_what_cannot_be_split_says_why_on_every_rank(ranks: RankHarness) -> None:
    for heads, nothing, no_blocks, unequal in ranks.run(_refusals, size=2):
        assert "layers.0 (ThreeHeads) cannot be split: tp=2 does not divide" in heads
        assert "3" in heads
        assert "qkv" in heads
        assert "no layer of layers.0 (NoLinear) can be split: none is linear" in nothing
        assert "Bilinear has no repeated blocks to split" in no_blocks
        assert "layers.0 split over tp=2 does not compute what it computes whole: relative error" in unequal


def _said_of(model: nn.Module, plan: ParallelPlan) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paraplan.runtime.assembly").addHandler(handler)
    prepared(model, plan)
    return said


def _left_whole() -> list[str]:
    return _said_of(Transformer(Normed), TWO_PARTS)


def _joined() -> list[str]:
    return _said_of(Decoder(2), TOKENS_SPLIT)


@pytest.mark.ranks
def test_blocks_that_look_at_all_tokens_have_them_under_sequence_parallelism_and_are_named(ranks: RankHarness) -> None:
    (said,), none = ranks.run(_joined, size=2)  # whose layers sum up along the tokens
    assert "compute with the tokens of all ranks:\n  layers.*" in said
    assert none == []


@pytest.mark.ranks
def test_a_layer_that_is_left_whole_is_named_once(ranks: RankHarness) -> None:
    first, second = ranks.run(_left_whole, size=2)
    assert len(first) == 1
    assert "mixing: layer_norm works along the output of mixing" in first[0]
    assert "down: its weight is computed from other parameters" in first[0]
    assert "qkv" not in first[0]
    assert second == []


def _odd_tokens() -> str:
    engine = prepared(Transformer(), TOKENS_SPLIT)
    with pytest.raises(ParaplanError) as refusal:
        engine.step(torch.zeros(12, 5, dtype=torch.long), torch.zeros(12, 5, dtype=torch.long))
    return str(refusal.value)


@pytest.mark.ranks
def test_tokens_that_do_not_divide_are_refused_with_the_shape(ranks: RankHarness) -> None:
    for said in ranks.run(_odd_tokens, size=2):
        assert "hidden states of shape (12, 5, 16) do not divide along their tokens over tp=2 ranks" in said


def _values_left() -> set[tuple[int, ...]]:
    """Shapes of the weights that are whole and have values beside the engine's, before Python looks for circles."""
    gc.collect()
    gc.disable()
    try:
        engine = prepared(Transformer(), TWO_PARTS, verify="off")  # which keeps a whole copy until the first step
        own = {id(held) for held in engine.module.parameters()}
        held = [one for one in gc.get_objects() if type(one) is nn.Parameter and not one.is_meta]
        return {tuple(one.shape) for one in held if id(one) not in own}
    finally:
        gc.enable()


@pytest.mark.ranks
def test_the_copies_that_a_split_is_checked_with_leave_no_values(ranks: RankHarness) -> None:
    assert ranks.run(_values_left, size=2, is_fresh=True) == [set(), set()]


class Dropping(AttentionLayer):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = F.dropout(F.gelu(self.up(self.mlp_norm(hidden))), 0.3, self.training)
        return hidden + F.dropout(self.down(inner), 0.3, self.training)


def _trained_with_dropout(plan: ParallelPlan) -> tuple[list[float], dict[str, torch.Tensor]]:
    job = runtime.init(plan)
    torch.manual_seed(0)
    model = Transformer(Dropping)
    for layer in model.layers:
        del layer.qkv, layer.out, layer.attention_norm
    engine = prepared(model, plan)
    losses = [
        engine.step(*batch).item() for batch, _ in zip(job.shard(TokenPairs(), batch_size=12), range(4), strict=False)
    ]
    split = ("up", "down.w", "embedding", "head")
    whole = {name: value for name, value in engine.parameters.items() if not any(part in name for part in split)}
    return losses, {name: value.detach().clone() for name, value in whole.items()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plan", [TOKENS_SPLIT.replace(recompute="full"), *with_all([TWO_PARTS])], ids=ParallelPlan.describe
)
def test_whole_parameters_stay_equal_on_all_ranks_under_dropout(plan: ParallelPlan, ranks: RankHarness) -> None:
    (losses, parameters), (other_losses, other_parameters) = ranks.run(_trained_with_dropout, plan, size=2)
    assert losses == other_losses
    assert parameters.keys() == other_parameters.keys()
    for name, value in parameters.items():
        assert torch.equal(value, other_parameters[name]), name


class Conv1D(nn.Module):
    """A linear layer as transformers' GPT-2 has it, with its weight as [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.ones(nx, nf)), nn.Parameter(torch.ones(nf))


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("make", [Conv1D, lambda outputs, inputs: nn.Linear(inputs, outputs)], ids=["Conv1D", "Linear"])
def test_the_output_of_a_split_layer_with_a_bias_has_16_bits_under_autocast(kind, make) -> None:
    layer = make(8, 4)
    role = LayerRole(kind, (8,) if kind == "column" else (4,))
    alone = TensorGroup(size=2, index=0, handle=None)
    block = nn.Sequential(layer)
    split_block(block, BlockSplit(roles={"0": role}, whole={}), alone, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = block(torch.ones(2, 3, 4 if kind == "column" else 2))
    assert output.shape == (2, 3, 4 if kind == "column" else 8)
    assert output.dtype == torch.bfloat16
