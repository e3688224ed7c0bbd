"""Finding the repeated blocks of a model, and recomputing them."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from training_cases import Decoder, Layer

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.recompute.blocks import recompute_in_backward
from paraplan.runtime.structure.blocks import find_blocks


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.few = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.body = Decoder(3)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class Captioner(nn.Module):
    """A tower of images with more parameters than the decoder that it feeds."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList(Layer() for _ in range(5))
        self.language_model = Decoder(2)

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.embedding


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Decoder(4), ["layers.0", "layers.1", "layers.2", "layers.3"]),
        (Captioner(), ["language_model.layers.0", "language_model.layers.1"]),
        (Outer(), ["body.layers.0", "body.layers.1", "body.layers.2"]),
        (nn.Sequential(nn.Embedding(3, 4), Layer(), Layer(), nn.Linear(4, 3)), ["1", "2"]),
        (nn.Sequential(OrderedDict(first=Layer(), second=Layer())), ["first", "second"]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), ["0", "1", "2"]),
        (nn.ModuleDict({"a": Layer(), "b": Layer()}), ["a", "b"]),
        (nn.Sequential(*(nn.Sequential(Experts(), nn.ReLU()) for _ in range(2))), ["0", "1"]),
        (nn.ModuleList([Experts(), Experts()]), ["0", "1"]),
        (nn.ModuleList([nn.Embedding(3, 4), Layer(), Experts(), Layer(), nn.LayerNorm(4)]), ["1", "2", "3"]),
        (nn.ModuleList(nn.ModuleList([Layer(), Experts()]) for _ in range(2)), ["0.0", "0.1", "1.0", "1.1"]),
    ],
)
def test_the_largest_outermost_stack_is_found(model: nn.Module, names: list[str]) -> None:
    stack = find_blocks(model)
    assert stack is not None
    assert list(stack.names) == names
    assert [type(block) for block in stack.modules(model)] == [type(model.get_submodule(name)) for name in names]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Layer(), nn.ModuleList([nn.Linear(2, 2), Layer()])])
def test_a_model_without_repetition_has_no_stack(model: nn.Module) -> None:
    assert find_blocks(model) is None


def test_recompute_keeps_gradients_names_and_dropout() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.passes = 0

        def forward(self, value: torch.Tensor, *, scale: float) -> torch.Tensor:
            self.passes += 1
            return nn.functional.dropout(self.linear(value), 0.5) * scale

    torch.manual_seed(0)
    block = Dropping()
    gradients = []
    for _ in range(2):
        torch.manual_seed(1)
        block.zero_grad()
        block(torch.ones(3, 6), scale=2.0).sum().backward()
        gradients.append(block.linear.weight.grad.clone())
        passes, names = block.passes, [name for name, _ in block.named_parameters()]
        block.passes = 0
        recompute_in_backward(block)
    assert passes == 2
    assert names == ["linear.weight", "linear.bias"]
    assert torch.equal(*gradients)


class WarmingUp(nn.Module):
    """Counts its passes in a buffer from the second one on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("passes", torch.zeros(()))
        self.is_warm = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_warm:
            self.passes += 1
        self.is_warm = True
        return self.linear(hidden)


def test_a_buffer_that_is_written_only_later_is_refused_where_a_block_runs_again() -> None:
    block = WarmingUp()
    recompute_in_backward(block)
    given = torch.ones(2, 4, requires_grad=True)
    block(given).sum()
    with pytest.raises(UnsupportedPlanError, match="WarmingUp writes its buffer passes, which its first forward pass"):
        block(given)
