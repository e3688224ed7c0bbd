"""The batch of a step, cut into micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paraplan.errors import UsageError
from paraplan.runtime import pack_rows
from paraplan.runtime.data.batches import (
    Division,
    batch_size,
    call_model,
    counted_targets,
    divide_short,
    split_batch,
    with_rows_repeated,
)


def test_packed_rows_go_with_the_sequences_they_belong_to() -> None:
    rows, tokens, grid = (
        torch.arange(9.0)[:, None],
        torch.arange(4),
        torch.tensor([[1, 1, 2], [1, 3, 1], [1, 1, 1], [1, 1, 3]]),
    )
    said = {"tokens": tokens, "patches": pack_rows(rows, [2, 3, 1, 3])}
    by_processor = with_rows_repeated({"tokens": tokens, "pixel_values": rows, "image_grid_thw": grid}, tokens)
    for inputs, name in ((said, "patches"), (by_processor, "pixel_values")):
        assert batch_size(inputs, tokens) == 4
        parts = split_batch(inputs, tokens, Division(count=2, size=None))
        found = [call_model(lambda **given: given, part.inputs)[name][:, 0].tolist() for part in parts]  # type: ignore[arg-type]
        assert found == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    with pytest.raises(UsageError, match=r"found \[4, 9\]; hint: .* runtime.pack_rows says which rows"):
        batch_size({"tokens": tokens, "patches": rows}, tokens)
    with pytest.raises(UsageError, match="9 packed rows, and counts of sequences that add up to 8"):
        pack_rows(rows, [2, 2, 1, 3])


def test_micro_batches_are_consecutive_parts_of_every_tensor() -> None:
    inputs = {"tokens": torch.arange(6), "options": ["kept", torch.arange(12).view(6, 2)]}
    parts = split_batch(inputs, torch.arange(6) * 10, Division(count=3, size=None))
    assert [part.inputs["tokens"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part.targets.tolist() for part in parts] == [[0, 10], [20, 30], [40, 50]]
    assert parts[1].inputs["options"][0] == "kept"
    assert parts[1].inputs["options"][1].tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize(("size", "count"), [(5, 2), (2, 3)])
def test_a_batch_that_does_not_divide_is_refused_with_both_numbers(size: int, count: int) -> None:
    with pytest.raises(UsageError, match=f"batch of {size} sequences does not divide into num_microbatches={count}"):
        split_batch(torch.zeros(size), torch.zeros(size), Division(count=count, size=None))


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    micro_batch_size=st.integers(1, 9),
    multiple=st.integers(1, 4),
)
def test_a_short_batch_is_cut_alike_on_every_rank_and_whole(
    sizes: list[int], micro_batch_size: int, multiple: int
) -> None:
    division = divide_short(sizes, micro_batch_size=micro_batch_size, multiple=multiple)
    assert division.size is not None
    assert division.size <= micro_batch_size
    assert division.count >= 1
    assert division.count % multiple == 0
    for size in sizes:
        pieces = split_batch(torch.arange(size), torch.arange(size), division)
        used = [piece.inputs for piece in pieces if piece.num_sequences]
        assert {len(piece.inputs) for piece in pieces} == {division.size}
        assert torch.cat([torch.zeros(0, dtype=torch.long), *used]).tolist() == list(range(size))


def test_masked_targets_are_not_counted_and_other_targets_count_by_sequence() -> None:
    assert counted_targets(torch.tensor([[1, -100, 2], [-100, -100, 0]])) == 3
    assert counted_targets({"labels": torch.tensor([[1, -100]]), "weights": torch.ones(1, 2)}) == 1
    assert counted_targets(torch.rand(4, 7)) == 4.0


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [(torch.zeros(4), torch.zeros(3)), (torch.tensor(1.0), None), ("text", None)],
)
def test_tensors_without_one_first_dimension_are_refused(inputs: object, targets: object) -> None:
    with pytest.raises(UsageError, match="first dimension"):
        batch_size(inputs, targets)


def test_one_row_among_inputs_stands_for_all_sequences() -> None:
    inputs = {"tokens": torch.zeros(3, 4), "positions": torch.arange(4)[None], "scale": torch.tensor(2.0)}
    repeated = with_rows_repeated(inputs, torch.zeros(3))
    assert repeated["positions"].tolist() == [[0, 1, 2, 3]] * 3
    assert repeated["tokens"] is inputs["tokens"]
    assert batch_size(repeated, torch.zeros(3)) == 3
    assert with_rows_repeated(inputs["positions"], torch.zeros(1, 4)) is inputs["positions"]


class Sum(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left - right


def test_a_tuple_of_inputs_is_positional_and_a_dict_is_by_keyword() -> None:
    one, two = torch.tensor(1), torch.tensor(2)
    assert call_model(Sum(), (one, two)) == -1
    assert call_model(Sum(), {"right": one, "left": two}) == 1
    assert torch.equal(call_model(nn.Identity(), two), two)
