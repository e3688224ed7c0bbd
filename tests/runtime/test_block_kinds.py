"""Which blocks are of one kind under tp, and how one of each kind is compared with itself whole."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from rank_harness import RankHarness
from torch import nn
from training_cases import TOKENS, AttentionLayer, Transformer

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.split.kinds import kind_of, numbering_of
from paraplan.runtime.split.tensor_parallel import find_tensor_split
from paraplan.runtime.structure.blocks import find_blocks
from paraplan.runtime.structure.model_structure import ModelStructure

TWO_PARTS = ParallelPlan(tp=2, micro_batch_size=12)


class Way(enum.Enum):
    ONE, OTHER = 1, 2


def kinds(change: Callable[[nn.Module, int], None], num_layers: int = 6) -> int:
    """Return how many kinds of blocks a model has once `change(block, index)` was done to each."""
    model = Transformer(num_layers=num_layers)
    for index, layer in enumerate(model.layers):
        change(layer, index)
    structure = ModelStructure(model, find_blocks(model), torch.zeros(2, TOKENS, dtype=torch.long))
    blocks = structure.stack.modules(structure.meta_model)
    numbering = numbering_of(blocks)
    called = [one for one in zip(structure.stack.names, blocks, structure.calls, strict=True) if one[2]]
    return len({kind_of(name, block, call, (), numbering) for name, block, call in called})


def scaled_by(factor: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda given: given * factor


@pytest.mark.parametrize("name", ["layer_idx", "layer_id", "layer_number", "_depth"])
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_a_number_of_the_block_makes_no_other_kind(name: str, offset: int) -> None:
    assert kinds(lambda layer, index: setattr(layer.qkv, name, index + offset)) == 1


@pytest.mark.parametrize("start", ["layers.", ""])
def test_a_layer_that_keeps_its_own_name_makes_no_other_kind(start: str) -> None:
    """As layers of peft do, which know those of the model that they wrap by the names of before."""

    def named(layer: nn.Module, index: int, *, of: int = 0) -> None:
        layer.qkv.kwargs = {"target_name": f"{start}{index + of}.qkv"}

    assert kinds(named) == 1
    assert kinds(partial(named, of=1)) == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, index: setattr(layer, "window", 4 if index % 2 else 8),
        lambda layer, index: setattr(layer, "_window", 4 if index % 2 else 8),
        lambda layer, index: setattr(layer, "act", F.gelu if index % 2 else F.silu),
        lambda layer, index: setattr(layer, "act", (lambda x: x) if index % 2 else (lambda x: 2 * x)),
        lambda layer, index: setattr(layer, "act", scaled_by(index % 2)),
        lambda layer, index: setattr(layer, "act", partial(torch.add, alpha=index % 2)),
        lambda layer, index: setattr(layer, "heads", [4, 4] if index % 2 else [4, 2]),
        lambda layer, index: setattr(layer, "way", Way.ONE if index % 2 else Way.OTHER),
        lambda layer, index: layer.register_buffer("table", torch.zeros(2 + index % 2)),
        lambda layer, index: setattr(layer, "table", torch.zeros(2 + index % 2)),
    ],
    ids=["number", "private", "function", "lambda", "closure", "partial", "list", "enum", "buffer", "tensor"],
)
def test_blocks_that_differ_in_what_they_compute_are_of_two_kinds(change: Callable[[nn.Module, int], None]) -> None:
    assert kinds(change) == 2


def test_sizes_of_two_blocks_are_not_taken_for_their_numbers() -> None:
    assert kinds(lambda layer, index: setattr(layer, "window", 4 + index), num_layers=2) == 2


class WrongInTraining(AttentionLayer):
    """In training it looks at all inner units at once."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(self.mlp_norm(hidden)))
        if self.training:
            inner = inner / inner.detach().abs().mean()
        return hidden + self.down(F.dropout(inner, 0.5, self.training))


class SixteenBits(AttentionLayer):
    """Takes 16 bits alone, as flash attention does."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dtype == torch.float32 and not hidden.is_meta:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return super().forward(hidden)


class Counted(AttentionLayer):
    """Keeps a running mean of what lies between its layers, which each rank has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(self.mlp_norm(hidden)))
        self.mean.lerp_(inner.detach().mean(), 0.1)
        return hidden + self.down(inner)


def _splits() -> list[str]:
    job = runtime.init(TWO_PARTS)
    found = []
    for layer in (WrongInTraining, SixteenBits, Counted):
        model = Transformer(layer)
        if layer is not SixteenBits:
            for one in model.layers:
                del one.qkv, one.out, one.attention_norm
        try:
            structure = ModelStructure(model, find_blocks(model), torch.zeros(2, TOKENS, dtype=torch.long))
            split = find_tensor_split(structure, mesh=job.mesh, sequence_parallel=False)
        except UnsupportedPlanError as refusal:
            found.append(str(refusal))
        else:
            found.append(" ".join(split.blocks["layers.0"].roles))
    return found


@pytest.mark.ranks
def test_a_block_is_compared_in_training_with_what_it_writes_and_in_the_type_that_it_takes(ranks: RankHarness) -> None:
    for in_training, in_16_bits, counted in ranks.run(_splits, size=2):
        assert "up" not in in_training.split()  # left whole, or refused
        assert in_16_bits == "qkv out up down"
        assert "up" not in counted.split()
