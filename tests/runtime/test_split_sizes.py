"""Code for whole tensors on the parts of a rank: a part reshaped is the part of the whole reshaped."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.cuts import SplitError, as_part, known_part, reshaped_sharding
from paraplan.runtime.split.lockstep import PartsRun, WholeRun
from paraplan.runtime.split.sites import RunOnParts, Sites

TP = 2
Code = Callable[[torch.Tensor], Any]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(prod(shape))).reshape(shape)


def group_of(index: int) -> TensorGroup:
    return TensorGroup(size=TP, index=index, handle=None)


def followed(code: Code, whole: torch.Tensor, sharding: Sharding) -> tuple[Sites, Sharding]:
    """Return where `code` is rewritten for parts of `whole`, and how what it returns is cut."""
    run, without_values = WholeRun(), whole.to("meta")
    with run:
        code(without_values)
    parts = PartsRun(run, group_of(0))
    part = as_part(sharding.part(whole, 0).to("meta"), sharding, "layer")
    with parts:
        result = code(part)
    return parts.sites, known_part(result).sharding


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


def _merged(x: torch.Tensor) -> torch.Tensor:
    """Return heads behind one another, by a batch that is computed from the heads that a tensor has, as in BLOOM."""
    heads = x.view(2, 3, 4, 6).transpose(1, 2).reshape(8, 3, 6)
    return heads.view(heads.shape[0] // 4, 4, 3, 6).transpose(1, 2).reshape(2, 3, 24)


def _scanned(x: torch.Tensor) -> torch.Tensor:
    state = torch.zeros(2, 24, device=x.device)
    states = []
    for token in range(x.shape[1]):
        state = state * 0.5 + x[:, token]
        states.append(state)
    return torch.stack(states, dim=1)


def _ramp(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.arange(float(prod(shape)), device=x.device).reshape(shape)


CODES: list[tuple[tuple[int, ...], Code]] = [
    ((24,), lambda x: x.view(2, 3, 4, 6).transpose(1, 2)),
    ((24,), lambda x: x.reshape(2, 3, 4, 6).permute(2, 0, 1, 3).flatten(0, 1).unflatten(0, (4, 2))),
    ((24,), lambda x: x.view(2, 3, -1, 6)[:, :, None].expand(2, 3, 5, 4, 6).transpose(2, 3)),
    ((24,), lambda x: x.view(2, -1, 4, 6)),
    ((24,), lambda x: x.view(2, 3, 4, 6).repeat_interleave(3, dim=2)[..., :2]),
    ((24,), lambda x: torch.cat([x.view(2, 3, 4, 6), -x.view(2, 3, 4, 6)], dim=-1) * _ramp(x, 12)),
    ((24,), lambda x: torch.cat([x, -x], dim=-1)),
    ((8, 8, 8), lambda x: x.view(2, 3, 3, 4, 2).permute(2, 0, 3, 1, 4)[1]),
    ((8, 8, 8), lambda x: torch.stack(x.chunk(3, dim=-1)).sum(0)),
    ((8, 8, 8), lambda x: x.split(8, dim=2)[2] + x[..., 8:16]),
    ((16, 4, 4), lambda x: x[..., :16].view(2, 3, 8, 2).softmax(-1)),
    ((16, 4, 4), lambda x: x.split([16, 4, 4], dim=-1)[1].unsqueeze(0)),
    ((24,), lambda x: x + _ramp(x, 24)),
    ((24,), lambda x: torch.where(_ramp(x, 2, 3, 24) > 30, x, -x)),
    ((24,), lambda x: torch.einsum("bthc,bth->bthc", x.view(2, 3, 4, 6), _ramp(x, 2, 3, 4))),
    ((24,), lambda x: F.conv1d(x.transpose(1, 2), _ramp(x, 48, 1, 2), padding=1, groups=24)),
    ((24,), _merged),
    ((24,), _scanned),
]


@pytest.mark.parametrize(("segments", "code"), CODES)
def test_code_for_the_whole_gives_every_rank_its_part(segments: tuple[int, ...], code: Code) -> None:
    sharding = Sharding(dim=2, segments=segments, size=TP)
    sites, cut = followed(code, numbered((2, 3, 24)), sharding)
    for whole in (numbered((2, 3, 24)), 7 - numbered((2, 3, 24))):
        expected = code(whole)
        for index in range(TP):
            with RunOnParts(sites, group_of(index), copies=False):
                result = code(sharding.part(whole, index))
            assert type(result) is torch.Tensor
            assert torch.allclose(result, cut.part(expected, index))


def test_a_line_that_parts_and_whole_tensors_reach_is_told_apart_or_refused() -> None:
    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, 3, 4, -1)

    sharding = Sharding(dim=2, segments=(24,), size=TP)
    sites, _ = followed(lambda x: heads(x) + heads(_ramp(x, 2, 3, 24)), numbered((2, 3, 24)), sharding)
    assert len(sites) == 2  # the sum, and the line for parts
    with pytest.raises(SplitError, match="whole tensors and on parts alike"):
        followed(lambda x: heads(x) + heads(_ramp(x, 2, 3, 12)).sum(), numbered((2, 3, 24)), sharding)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (lambda x: x.view(2, 3, 3, 8), "tp=2 does not divide the 3 heads that the output of layer is viewed as"),
        (lambda x: x.sum(-1), "sum mixes what the ranks hold"),
        (lambda x: x.softmax(-1), "softmax works along the output of layer"),
        (lambda x: F.layer_norm(x, (24,)), "layer_norm works along"),
        (lambda x: x @ _ramp(x, 24, 2), "mixes what the ranks hold"),
        (lambda x: x[..., 3:7], "tp=2 does not divide the entries 3 to 7 that its code takes of the output of layer"),
        (lambda x: x.view(2, 3, 4, 6)[..., :4] + x.view(2, 3, 4, 6)[..., :4].mT, "add does not run on parts"),
        (lambda x: torch.zeros(2, 3, 24, device=x.device).add_(x), "add_ writes the output of layer into a whole"),
    ],
)
def test_code_that_would_mix_the_parts_is_an_error(code: Code, words: str) -> None:
    with pytest.raises(SplitError, match=words):
        followed(code, numbered((2, 3, 24)), Sharding(dim=2, segments=(24,), size=TP))
