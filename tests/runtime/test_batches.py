"""The batch of a step, cut into micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paraplan.errors import UsageError
from paraplan.runtime.batches import batch_size, call_model, split_batch


def test_micro_batches_are_consecutive_parts_of_every_tensor() -> None:
    inputs = {"tokens": torch.arange(6), "options": ["kept", torch.arange(12).view(6, 2)]}
    parts = split_batch(inputs, torch.arange(6) * 10, count=3)
    assert [part.inputs["tokens"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part.targets.tolist() for part in parts] == [[0, 10], [20, 30], [40, 50]]
    assert parts[1].inputs["options"][0] == "kept"
    assert parts[1].inputs["options"][1].tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize(("size", "count"), [(5, 2), (2, 3)])
def test_a_batch_that_does_not_divide_is_refused_with_both_numbers(size: int, count: int) -> None:
    with pytest.raises(UsageError, match=f"batch of {size} sequences does not divide into num_microbatches={count}"):
        split_batch(torch.zeros(size), torch.zeros(size), count=count)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [(torch.zeros(4), torch.zeros(3)), (torch.zeros(0, 2), torch.zeros(0)), (torch.tensor(1.0), None), ("text", None)],
)
def test_tensors_without_one_first_dimension_are_refused(inputs: object, targets: object) -> None:
    with pytest.raises(UsageError, match="first dimension"):
        batch_size(inputs, targets)


class Sum(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - right


def test_a_tuple_of_inputs_is_positional_and_a_dict_is_by_keyword() -> None:
    one, two = torch.tensor(1), torch.tensor(2)
    assert call_model(Sum(), (one, two)) == -1
    assert call_model(Sum(), {"right": one, "left": two}) == 1
    assert torch.equal(call_model(nn.Identity(), two), two)
