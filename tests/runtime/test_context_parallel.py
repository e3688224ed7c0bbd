"""Sequences split over ranks: training as in one process, masks and dropout, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from tiny_transformers import VOCABULARY, build
from torch import nn
from training_cases import HIDDEN, TOKENS, AttentionLayer, Decoder, Transformer, loss_fn, train

from paraplan import runtime
from paraplan.errors import ParaplanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.split.context_attention import ContextAttention
from paraplan.runtime.split.context_parallel import own_random_numbers
from paraplan.runtime.split.forms import tensor_group

pytestmark = pytest.mark.ranks

TWO_PARTS = ParallelPlan(cp=2, micro_batch_size=4)


class Positions(Transformer):
    """Learned positions, found by the number of tokens, and a mask of its own for each head."""

    def __init__(self) -> None:
        super().__init__(Masked)
        self.positions = nn.Embedding(TOKENS, HIDDEN)
        self.slopes = nn.Buffer(torch.tensor([0.5, 1.0, 1.5, 2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])
        hidden = self.embedding(tokens) + self.positions(places)
        distance = (places[:, None] - places[None]).abs().float()
        mask = -(self.slopes[:, None, None] * distance)[None].to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.head(self.norm(hidden))


class Masked(AttentionLayer):
    """Attention with a penalty by distance (as ALiBi) of another strength in each head."""

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        heads = self.qkv(self.attention_norm(hidden)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - F.one_hot(targets, outputs.shape[-1])) ** 2).mean()


def of_shares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), F.one_hot(targets.flatten(), outputs.shape[-1]).float())


def of_spans(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Where an answer begins and ends: the tokens are the classes."""
    first, last = outputs[..., :2].unbind(-1)
    return F.cross_entropy(first, targets[:, 0] % TOKENS) + F.cross_entropy(last, targets[:, 1] % TOKENS)


def errors(model: nn.Module, loss: Any, inputs: Any, targets: torch.Tensor) -> dict[str, float]:
    """Return the relative errors of the loss and of every gradient against one process."""
    expected_loss = loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
    if isinstance(expected_loss, tuple):
        expected_loss = expected_loss[0] / expected_loss[1]
    expected_loss.backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    engine = runtime.init(TWO_PARTS).prepare(
        model,
        loss_fn=loss,
        optimizer=lambda held: torch.optim.SGD(held, lr=0.0),
        example_inputs=inputs,
        verify="off",  # the comparison with one process is the test
    )
    found = {"loss": abs(float(engine.step(inputs, targets) / expected_loss.detach() - 1))}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name in expected:
        difference = (engine.parameters[name].grad - expected[name]).abs().max()
        found[name] = float(difference / max(float(expected[name].abs().max()), 1e-3 * largest))
    return found


def _compared() -> list[dict[str, float]]:
    torch.set_default_dtype(torch.float64)  # what cancels leaves no more than the rounding of some CPUs in 32 bits
    torch.manual_seed(0)
    tokens, targets = torch.randint(24, (2, 4, TOKENS))
    positions, regression = Positions(), Positions()
    llama = build("llama")
    ids, labels = torch.randint(1, VOCABULARY, (2, 4, 8))
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, :3] = mask[2, :5] = 0
    labels[mask == 0] = -100

    def own_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())

    padded = {"input_ids": ids, "attention_mask": mask}
    return [
        errors(positions, loss_fn, tokens, targets),
        errors(regression, squared, tokens, targets),
        errors(Transformer(num_layers=1), of_shares, tokens, targets),
        errors(Transformer(lambda: AttentionLayer(num_heads=1)), loss_fn, tokens, targets),
        errors(Transformer(Hiding), hiding_loss, tokens, targets),
        *[errors(model, loss_fn, tokens, targets) for model in (Decoder(2), Transformer(LinearAttention))],
        errors(Transformer(Convolved), loss_fn, tokens, targets),
        errors(Decoder(2), of_even_targets, tokens, targets),
        errors(llama, own_loss, padded, labels),
    ]


