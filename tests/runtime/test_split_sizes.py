"""Shapes of split tensors: a part reshaped is the part of the whole reshaped."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import SplitError, SplitTensor
from paraplan.runtime.split.size_rules import reshaped_sharding

TP = 2


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(prod(shape))).reshape(shape)


def parts_of(whole: torch.Tensor, sharding: Sharding) -> list[SplitTensor]:
    return [
        SplitTensor(sharding.part(whole, index), sharding, TensorGroup(size=TP, index=index, handle=None), "layer")
        for index in range(TP)
    ]


@st.composite
def shapes_with_sharding(draw: st.DrawFn) -> tuple[tuple[int, ...], Sharding]:
    segments = draw(st.lists(st.sampled_from([2, 4, 6, 8, 12]), min_size=1, max_size=3))
    if draw(st.booleans()):
        segments = [segments[0]] * len(segments)
    outer = draw(st.lists(st.integers(1, 3), max_size=2))
    inner = draw(st.lists(st.integers(1, 3), max_size=2))
    return (*outer, sum(segments), *inner), Sharding(dim=len(outer), segments=tuple(segments), size=TP)


def factored(draw: st.DrawFn, total: int) -> list[int]:
    sizes = []
    while total > 1 and len(sizes) < 4:
        size = draw(st.sampled_from([divisor for divisor in range(1, total + 1) if total % divisor == 0]))
        sizes.append(size)
        total //= size
    return [*sizes, total]


@given(shapes_with_sharding(), st.data())
def test_a_part_reshaped_is_the_part_of_the_whole_reshaped(described: tuple[tuple[int, ...], Sharding], data) -> None:
    shape, sharding = described
    after = tuple(factored(data.draw, prod(shape)))
    new_sharding = reshaped_sharding(sharding, shape, after)
    if new_sharding is None:
        return
    whole = numbered(shape)
    for index in range(TP):
        part = sharding.part(whole, index).reshape(new_sharding.local_shape(after))
        assert torch.equal(part, new_sharding.part(whole.reshape(after), index))


@given(shapes_with_sharding())
def test_joined_parts_are_the_whole(described: tuple[tuple[int, ...], Sharding]) -> None:
    shape, sharding = described
    whole = numbered(shape)
    assert torch.equal(sharding.join([sharding.part(whole, index) for index in range(TP)]), whole)


CODES = [
    ((24,), lambda x: x.view(2, 3, 4, 6).transpose(1, 2)),
    ((24,), lambda x: x.reshape(2, 3, 4, 6).permute(2, 0, 1, 3).flatten(0, 1).unflatten(0, (4, 2))),
    ((24,), lambda x: x.view(2, 3, -1, 6)[:, :, None].expand(2, 3, 5, 4, 6).transpose(2, 3)),
    ((24,), lambda x: x.view(2, 3, 4, 6).repeat_interleave(3, dim=2)[..., :2]),
    ((24,), lambda x: torch.cat([x.view(2, 3, 4, 6), -x.view(2, 3, 4, 6)], dim=-1) * torch.ones(12)),
    ((8, 8, 8), lambda x: x.view(2, 3, 3, 4, 2).permute(2, 0, 3, 1, 4)[1]),
    ((8, 8, 8), lambda x: torch.stack(x.chunk(3, dim=-1)).sum(0)),
    ((8, 8, 8), lambda x: x.split(8, dim=2)[2] + x[..., 8:16]),
    ((16, 4, 4), lambda x: x[..., :16].view(2, 3, 8, 2).softmax(-1)),
    ((16, 4, 4), lambda x: x.split([16, 4, 4], dim=-1)[1].unsqueeze(0)),
    ((24,), lambda x: x + numbered((24,))),
    ((24,), lambda x: torch.where(numbered((2, 3, 24)) > 30, x, -x)),
]


@pytest.mark.parametrize(("segments", "code"), CODES)
def test_code_for_the_whole_gives_every_rank_its_part(segments: tuple[int, ...], code) -> None:
    whole = numbered((2, 3, 24))
    expected = code(whole)
    for split in parts_of(whole, Sharding(dim=2, segments=segments, size=TP)):
        result = code(split)
        assert result.shape == expected.shape
        assert torch.equal(result.local, result.sharding.part(expected, split.group.index))


@pytest.mark.parametrize(("segments", "code"), CODES)
def test_calls_made_before_give_the_same_with_other_values_and_sizes(segments: tuple[int, ...], code) -> None:
    sharding = Sharding(dim=2, segments=segments, size=TP)
    group = TensorGroup(size=TP, index=1, handle=None)
    for whole in (numbered((2, 3, 24)), 7 - numbered((2, 3, 24)), 5 * numbered((2, 3, 24)).sqrt()):
        result = code(SplitTensor(sharding.part(whole, 1), sharding, group, "layer"))
        expected = code(whole)
        assert result.shape == expected.shape
        assert (result.ndim, result.source, result.group) == (expected.ndim, "layer", group)
        assert torch.equal(result.local, result.sharding.part(expected, 1))
    assert group.calls


def test_a_remembered_call_follows_sizes_cuts_and_gradients() -> None:
    group, sharding = TensorGroup(size=TP, index=0, handle=None), Sharding(dim=1, segments=(4,), size=TP)
    scale = torch.ones(4, requires_grad=True)
    for rows in (2, 2, 3, 2):
        part = numbered((rows, 2))
        split = SplitTensor(part, sharding, group, "layer")
        scaled = split * scale
        assert scaled.shape == (rows, 4)
        assert scaled.local.requires_grad
        with torch.no_grad():
            assert not (split * scale).local.requires_grad
        assert split.add_(1.0) is split
        assert torch.equal(split.local, numbered((rows, 2)) + 1)
        assert split.float() is split
    with pytest.raises(SplitError):
        SplitTensor(numbered((2, 2)), sharding, group, "layer").softmax(1)
    assert SplitTensor(numbered((2, 2)), sharding.at(0), group, "layer").softmax(1).sharding.dim == 0


def test_remembered_calls_draw_new_random_numbers() -> None:
    group = TensorGroup(size=TP, index=0, handle=None)
    split = SplitTensor(torch.ones(8, 32), Sharding(dim=1, segments=(64,), size=TP), group, "layer")
    drawn = [torch.nn.functional.dropout(split, 0.5).local for _ in range(3)]
    assert not torch.equal(drawn[1], drawn[2])
    assert torch.equal(torch.nn.functional.dropout(split, 0.0).local, torch.ones(8, 32))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (lambda x: x.view(2, 3, 3, 8), "tp=2 does not divide the 3 heads that the output of layer is viewed as"),
        (lambda x: x.sum(-1), "sum mixes what the ranks hold"),
        (lambda x: x.softmax(-1), "softmax works along the output of layer"),
        (lambda x: torch.nn.functional.layer_norm(x, (24,)), "layer_norm works along"),
        (lambda x: torch.cat([x, x], dim=-1), "cat along the split dimension"),
        (lambda x: x @ torch.ones(24, 2), "matmul does not run on parts|__matmul__ does not run on parts"),
        (lambda x: x[..., 3:7], "tp=2 does not divide the pieces 3:7"),
        (lambda x: x.view(2, 3, 4, 6)[..., :4] + x.view(2, 3, 4, 6)[..., :4].mT, "split along dimension 3"),
    ],
)
def test_code_that_would_mix_the_parts_is_an_error(code, words: str) -> None:
    split = parts_of(numbered((2, 3, 24)), Sharding(dim=2, segments=(24,), size=TP))[0]
    with pytest.raises(SplitError, match=words):
        code(split)
