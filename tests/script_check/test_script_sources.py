"""What a script reads is found where it comes from, and one process reads the ranks' batches there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from seen_runs import process_of, with_record
from torch import nn

from paraplan.errors import UsageError
from paraplan.script_check.batches import joined, tensors_in, with_tensors
from paraplan.script_check.copies import Copies
from paraplan.script_check.reading_plan import as_taken, of_rows
from paraplan.script_check.readings import Replay
from paraplan.script_check.records import SourceRecord
from paraplan.script_check.sources import FollowSources, Sources, is_data, is_sample, marks_of


@dataclass
class Pair:
    inputs: torch.Tensor
    labels: torch.Tensor


def test_batches_of_any_structure_keep_it() -> None:
    batch = {
        "x": torch.ones(2),
        "more": [torch.zeros(1), ("text", torch.ones(3))],
        "pair": Pair(torch.ones(1), torch.ones(1)),
    }
    assert [name for name, _ in tensors_in(batch)] == ["x", "more", "more", "inputs", "labels"]
    made = with_tensors(batch, (torch.full_like(tensor, 7) for _, tensor in tensors_in(batch)))
    assert all(bool((tensor == 7).all()) for _, tensor in tensors_in(made))
    assert made["more"][1][0] == "text"
    assert isinstance(made["pair"], Pair)
    assert bool((batch["x"] == 1).all())  # what it was made of stays


def test_rows_of_unlike_lengths_are_filled_by_what_their_key_says() -> None:
    parts = [torch.ones(1, 2, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)]
    assert joined(parts, "labels").tolist() == [[1, 1, -100], [1, 1, 1], [1, 1, 1]]
    assert joined(parts, "input_ids")[0].tolist() == [1, 1, 0]
    with pytest.raises(UsageError, match="no common batch"):
        joined([torch.ones(1), torch.ones(1, 1)])


def test_parameters_and_tensors_that_have_no_values_here_are_no_samples() -> None:
    plain = torch.ones(2)
    assert is_data(plain)
    others = (plain[0], nn.Parameter(plain), torch.ones(2, requires_grad=True), plain.to_sparse(), plain.to("meta"))
    assert not any(map(is_data, others))


def test_a_tensor_that_is_changed_in_place_is_known_by_its_name_too() -> None:
    """As torch's own `nn.init` gives it, whatever the caller wrote."""
    sources = Sources()
    with FollowSources(sources):
        nn.init.normal_(torch.zeros(2, 3))
        nn.init.constant_(tensor=torch.zeros(2), val=1.0)
    assert sorted(place.rpartition(" ")[2] for place in sources.readings) == ["constant_", "normal_", "zeros", "zeros"]


def test_noise_like_a_batch_is_a_draw_and_what_slopes_are_taken_by_is_a_sample() -> None:
    sources = Sources()
    with FollowSources(sources):
        rows = torch.arange(6.0)
        torch.randn_like(rows)
        moved = nn.functional.normalize(rows, dim=0).clone().requires_grad_()
    by_name = {place.rpartition(" ")[2]: readings[0] for place, readings in sources.readings.items()}
    assert by_name["randn_like"].made_of == ()
    assert by_name["normalize"].made_of == (by_name["arange"],)
    assert is_sample(moved)
    assert not is_sample(torch.ones(2, requires_grad=True))


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 2)


def train(sources: Sources, model: nn.Module) -> Iterator[torch.Tensor]:
    """Two batches of rows drawn from a table, as a script would; yields their losses."""
    table, targets = torch.arange(30.0).view(10, 3), torch.arange(10)
    for _ in range(2):
        rows = torch.randint(0, 10, (4,))
        inputs = torch.stack([table[row] for row in rows])
        wanted = targets[rows] % 2
        with sources.inside():
            output = model(inputs)
        sources.use(inputs, "model")
        yield nn.functional.cross_entropy(output, wanted)