def test_positions_masks_and_losses_are_those_of_whole_sequences(ranks: RankHarness) -> None:
    for cases in ranks.run(_compared, size=2, is_fresh=True):
        for found in cases:
            assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-5)


class Convolved(AttentionLayer):
    """Returns as many tokens as it is given, and looks at their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(HIDDEN, HIDDEN, 3, padding="same")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + self.near(hidden.transpose(1, 2)).transpose(1, 2))


class LinearAttention(AttentionLayer):
    """Sums over all tokens before a query is looked at."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        return hidden + self.out(query @ (key.mT @ value))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Hiding(AttentionLayer):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + Doubled.apply(self.out(hidden))


def of_even_targets(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a sum with the number of its targets, of which each rank has as many as fall to it."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    even = losses[targets.flatten() % 2 == 0]
    return even.sum(), even.numel()


def of_next_tokens(outputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def hiding_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss_fn(outputs, targets) + loss_fn(Doubled.apply(outputs), targets)


class Pooled(Transformer):
    """Adds the mean of a sequence to what it says of each token."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return logits + logits.mean(dim=1, keepdim=True)


class Shortened(Transformer):
    """Runs its blocks on half of the tokens that it is given."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens[:, ::2])


class BesideTower(Transformer):
    """Has a tower with more parameters than the blocks, which text does not run."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.tower = nn.ModuleList(AttentionLayer() for _ in range(3))


def _refusals() -> list[str]:
    tokens = torch.zeros(4, TOKENS, dtype=torch.long)
    cases: list[tuple[nn.Module, Any, Any]] = [
        (Transformer(), torch.zeros(4, 5, dtype=torch.long), loss_fn),
        (Pooled(num_layers=1), tokens, loss_fn),
        (Shortened(num_layers=2), tokens, loss_fn),
        (BesideTower(), tokens, loss_fn),
        (Transformer(num_layers=1), tokens + 15, of_spans),
        (Transformer(num_layers=1), torch.arange(4 * TOKENS).view(4, -1) % 24, of_next_tokens),
    ]
    said = []
    for model, inputs, loss in cases:
        with pytest.raises(ParaplanError) as refusal:
            runtime.init(TWO_PARTS).prepare(
                model, loss_fn=loss, optimizer=lambda held: torch.optim.SGD(held), example_inputs=inputs
            ).step(inputs, inputs)
        said.append(str(refusal.value))
    return said


def test_what_does_not_work_on_some_tokens_says_why(ranks: RankHarness) -> None:
    for odd, pooled, short, beside, spans, shifted in ranks.run(_refusals, size=2):
        assert "inputs of shape (4, 5) do not divide along their tokens over cp=2 ranks" in odd
        assert "what follows the blocks brings tokens together (mean), and ranks have some" in pooled
        assert "blocks take hidden states of shape" in short
        assert "cp=2: BesideTower ran without the blocks that divide its tokens" in beside
        assert "loss_fn does not run on some tokens of each sequence" in spans
        assert "where loss_fn shifts tokens (logits[:, :-1])" in shifted


class Dropping(AttentionLayer):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.dropout(self.up(hidden), 0.5, self.training)[..., :HIDDEN]


def _dropped_out() -> torch.Tensor:
    tokens = torch.zeros(4, 64, dtype=torch.long)  # the same token everywhere: what differs was drawn
    torch.manual_seed(0)
    outputs = []

    def loss(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        outputs.append(logits.detach())
        return logits.mean()

    model = Transformer(Dropping, num_layers=2)
    for layer in model.layers:
        del layer.qkv, layer.out, layer.attention_norm, layer.mlp_norm, layer.down
    engine = runtime.init(TWO_PARTS).prepare(model, loss_fn=loss, optimizer=lambda held: torch.optim.SGD(held, lr=0.0))
    engine.step(tokens, tokens)
    return outputs[-1]  # those of the step; two sequences are tried before it


def test_ranks_drop_out_of_their_own_tokens_differently(ranks: RankHarness) -> None:
    first, second = ranks.run(_dropped_out, size=2)
    assert first.shape == second.shape == (4, 32, 24)
    assert not torch.equal(first, second)


def _heads_dropped_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is left of equal heads by this rank's dropout, [heads, tokens, size], and a number drawn after it."""
    mesh = runtime.init(ParallelPlan(cp=2, tp=2, micro_batch_size=1)).mesh
    torch.manual_seed(0)
    local = torch.ones(1, 2, 16, 4)
    group, context = tensor_group(mesh), TensorGroup.of(mesh, "cp")
    attention = ContextAttention(context)
    attention.num_own = 16
    with attention.in_place(), own_random_numbers(nn.Identity(), context):
        group.numbers.apart(torch.device("cpu"))  # as a column layer does
        attended = F.scaled_dot_product_attention(local, local, local, dropout_p=0.5)
        group.numbers.together()
    return attended[0], torch.rand(1)


def test_every_head_drops_out_differently_on_the_ranks_of_tp_and_cp(ranks: RankHarness) -> None:
    found = ranks.run(_heads_dropped_out, size=4)
    # Ranks stand with tp innermost: 0 and 1 have the first tokens of two heads each, 2 and 3 the others.
    early, late = (torch.cat([part for part, _ in found[start : start + 2]]) for start in (0, 2))
    heads = [*torch.cat([early, late], dim=1)]
    for index, head in enumerate(heads):
        assert not any(torch.equal(head, another) for another in heads[:index])
    assert len({float(drawn) for _, drawn in found}) == 1


def _in_half_precision(plan: ParallelPlan | None) -> list[float]:
    return train("two blocks", plan, precision="bf16").losses


@pytest.mark.with_all  # split layers have it in test_plan_equality
def test_tokens_layers_and_stages_are_split_in_half_precision(ranks: RankHarness) -> None:
    """Tokens and layers at once; with `--all` stages too, between which a state of 16 bits travels as it does alone."""
    plans = [
        ParallelPlan(cp=2, tp=2, micro_batch_size=12, sequence_parallel=True),
        *with_all(
            [
                ParallelPlan(
                    cp=2,
                    tp=2,
                    pp=2,
                    pipeline_schedule="1f1b",
                    num_microbatches=3,
                    micro_batch_size=4,
                    sequence_parallel=True,
                )
            ]
        ),
    ]
    expected = ranks.run_alone(_in_half_precision, None)
    for plan in plans:
        for losses in ranks.run(_in_half_precision, plan, size=plan.world_size):
            assert losses == pytest.approx(expected, rel=2e-2)  # roundings of 2**-8


LENGTHS = (8, 4, 16)


def _losses_of_lengths(plan: ParallelPlan | None) -> list[float]:
    job = runtime.init(plan)
    torch.manual_seed(0)
    model = Transformer(num_layers=2)
    engine = job.prepare(model, loss_fn=loss_fn, optimizer=lambda held: torch.optim.SGD(held, lr=0.5))
    losses = []
    for tokens in LENGTHS:
        pairs = torch.randint(24, (2, 4, tokens), generator=torch.Generator().manual_seed(tokens))
        losses.append(engine.step(*pairs).item())
    return losses


@pytest.mark.with_all  # stages take other lengths in test_job, and ranks with some tokens other shapes in test_packing
def test_sequences_of_other_lengths_pass_through_stages_that_have_some_of_their_tokens(ranks: RankHarness) -> None:
    plan = ParallelPlan(cp=2, pp=2, pipeline_schedule="1f1b", num_microbatches=2, micro_batch_size=2)
    expected = ranks.run_alone(_losses_of_lengths, None)
    for losses in ranks.run(_losses_of_lengths, plan, size=4):
        assert losses == pytest.approx(expected, rel=1e-5)
