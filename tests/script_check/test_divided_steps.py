"""Steps that ranks divide by code of their own are compared by who holds what, and their causes told."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_runs import NAMES, sight, with_record
from torch import nn

from paraplan.script_check.evidence import Process, Sight
from paraplan.script_check.findings import first_difference, sums_rows
from paraplan.script_check.records import Difference
from paraplan.script_check.whole import Names, is_unnamed

LAYER = "layer.weight"


def of_steps(seen: Sight, **changes: object) -> Sight:
    """Return `seen` with these changes of the first steps of ranks and one process."""
    made = [with_record(one, steps=(one.record.steps[0].replace(**changes),)) for one in (seen.alone, *seen.ranks)]
    return dataclasses.replace(seen, alone=made[0], ranks=made[1:])


def told(seen: Sight) -> Difference:
    found = first_difference(seen)[0]
    assert found is not None
    return found


def right(num_ranks: int, seed: int = 0) -> Sight:
    return sight(num_ranks, lambda _, whole, __: whole, seed=seed)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), num_ranks=st.integers(2, 4), data=st.data())
def test_a_gradient_is_that_of_the_rank_whose_optimizer_holds_it(
    seed: int, num_ranks: int, data: st.DataObject
) -> None:
    """What others have of it may be anything, or nothing; where its own rank is wrong, that is told."""
    owner = {name: data.draw(st.integers(0, num_ranks - 1)) for name in NAMES}
    seen = right(num_ranks, seed)
    for rank, process in enumerate(seen.ranks):
        members = (tuple(name for name in NAMES if owner[name] == rank),)
        steps = (process.record.steps[0].replace(members=members),)
        seen.ranks[rank] = with_record(process, steps=steps)  # type: ignore[index]
        for name in NAMES:
            key = f"gradient/1/{name}"
            if owner[name] != rank and data.draw(st.booleans()):
                del process.tensors[key]
            elif owner[name] != rank:
                process.tensors[key] = process.tensors[key] * 1000
    assert first_difference(seen)[0] is None
    key = f"gradient/1/{LAYER}"
    seen.ranks[owner[LAYER]].tensors[key] = seen.alone.tensors[key] * 2
    assert (told(seen).name, told(seen).kind) == (LAYER, "scaled")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), num_ranks=st.integers(2, 4), is_right=st.booleans())
def test_gradients_that_a_step_exchanges_itself_are_judged_by_what_it_makes(
    seed: int, num_ranks: int, is_right: bool
) -> None:
    """Ranks have their own before the step. Where all make the right step of them, no gradient is wrong."""
    seen = right(num_ranks, seed)
    for process, share in zip(seen.ranks, seen.shares, strict=True):
        process.tensors.update({f"gradient/1/{name}": share.tensors[f"gradient/1/{name}"] for name in NAMES})
        if not is_right:
            key = f"parameter/1/{LAYER}"
            process.tensors[key] = process.tensors[key] + 0.05 * torch.eye(4, 3)
    found = first_difference(seen)[0]
    assert (found is None) == is_right
    if found is not None:
        assert (found.quantity, found.name) == ("parameter", LAYER)
        assert "gradients are reduced inside of the step" in found.cause


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), at=st.integers(4, 8), factors=st.tuples(st.floats(0.3, 0.9), st.floats(1.2, 3.0)))
def test_pieces_of_a_parameter_that_are_stepped_by_themselves_are_told_with_their_factors(
    seed: int, at: int, factors: tuple[float, float]
) -> None:
    seen = right(2, seed)
    key = f"parameter/1/{LAYER}"
    way = (seen.alone.tensors[key] - 1).flatten()
    pieces = torch.cat([way[:at] * factors[0], way[at:] * factors[1]]).view(4, 3)
    for process in seen.ranks:
        process.tensors[key] = 1 + pieces
    assert f"its first {at} numbers moved {factors[0]:.4g} times as far" in told(seen).cause
    for process in seen.ranks:
        process.tensors[key] = 1 + torch.cat([way[:3], way[2:-1]]).view(4, 3)
    assert "from number 3 on its numbers make the steps that are those of 1 place before" in told(seen).cause


def test_unlike_factors_of_parameters_are_those_of_ranks_and_replicas_that_drift_are_told_apart() -> None:
    seen = right(4)
    ways = {name: seen.alone.tensors[f"parameter/1/{name}"] - 1 for name in NAMES}
    more = {f"{name} {number}": way for number in range(2) for name, way in ways.items()}
    for process in (seen.alone, seen.shaken, *seen.ranks):
        process.tensors.update({f"start/{name}": torch.ones(4, 3) for name in more})
        for place, (name, way) in enumerate(more.items()):
            factor = 1.0 if process in (seen.alone, seen.shaken) else (0.5, 0.8)[place % 2]
            process.tensors[f"parameter/1/{name}"] = 1 + factor * way
    seen = dataclasses.replace(
        seen,
        alone=with_record(seen.alone, names=tuple(more)),
        ranks=[with_record(one, names=tuple(more)) for one in seen.ranks],
    )
    assert "in the right directions, 0.5, 0.8 times as far" in told(seen).cause
    halves = right(4)
    for rank, process in enumerate(halves.ranks):
        key = f"parameter/1/{LAYER}"
        process.tensors[key] = process.tensors[key] + (0.1 if rank < 2 else -0.1) * torch.eye(4, 3)
    assert "ranks differ (0, 1 | 2, 3) after the step, and the mean of their steps is right" in told(halves).cause


def test_tensors_that_an_optimizer_alone_holds_in_parts_are_not_compared() -> None:
    seen = right(2)
    names = (*NAMES, "parameter 3")
    for process, size in ((seen.alone, 8), (seen.shaken, 8), *((one, 4) for one in seen.ranks)):
        process.tensors["gradient/1/parameter 3"] = torch.ones(size)
    seen = dataclasses.replace(seen, alone=with_record(seen.alone, names=names))
    assert first_difference(seen)[0] is None
    for process in seen.ranks:
        process.tensors["gradient/1/parameter 3"] = 2 * torch.ones(8)
    assert told(seen).name == "parameter 3"


@pytest.mark.parametrize("of_ranks", [1.0, 0.25])
def test_clipping_that_does_not_reach_gradients_is_told(of_ranks: float) -> None:
    seen = of_steps(right(2), clipped_to=0.25)
    seen = dataclasses.replace(
        seen,
        ranks=[with_record(one, steps=(one.record.steps[0].replace(clipped_to=of_ranks),)) for one in seen.ranks],
    )
    assert (first_difference(seen)[0] is None) == (of_ranks == 0.25)
    if of_ranks == 1.0:
        assert told(seen).kind == "clipping"
        assert "multiplies gradients by 1 where one process does by 0.25" in told(seen).cause


def test_what_ranks_clip_by_their_own_code_is_compared_with_what_one_process_has_after_clipping() -> None:
    seen = sight(2, lambda _, whole, __: whole / 4)
    for process in seen.ranks:
        process.tensors.update({f"parameter/1/{name}": seen.alone.tensors[f"parameter/1/{name}"] for name in NAMES})
    clipped = [
        with_record(one, steps=(one.record.steps[0].replace(clipped_to=0.25),)) for one in (seen.alone, seen.shaken)
    ]
    assert told(seen).kind == "scaled"
    assert first_difference(dataclasses.replace(seen, alone=clipped[0], shaken=clipped[1]))[0] is None


def test_a_loss_that_is_a_sum_has_gradients_that_are_sums() -> None:
    """What a script divides by all targets after the way back is no such loss: a factor of its gradients is wrong."""
    seen = sight(2, lambda _, whole, __: whole)
    shares = [with_record(one, steps=(one.record.steps[0].replace(losses=(0.5,)),)) for one in seen.shares]
    ranks = [with_record(one, steps=shares[0].record.steps) for one in seen.ranks]
    seen = dataclasses.replace(seen, shares=shares, ranks=ranks)
    assert not sums_rows(seen)
    sums = {key: value * 2 for key, value in seen.alone.tensors.items() if key.startswith("gradient/")}
    assert sums_rows(dataclasses.replace(seen, alone=Process(seen.alone.record, seen.alone.tensors | sums)))


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, ""), (3.0, "the same on all ranks, and another than in one process")]
)
def test_a_buffer_that_all_ranks_change_otherwise_than_one_process_explains_what_parts(
    value: float, words: str
) -> None:
    seen = sight(2, lambda _, whole, __: whole + torch.tensor([[1.0, -1.0, 0.5]] * 4))
    for process in (*seen.ranks, seen.alone):
        process.tensors["buffer/0/count"] = torch.ones(2)
        process.tensors["held/1/count"] = torch.full((2,), 2.0)
    for process in seen.ranks:
        process.tensors["held/1/count"] = torch.full((2,), 2.0 + value)
    assert (told(seen).kind == "unlike buffers") == bool(words)
    assert words in told(seen).cause


@pytest.mark.parametrize("gathers", [False, True])
def test_ranks_that_share_a_model_by_parts_and_read_unlike_rows_are_told_where_they_exchange_none(
    gathers: bool,
) -> None:
    seen = sight(2, lambda _, whole, __: whole + torch.tensor([[1.0, -1.0, 0.5]] * 4))
    steps = (seen.alone.record.steps[0].replace(losses=(3.0,)),)
    ranks = [with_record(one, axes={"tp": 2}, gathers_rows=gathers, steps=steps) for one in seen.ranks]
    found = told(dataclasses.replace(seen, ranks=ranks))
    assert (found.kind == "unlike rows") == (not gathers)


def test_parameters_of_a_model_that_is_never_called_have_its_names() -> None:
    """As adapters whose layers the forward passes of another model call."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

    adapter, names = Adapter(), Names()
    names.meet(nn.Linear(2, 2))
    names.add(iter([*adapter.parameters(), torch.ones(2, requires_grad=True)]))
    held = names.held_by([*adapter.parameters()])
    assert held == ("Adapter.layers.0.weight", "Adapter.layers.0.bias")
    assert [name for name in names.values(gradients=False).of if is_unnamed(name)] == ["parameter 4"]