def test_what_a_loss_takes_is_followed_to_where_it_was_drawn(model: nn.Module) -> None:
    sources = Sources()
    with FollowSources(sources):
        list(train(sources, model))
    (drawn,) = [readings for place, readings in sources.readings.items() if place.endswith("randint")]
    assert [reading.is_used for reading in drawn] == [True, True]
    taken = [readings for place, readings in sources.readings.items() if place.endswith("stack")]
    places = {place for readings in taken for reading in readings for place in reading.places()}
    assert places  # stacked of rows of the table, which are known by the draw


def test_one_process_that_is_given_the_rows_computes_inputs_and_targets_of_all_ranks(model: nn.Module) -> None:
    first = Sources()
    with FollowSources(first):
        list(train(first, model))
    (place,) = [place for place in first.readings if place.endswith("randint")]
    rows = [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 8])]
    replay = Replay({(place, time): [[("", one)] for one in rows] for time in (0, 1)}, set(), width=2)
    sources = Sources(replay=replay)
    with FollowSources(sources):
        losses = list(train(sources, model))
    table = torch.arange(30.0).view(10, 3)
    expected = nn.functional.cross_entropy(model(table[torch.cat(rows)]), torch.cat(rows) % 2)
    assert torch.allclose(torch.stack(losses), expected.expand(2))


def test_batches_one_after_another_are_those_of_one_rank_and_then_the_next(model: nn.Module) -> None:
    replay = Replay(
        {("draw", time): [[("", torch.tensor([10 * time + rank]))] for rank in (0, 1)] for time in (0, 1, 2, 3)},
        set(),
        width=2,
        times_a_batch={"draw": 2},
    )
    read = [int(replay.at(("draw", number), torch.zeros(1))) for number in range(8)]
    assert read == [0, 10, 1, 11, 20, 30, 21, 31]


def test_what_is_computed_without_gradients_is_followed_too_and_what_a_copy_gives_is_read(model: nn.Module) -> None:
    """Weights that are changed without gradients are no data."""
    sources, copies = Sources(), Copies()
    weight = torch.ones(2)
    with FollowSources(sources):
        rows = torch.rand(4, 3)
        with torch.no_grad():
            weight.mul_(0.5)
            (rows.T @ torch.ones(4)).div(2)
            with sources.inside():
                given = model(rows)
            copies.called(model, given, 1, marks_of([rows]))
            wanted = given.softmax(-1)
        sources.use(wanted, "loss")
    by_name = {place.rpartition(" ")[2]: readings[0] for place, readings in sources.readings.items()}
    assert "mul_" not in by_name
    assert by_name["div"].places() == [by_name["matmul"].at]
    assert by_name["matmul"].places()[0] == by_name["rand"].at  # through the transpose
    assert by_name["softmax"].made_of == ()
    assert by_name["softmax"].is_used
    assert by_name["rand"].is_used
    assert [one.step for one in copies.records()] == [1]


def test_numbers_that_a_script_takes_out_of_what_it_reads_are_known() -> None:
    sources = Sources()
    with FollowSources(sources):
        rows = torch.rand(4)
        torch.ones(3).tolist()
        float(rows.mean())
    assert [place.rpartition(" ")[2] for place, _ in sources.taken] == ["ones", "rand"]


def test_what_has_no_row_for_each_sample_is_given_where_rows_are_made_of_it() -> None:
    """As a number that each rank draws for its rows; at last what losses take is given, and nothing before it."""

    made = {"rows": (), "scale": (), "twice": (("scale", 0),), "scaled": (("rows", 0), ("twice", 0))}
    ranks = []
    for rank in (0, 1):
        sources = tuple(
            SourceRecord(
                number=number,
                place=place,
                prints=(f"{place} {rank}",),
                is_used=(True,),
                is_end=(False,),
                made_of=(made_of,),
            )
            for number, (place, made_of) in enumerate(made.items())
        )
        shapes = {"rows": (4, 3), "scale": (1,), "twice": (1,), "scaled": (4, 3)}
        tensors = {f"source/{number}/0/0/": torch.rand(*shapes[place]) for number, place in enumerate(made)}
        ranks.append(with_record(process_of(rank, 2, tensors), sources=sources))
    assert of_rows(ranks, [("rows", 0), ("scale", 0)]) == [("rows", 0), ("scaled", 0)]
    assert as_taken(ranks) == [("scaled", 0)]
