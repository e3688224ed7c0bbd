"""The first wrong value between modules is found, however ranks divide values, and what is wrong with it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_runs import sight, with_record

from paraplan.script_check.evidence import Process, Sight
from paraplan.script_check.wrong_outputs import first_wrong, first_wrong_gradient

ROWS, LENGTH, WIDTH = 4, 8, 12
Change = Callable[[list[torch.Tensor], torch.Tensor], None]
"""Changes the values of ranks, of which the whole is given, where it stands."""


def noted(
    values: Sequence[tuple[str, torch.Tensor, Sequence[torch.Tensor]]], groups: Sequence[Sequence[int]] | None = None
) -> Sight:
    """Return a check that noted values of one process and of ranks, by key."""
    num_ranks = len(values[0][2])
    seen = sight(num_ranks, lambda _, whole, __: whole)
    keys = tuple(key for key, _, _ in values)

    def process(one: Process, number: int | None) -> Process:
        tensors = {f"noted/{key}": whole if number is None else parts[number] for key, whole, parts in values}
        return with_record(Process(one.record, tensors), noted=keys)

    made = [process(one, rank) for rank, one in enumerate(seen.ranks)] + [process(seen.alone, None)]
    return dataclasses.replace(seen, noted=made, groups=groups or seen.groups)


def divided(whole: torch.Tensor, axes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return the parts of ranks: `axes` has dimensions and numbers of parts, the last one that of neighbours."""
    parts = [whole]
    for dim, count in axes:
        parts = [piece.clone() for part in parts for piece in part.chunk(count, dim)]
    return parts


def value(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


LAYOUTS = {
    "rows": (((0, 2),), [[0], [1]]),
    "tokens": (((1, 2),), [[0, 1]]),
    "tokens of ranks that draw each": (((1, 2),), [[0], [1]]),
    "features": (((2, 2),), [[0, 1]]),
    "rows and features": (((0, 2), (2, 2)), [[0, 1], [2, 3]]),
    "rows and tokens": (((0, 2), (1, 2)), [[0, 1], [2, 3]]),
    "tokens and features": (((1, 2), (2, 2)), [[0, 1, 2, 3]]),
}


def _scale(parts: list[torch.Tensor], whole: torch.Tensor) -> None:
    for part in parts:
        part.mul_(2)


def _first_part(parts: list[torch.Tensor], whole: torch.Tensor) -> None:
    parts[1] = parts[0].clone()


def _bias(parts: list[torch.Tensor], whole: torch.Tensor) -> None:
    for part in parts:
        part.add_(torch.arange(1.0, 1 + part.shape[-1]))


def _norm(parts: list[torch.Tensor], whole: torch.Tensor) -> None:
    for part in parts:
        part.div_(part.norm(dim=-1, keepdim=True))


def _other_moments(parts: list[torch.Tensor], whole: torch.Tensor) -> None:
    for part in parts:
        part.mul_(torch.arange(2.0, 2 + len(part))[:, None, None]).add_(torch.arange(len(part))[:, None, None])


def _edge(parts: list[torch.Tensor], whole: torch.Tensor) -> None:
    parts[-1][:, :2] += 1


FAULTS: dict[str, tuple[Change, Sequence[str], str]] = {
    "all are larger": (_scale, list(LAYOUTS), "it is 2 times that of one process"),
    "the first part on the second rank": (_first_part, ["tokens", "features", "rows"], "rank 1 has what rank 0 should"),
    "a vector added": (_bias, ["rows", "tokens", "rows and tokens"], "the same numbers are added to each of its rows"),
    "a norm of the part": (_norm, ["features", "rows and features"], "of its rows is multiplied by another number"),
    "moments of a part": (_other_moments, ["rows", "rows and tokens"], "of its rows is another multiple of the right"),
    "the first tokens of a part": (_edge, ["tokens", "tokens of ranks that draw each"], "tokens 0-1 of 4 on rank 1"),
}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 9999), layout=st.sampled_from(list(LAYOUTS)), data=st.data())
def test_what_is_divided_rightly_is_right(seed: int, layout: str, data: st.DataObject) -> None:
    """So are terms of a value that are to be added, where a rank of the same place has another."""
    axes, groups = LAYOUTS[layout]
    whole, other = value(seed), value(seed + 1)
    values = [("gives/1/first", whole, divided(whole, axes))]
    if layout == "features":
        terms = [torch.randn(other.shape), torch.empty(0)]
        terms[1] = other - terms[0]
        values.append(("gives/1/second", other, terms))
    values.append(("given/1/third", other, divided(other, axes)))
    assert first_wrong(noted(values, groups)) is None


@pytest.mark.parametrize(
    ("fault", "layout"), [(fault, layout) for fault, (_, layouts, _) in FAULTS.items() for layout in layouts]
)
def test_the_first_wrong_value_is_told_with_what_is_wrong(fault: str, layout: str) -> None:
    change, _, words = FAULTS[fault]
    axes, groups = LAYOUTS[layout]
    for seed in range(10):
        whole, other = value(seed), value(seed + 100)
        parts = divided(other, axes)
        change(parts, other)
        told = first_wrong(
            noted(
                [("gives/1/a", whole, divided(whole, axes)), ("gives/1/b", other, parts), ("given/1/c", other, parts)],
                groups,
            )
        )
        assert told is not None
        assert told.text == "the first output that is another is that of b"
        assert words in told.how