def test_a_loss_with_a_memory_and_no_parameters_is_met_by_its_buffers() -> None:
    memory, names = nn.Module(), Names()
    memory.register_buffer("bank", torch.ones(3))
    names.meet_buffers(nn.Flatten())
    names.meet_buffers(memory)
    names.meet_buffers(memory)
    assert list(names.buffers()) == ["Module.bank"]


def test_memory_that_was_given_back_is_not_read_and_sparse_gradients_have_sizes() -> None:
    """FSDP frees frozen weights between passes; embeddings may have sparse gradients."""
    model, names = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2).requires_grad_(False)), Names()
    names.meet(model)
    assert list(names.buffers()) == ["1.weight", "1.bias"]
    model[1].weight.untyped_storage().resize_(0)
    assert list(names.buffers()) == ["1.bias"]
    model[0](torch.tensor([0, 0, 1])).sum().backward()
    before = names.sizes_of_gradients()
    assert list(before.values()) == [pytest.approx(10**0.5)]
    gradient = model[0].weight.grad
    assert gradient is not None
    model[0].weight.grad = gradient * 0.5
    assert names.clipped_to(before) == pytest.approx(0.5)


def test_frozen_parameters_are_looked_at_as_buffers_are() -> None:
    """Models change them by rules of their own; statistics of batch norms stand still."""
    model, names = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Names()
    model[0].bias.requires_grad_(False)
    names.meet(model)
    assert list(names.buffers()) == ["0.bias"]
