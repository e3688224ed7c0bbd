"""Embeddings, heads and losses split by vocabulary: what they compute, what is gathered, and what stays whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rank_harness import RankHarness
from torch import nn
from training_cases import HIDDEN, TOKENS, VOCABULARY, Transformer

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.split.vocabulary import find_vocabulary_split
from paraplan.runtime.structure.blocks import find_blocks
from paraplan.runtime.structure.model_structure import ModelStructure

pytestmark = pytest.mark.ranks

TWO_PARTS = ParallelPlan(tp=2, micro_batch_size=4)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LOSSES: dict[str, Loss] = {
    "masked": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0),
    "smoothed": lambda logits, targets: F.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=0.1),
    "summed": lambda logits, targets: (
        F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), targets[:, 1:].flatten())
        + 0.1 * F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), reduction="none").mean()
    ),
    "scaled": lambda logits, targets: F.cross_entropy(3 * torch.tanh(logits / 3).flatten(0, 1), targets.flatten()),
}
ODD_LOSSES: dict[str, Loss] = {
    "masked": LOSSES["masked"],
    "viewed": lambda logits, targets: F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1)),
    "shifted": lambda logits, targets: F.cross_entropy(logits[:, :-1].transpose(1, 2), targets[:, 1:]),
    "smoothed": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1),
    "gathered": lambda logits, targets: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), targets.flatten()),
}
GATHERED: dict[str, Loss] = {
    "weighted": lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), weight=torch.linspace(1, 2, VOCABULARY)
    ),
    "likelihood": lambda logits, targets: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), targets.flatten()),
}


class Padded(Transformer):
    """An embedding with a padding row and code of its own, tied to a head with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Scaled(VOCABULARY, HIDDEN, padding_idx=VOCABULARY - 2)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.head.weight = self.embedding.weight


class Scaled(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * 4.0


class Sorted(Transformer):
    """Looks at all of its own logits."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return logits - logits.mean(-1, keepdim=True)


class Odd(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + 1, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY + 1)


def compared(model: Callable[[], nn.Module], losses: list[Loss]) -> tuple[list[float], dict[str, int], list[str]]:
    """Return the largest relative error for each loss, the rows held of each parameter, and what was logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paraplan.runtime").addHandler(handler)
    return *_compared(model, losses), said


def _compared(model: Callable[[], nn.Module], losses: list[Loss]) -> tuple[list[float], dict[str, int]]:
    tokens, targets = torch.randint(VOCABULARY, (2, 4, TOKENS), generator=torch.Generator().manual_seed(5))
    errors, rows = [], {}
    for loss_fn in losses:
        torch.manual_seed(0)
        whole = model()
        expected = loss_fn(whole(tokens), targets)
        expected.backward()
        torch.manual_seed(0)
        engine = runtime.init(TWO_PARTS).prepare(
            model(),
            loss_fn=loss_fn,
            optimizer=lambda held: torch.optim.SGD(held, lr=0.0),
            verify="auto" if loss_fn is losses[0] else "off",  # the comparison with whole logits is the test
        )
        found: dict[str, Any] = {"loss": engine.step(tokens, targets) / expected - 1}
        for name, parameter in whole.named_parameters():
            difference = engine.whole(name, engine.parameters[name].grad) - parameter.grad
            found[name] = difference.abs().max() / parameter.grad.abs().max()
            rows[name] = len(engine.parameters[name])
        errors.append(max(abs(float(error)) for error in found.values()))
    return errors, rows


def _every_loss() -> tuple[list[float], dict[str, int], list[str]]:
    return compared(Padded, [*LOSSES.values()])


def test_losses_of_split_logits_have_the_gradients_of_whole_ones(ranks: RankHarness) -> None:
    for errors, rows, said in ranks.run(_every_loss, size=2):
        assert dict(zip(LOSSES, errors, strict=True)) == pytest.approx(dict.fromkeys(LOSSES, 0.0), abs=1e-5)
        assert rows["embedding.weight"] == rows["head.bias"] == VOCABULARY // 2
        assert said == []


def _gathering_losses() -> tuple[list[float], dict[str, int], list[str]]:
    return compared(Transformer, [*GATHERED.values()])


def test_logits_are_gathered_for_other_losses_and_that_is_said_once(ranks: RankHarness) -> None:
    (errors, _, said), (_, _, said_by_second) = ranks.run(_gathering_losses, size=2)
    assert errors == pytest.approx([0.0, 0.0], abs=1e-5)
    assert ["cross_entropy" in said[0], "log_softmax" in said[1], len(said)] == [True, True, 2]
    assert said_by_second == []


def _of_model_that_needs_all() -> tuple[list[float], dict[str, int], list[str]]:
    return compared(Sorted, [LOSSES["masked"]])


@pytest.mark.with_all  # they are gathered for losses, above
def test_logits_are_gathered_for_a_model_that_looks_at_all_of_them(ranks: RankHarness) -> None:
    errors, rows, said = ranks.run(_of_model_that_needs_all, size=2)[0]
    assert errors == pytest.approx([0.0], abs=1e-5)
    assert rows["head.weight"] == VOCABULARY // 2
    assert "mean needs the logits of all ranks" in said[0]


def _odd() -> tuple[list[float], dict[str, int], list[str]]:
    return compared(Odd, [*ODD_LOSSES.values()])


def test_a_vocabulary_that_does_not_divide_is_split_unevenly(ranks: RankHarness) -> None:
    for rank, (errors, rows, said) in enumerate(ranks.run(_odd, size=2)):
        assert dict(zip(ODD_LOSSES, errors, strict=True)) == pytest.approx(dict.fromkeys(ODD_LOSSES, 0.0), abs=1e-5)
        assert rows["embedding.weight"] == rows["head.bias"] == VOCABULARY // 2 + (rank == 0)
        assert ["log_softmax" in line for line in said] == [True] * (rank == 0)


class _OwnLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits.softmax(-1))
        return logits.logsumexp(-1).mean()

    @staticmethod
    def backward(ctx, gradient):
        (weights,) = ctx.saved_tensors
        return gradient * weights / weights.shape[:-1].numel()


def _hidden_loss() -> str:
    tokens = torch.zeros(4, TOKENS, dtype=torch.long)
    engine = runtime.init(TWO_PARTS).prepare(
        Transformer(), loss_fn=lambda logits, _: _OwnLoss.apply(logits), optimizer=lambda held: torch.optim.SGD(held)
    )
    with pytest.raises(UnsupportedPlanError) as refusal:
        engine.step(tokens, tokens)
    return str(refusal.value)


def test_a_loss_that_hides_what_it_does_is_refused(ranks: RankHarness) -> None:
    for said in ranks.run(_hidden_loss, size=2):
        assert "loss_fn passes vocabulary-parallel logits to an autograd.Function" in said


class Towers(Transformer):
    """A second, smaller tower whose layers make as many numbers as the vocabulary has entries."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, VOCABULARY), nn.GELU()) for _ in range(2))
        self.down = nn.Linear(VOCABULARY, HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.tower:
            hidden = hidden + self.down(block(hidden))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def test_layers_of_another_tower_are_no_heads() -> None:
    model = Towers()
    structure = ModelStructure(model, find_blocks(model), torch.zeros(2, TOKENS, dtype=torch.long))
    split = find_vocabulary_split(structure, size=2)
    assert (split.embeddings, split.heads, split.size) == (("embedding",), ("head",), VOCABULARY)