def test_a_bias_that_each_rank_adds_is_named() -> None:
    whole = value(0)
    bias = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    parts = [part + bias for part in divided(whole, ((1, 2),))]
    seen = noted([("gives/1/out", whole, parts)], [[0, 1]])
    seen.alone.tensors["start/out.bias"] = bias
    told = first_wrong(seen)
    assert told is not None
    assert told.how.startswith("out.bias is in it 2 times")


@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 9999), num_ranks=st.integers(2, 4))
def test_values_of_any_shapes_are_told_or_left_alone(data: st.DataObject, seed: int, num_ranks: int) -> None:
    """Of all dimensions, in even parts and uneven ones, of other shapes, small and constant: none stops a check."""
    random = torch.Generator().manual_seed(seed)
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    whole = torch.randn(shape, generator=random) * data.draw(st.sampled_from([0.0, 1.0]))
    dim = data.draw(st.integers(0, len(shape) - 1))
    if data.draw(st.booleans()) and shape[dim] >= num_ranks:
        parts = [part.clone() for part in whole.tensor_split(num_ranks, dim)]
    else:
        parts = [torch.randn(data.draw(st.permutations(shape)), generator=random) for _ in range(num_ranks)]
    for part in parts:
        part += torch.randn(part.shape, generator=random) * data.draw(st.sampled_from([0.0, 1.0]))
    groups = data.draw(st.sampled_from([[[rank] for rank in range(num_ranks)], [list(range(num_ranks))]]))
    for prefix in ("", "back "):
        values = [(f"{prefix}gives/1/a", whole, parts), (f"{prefix}given/1/b", whole, parts)]
        for find in (first_wrong, first_wrong_gradient):
            told = find(noted(values, groups))
            assert told is None or told.text


def test_parts_of_unlike_sizes_are_beside_theirs() -> None:
    whole = value(0)
    parts = [whole[:, :5].clone(), whole[:, 5:].clone()]
    assert first_wrong(noted([("gives/1/norm", whole, parts)], [[0, 1]])) is None
    parts[1][:, :1] += 1
    told = first_wrong(noted([("gives/1/norm", whole, parts)], [[0, 1]]))
    assert told is not None
    assert "tokens 0 of 3 on rank 1" in told.how


def test_rows_in_another_order_and_values_by_place_are_told() -> None:
    whole = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7])
    told = first_wrong(noted([("given/1/head", whole, [whole[order], whole[order]])], [[0], [1]]))
    assert told is not None
    assert told.text == "the first value that is another is what head is given"
    assert "its rows are those of one process, in another order: rows 2-5 of 8" in told.how
    parts = divided(whole, ((0, 2),))
    total = parts[0] + parts[1]
    told = first_wrong(noted([("gives/1/experts", whole, [total, total.clone()])], [[0], [1]]))
    assert told is not None
    assert told.how.startswith("it is the same on ranks 0, 1, where each has rows")


def test_a_state_that_runs_on_between_documents_is_told() -> None:
    whole = value(0)
    ends = [3, 5, 6, 2]
    part = whole.clone()
    for row, end in enumerate(ends):
        part[row, end:] += 1
    told = first_wrong(noted([("gives/1/mixer", whole, [part, part])], [[0, 1]]))
    assert told is not None
    assert told.how.startswith("its rows are right up to a token, and wrong from there on, each from another")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 9999), scale=st.sampled_from([1.0, 2.0, 0.5]))
def test_gradients_on_the_way_back_are_those_of_one_process_up_to_the_scale_of_the_loss(
    seed: int, scale: float
) -> None:
    """Shares whose sum is right are told where what follows is wrong, and features that are never summed."""
    whole, inner, outer = value(seed), value(seed + 1), value(seed + 2)
    share = torch.randn(inner.shape, generator=torch.Generator().manual_seed(seed))
    last = ("back gives/1/head", whole, [whole * scale, whole * scale])
    shares = ("back given/1/head", inner, [share * scale, (inner - share) * scale])
    right = ("back gives/1/layer", outer, [outer * scale, outer * scale])
    assert first_wrong_gradient(noted([last, shares, right], [[0, 1]])) is None
    torn = torch.randn(outer.shape, generator=torch.Generator().manual_seed(seed + 3))
    told = first_wrong_gradient(noted([last, shares, ("back gives/1/layer", outer, [torn, torn + 1])], [[0, 1]]))
    assert told is not None
    assert "that of what layer gives; that of what head is given is in shares, whose sum is right" in told.text
    parts = [outer * scale, outer * scale]
    parts[0][..., 8:], parts[1][..., 8:] = share[..., 8:] * scale, (outer - share)[..., 8:] * scale
    told = first_wrong_gradient(noted([last, ("back gives/1/layer", outer, parts)], [[0, 1]]))
    assert told is not None
    assert "features 8-11 of 12 on ranks 0, 1, and right elsewhere: there each rank has a share" in told.how
