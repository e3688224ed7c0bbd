"""What records of ranks and of one process say together: each kind of fault is told from the others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_runs import NAMES, Change, process_of, sight, with_record

from paraplan.script_check.evidence import Process, Sight, ranks_of
from paraplan.script_check.findings import first_difference
from paraplan.script_check.mixtures import weights_of
from paraplan.script_check.reading_plan import groups_of, origins, put_together
from paraplan.script_check.records import CopyRecord, SourceRecord
from paraplan.script_check.steadiness import changing, loose, why_loose


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), num_ranks=st.integers(2, 5))
def test_rounding_is_no_difference(seed: int, num_ranks: int) -> None:
    random = torch.Generator().manual_seed(seed)
    noisy = sight(num_ranks, lambda _, whole, __: whole * (1 + 3e-7 * torch.randn(4, 3, generator=random)), seed=seed)
    found, error, _ = first_difference(noisy)
    assert found is None
    assert 0 < error < 1e-5


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), num_ranks=st.integers(2, 5), is_over=st.booleans())
def test_a_gradient_that_is_summed_or_divided_once_too_often_is_told_with_its_factor(
    seed: int, num_ranks: int, is_over: bool
) -> None:
    factor = num_ranks if is_over else 1 / num_ranks
    found, _, _ = first_difference(sight(num_ranks, lambda _, whole, __: whole * factor, seed=seed))
    assert found is not None
    assert (found.kind, found.name, found.num_alike) == ("scaled", NAMES[0], 3)
    assert found.factor == pytest.approx(factor)
    assert "the number of ranks" in found.cause
    assert ("summed" in found.cause) == is_over


def _own_share(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    if name != "layer.weight":
        return whole
    other = torch.full_like(whole, 3.0)
    return whole + (other if rank else -other)


FAULTS: dict[str, tuple[Change, str, str]] = {
    "a layer whose gradient is never reduced": (_own_share, "not reduced", "their mean is the gradient of all batches"),
    "no gradient on one rank": (
        lambda name, whole, rank: None if name == "head.bias" and rank == 1 else whole,
        "no gradient",
        "none on rank 1",
    ),
    "a gradient that is lost": (lambda name, whole, _: whole * (name != "head.bias"), "zero", "zero on all ranks"),
    "a gradient that overflows": (lambda _, whole, rank: whole / (1 - rank), "not finite", "finite in one process"),
    "ranks that each scale the gradient": (lambda _, whole, rank: whole * (1 + rank), "scaled", "1, 2 times"),
    "a gradient in bf16": (lambda _, whole, __: whole.bfloat16().float(), "16 bits", "bfloat16"),
    "a gradient that is scaled": (lambda _, whole, __: whole * 1.3, "scaled", "1.3 times those"),
    "noise in the gradient": (
        lambda _, whole, __: whole + torch.tensor([[1.0, -1.0, 0.5]] * 4),
        "another direction",
        "cosine",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_kinds_of_faults_are_told_apart(fault: str) -> None:
    change, kind, words = FAULTS[fault]
    found, _, _ = first_difference(sight(2, change))
    assert found is not None
    assert (found.kind, found.quantity) == (kind, "gradient")
    assert words in found.cause


def test_the_gradient_of_one_rank_and_the_mean_of_all_shares_are_known_by_what_each_batch_gives() -> None:
    plain = sight(2, lambda _, whole, __: whole)
    first, second = (share.of("gradient/1") for share in plain.shares)

    def told(change: Change) -> str:
        seen = sight(2, change)
        uneven = {
            key: value * 1.7 if key.startswith("gradient") else value for key, value in seen.alone.tensors.items()
        }
        uneven["gradient/1/layer.weight"] = first["layer.weight"] * 0.3 + second["layer.weight"] * 0.7
        uneven["gradient/1/embedding.weight"] = first["embedding.weight"] * 0.3 + second["embedding.weight"] * 0.7
        found, _, _ = first_difference(
            Sight(
                seen.ranks,
                Process(seen.alone.record, uneven),
                Process(seen.shaken.record, uneven),
                seen.shares,
                seen.groups,
            )
        )
        assert found is not None
        return found.kind

    assert told(lambda name, _, __: second[name]) == "one rank's share"
    assert told(lambda name, _, __: (first[name] + second[name]) / 2) == "mean of shares"


@settings(max_examples=25, deadline=None)
@given(weights=st.lists(st.floats(-3, 3), min_size=2, max_size=5), seed=st.integers(0, 999))
def test_a_mixture_of_gradients_is_known_by_how_much_there_is_of_each(weights: list[float], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    parts = [[torch.randn(4, 5, generator=random), torch.randn(7, generator=random)] for _ in weights]
    whole = [
        sum(weight * one for weight, one in zip(weights, every, strict=True)) for every in zip(*parts, strict=True)
    ]
    if sum(float(one.norm()) for one in whole) > 1e-3:
        found = weights_of(whole, parts)
        assert found is not None
        assert found == pytest.approx(weights, abs=0.02)
        other = torch.randn(7, generator=random) * float(whole[0].norm())
        assert weights_of([whole[0], whole[1] + other], parts) is None


def test_what_a_wrong_gradient_is_made_of_is_told() -> None:
    """Batches of ranks that count more than others, another parameter, one that is mixed in, a lost micro-batch."""
    right = sight(2, lambda _, whole, __: whole)
    first, second = (share.of("gradient/1") for share in right.shares)
    passes = {f"pass/1/1/{name}": 0.3 * first[name] for name in NAMES}
    passes |= {f"pass/1/2/{name}": (first[name] + second[name]) / 2 for name in NAMES}
    cases = (
        (0.25 * first["layer.weight"] + 0.75 * second["layer.weight"], None, "ranks 0, 1 count 0.5, 1.5 times in it"),
        ((first["head.bias"] + second["head.bias"]) / 2, None, "it is the gradient of head.bias, of the same shape"),
        (
            (first["head.bias"] + second["layer.weight"]) / 2,
            None,
            "the gradient of head.bias, of the same shape, is mixed",
        ),
        (0.2 * first["layer.weight"] + 0.5 * second["layer.weight"], passes, "micro-batch 1 of 2 is lost"),
        (0.8 * first["layer.weight"] + 0.5 * second["layer.weight"], passes, "micro-batches count 2, 1 times in it"),
    )
    for value, noted, words in cases:
        seen = sight(2, lambda name, whole, _, value=value: value if name == "layer.weight" else whole)  # type: ignore[misc]
        if noted is not None:
            seen = dataclasses.replace(seen, num_micro_batches=2, passes=process_of(0, 1, noted))
        found, _, _ = first_difference(seen)
        assert found is not None
        assert (found.kind, found.name) == ("other parts", "layer.weight"), found.cause
        assert words in found.cause


@pytest.mark.parametrize(("is_changed", "kind"), [(True, "unlike buffers"), (False, "another direction")])
def test_a_buffer_that_each_rank_changes_in_its_own_way_explains_what_parts(is_changed: bool, kind: str) -> None:
    seen = sight(2, lambda _, whole, __: whole + torch.tensor([[1.0, -1.0, 0.5]] * 4))
    for number, one in enumerate((*seen.ranks, seen.alone)):
        before = torch.zeros(3) if is_changed else torch.full((3,), float(number))
        one.tensors.update({"buffer/0/mean": before, "buffer/1/mean": torch.full((3,), float(number))})
    found, _, _ = first_difference(seen)
    assert found is not None
    assert found.kind == kind
    assert ("the buffer mean" in found.cause) == is_changed


def test_the_axis_over_which_ranks_differ_is_named_and_a_sum_told_from_a_mean() -> None:
    seen = sight(4, lambda _, whole, rank: whole / 2 + (1 if rank % 2 else -1))
    groups = {rank: (("dp", (rank % 2, rank % 2 + 2)), ("tp", (rank // 2 * 2, rank // 2 * 2 + 1))) for rank in range(4)}
    ranks = [Process(one.record.replace(groups=groups[one.record.rank]), one.tensors) for one in seen.ranks]
    found, _, _ = first_difference(Sight(ranks, seen.alone, seen.shaken, seen.shares, seen.groups))
    assert found is not None
    assert found.kind == "not reduced"
    assert "ranks of tp differ (0, 2 | 1, 3), and their sum is the gradient" in found.cause


def test_a_gradient_that_rounding_changes_by_much_is_named_with_where_that_begins() -> None:
    """As that of an expert that is chosen by nearly equal scores."""
    seen = sight(2, lambda _, whole, __: whole)
    assert loose(seen) is None
    seen.shaken.tensors["gradient/1/layer.weight"] = seen.alone.tensors["gradient/1/layer.weight"] * 1.25
    found = loose(seen)
    assert found == ("layer.weight", pytest.approx(0.25))
    of_layers = {"embedding": (1.0, 0.5, 2.0), "layer": (3.0, 0.5, 2.0)}
    seen = dataclasses.replace(seen, alone=with_record(seen.alone, outputs=of_layers))
    seen = dataclasses.replace(
        seen, shaken=with_record(seen.shaken, outputs=of_layers | {"layer": (3.1, 0.5, 2.0)}), again=seen.alone
    )
    text = why_loose(seen, *found)
    assert "change the gradient of layer.weight by 0.25 of its size: something in layer chooses" in text
    assert changing(seen, 1) == set()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), size=st.floats(1e-4, 0.5), is_forward=st.booleans())
def test_what_changes_from_run_to_run_is_named_and_compared_no_further(
    seed: int, size: float, is_forward: bool
) -> None:
    """As by a kernel whose sums have no order: ranks then have yet other values."""
    random = torch.Generator().manual_seed(seed)

    def once_more(value: torch.Tensor) -> torch.Tensor:
        return value * (1 + size * torch.randn(value.shape, generator=random).clamp(-2, 2))

    seen = sight(2, lambda name, whole, _: once_more(whole) if name == "layer.weight" else whole, seed=seed)
    outputs = {"embedding": (1.0, 0.5, 2.0), "layer": (3.0, 0.5, 2.0)}
    other = outputs | {"layer": (3.0 + size, 0.5, 2.0)} if is_forward else outputs
    again = Process(seen.alone.record.replace(outputs=other), dict(seen.alone.tensors))
    seen = dataclasses.replace(seen, alone=with_record(seen.alone, outputs=outputs), again=again)
    for process in (again, seen.shaken):
        key = "gradient/1/layer.weight"
        process.tensors[key] = once_more(seen.alone.tensors[key])
    assert changing(seen, 1) == {"layer.weight"}
    text = why_loose(seen, "layer.weight", size)
    assert "from run to run of one process" in text
    assert ("the output of layer is the first that does" if is_forward else "it is on the way back") in text
    assert first_difference(seen)[0] is None


@settings(max_examples=20, deadline=None)
@given(num_ranks=st.integers(2, 5), data=st.data(), far=st.floats(1e-6, 10.0))
def test_a_copy_that_some_ranks_alone_update_is_told_with_their_numbers(
    num_ranks: int, data: st.DataObject, far: float
) -> None:
    """As a teacher that follows the model on one rank."""
    still = data.draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks - 1))
    seen = sight(num_ranks, lambda _, whole, __: whole)

    def copied(rank: int, start: str) -> Process:
        moved = (0.0, 0.0) if rank in still else (far, far / 3)
        call = CopyRecord(number=0, name="Teacher", start=start, step=1, moved=moved)
        return with_record(seen.ranks[rank], copies=(call,))

    alike = dataclasses.replace(seen, ranks=[copied(rank, "a") for rank in range(num_ranks)])
    found = first_difference(alike)[0]
    assert (found is not None) == bool(still)
    if found is not None:
        assert found.kind == "unlike copies"
        assert f"stands still on {ranks_of(sorted(still))}" in found.cause
    parts = dataclasses.replace(seen, ranks=[copied(rank, str(rank)) for rank in range(num_ranks)])
    assert first_difference(parts)[0] is None  # shards start unlike, and move so


def test_shards_that_are_put_together_in_another_order_are_told() -> None:
    seen = sight(2, lambda _, whole, __: whole)
    for one in seen.ranks:
        value = one.tensors["parameter/1/layer.weight"]
        one.tensors["parameter/1/layer.weight"] = torch.cat(value.chunk(2)[::-1])
    found, _, _ = first_difference(seen)
    assert found is not None
    assert (found.kind, found.name) == ("update", "layer.weight")
    assert "it has the parts 1, 0 of its 2 one after another" in found.cause


def test_a_parameter_that_one_rank_does_not_step_and_steps_that_one_rank_does_not_make_are_told() -> None:
    seen = sight(2, lambda _, whole, __: whole)
    first, second = seen.ranks
    still = second.tensors | {"parameter/1/head.bias": second.tensors["start/head.bias"]}
    found, _, _ = first_difference(Sight([first, Process(second.record, still)], seen.alone, seen.shaken))
    assert found is not None
    assert (found.kind, found.name, found.ranks) == ("not stepped", "head.bias", (1,))
    fewer = Process(second.record.replace(steps=()), second.tensors)
    found, _, _ = first_difference(Sight([first, fewer], seen.alone, seen.shaken))
    assert found is not None
    assert (found.kind, found.ranks) == ("unlike steps", (1,))


def test_a_norm_that_is_another_is_told_where_gradients_are_right() -> None:
    found, _, _ = first_difference(sight(4, lambda _, whole, __: whole, norm=2.0))
    assert found is not None
    assert (found.kind, found.quantity, found.factor) == ("norm", "gradient norm", pytest.approx(2.0))


def test_parts_that_torch_knows_nothing_of_are_put_together_in_the_order_of_ranks() -> None:
    whole = torch.arange(12.0).view(4, 3)
    ranks = [
        process_of(rank, 4, {"start/layer.weight": part, "gradient/1/layer.weight": part + 1})
        for rank, part in enumerate([*whole.chunk(2), *whole.chunk(2)])
    ]
    made, num_names, num_parts = put_together(ranks, process_of(0, 1, {"start/layer.weight": whole}))
    assert (num_names, num_parts) == (1, 2)
    for one in made:
        assert torch.equal(one.tensors["start/layer.weight"], whole)
        assert torch.equal(one.tensors["gradient/1/layer.weight"], whole + 1)


def reads(rank: int, **prints: tuple[str, ...]) -> Process:
    """A process that read `rows` first, and made `targets` of them."""
    one = process_of(rank, 2, {})
    sources = tuple(
        SourceRecord(
            number=number,
            place=place,
            prints=found,
            is_used=(True,) * len(found),
            is_end=(False,) * len(found),
            made_of=tuple((("rows", time),) if place == "targets" else () for time in range(len(found))),
        )
        for number, (place, found) in enumerate(prints.items())
    )
    return Process(one.record.replace(sources=sources), {})


def test_one_process_is_given_what_ranks_read_first_and_computes_the_rest() -> None:
    ranks = [
        reads(rank, table=("same", "same"), rows=(f"{rank}a", f"{rank}b"), targets=(f"{rank}c", f"{rank}d"))
        for rank in (0, 1)
    ]
    read = origins(ranks)
    assert read == [("rows", 0), ("rows", 1)]
    assert groups_of(ranks, read) == [[0], [1]]
    same = [reads(rank, rows=("a", "b")) for rank in (0, 1)]
    assert groups_of(same, origins(same)) == [[0, 1]]


@pytest.mark.parametrize(("dim", "read"), [(1, []), (0, [("part", 0)])])
def test_parts_of_the_columns_of_what_all_ranks_read_are_no_batches_of_their_own(dim: int, read: list[object]) -> None:
    whole = torch.arange(12.0).view(2, 6)
    ranks = []
    for rank, part in enumerate(whole.chunk(2, dim)):
        one = reads(rank, rows=("same",), part=(f"{rank}",), targets=(f"{rank}t",))
        made_of = {"rows": (), "part": (("rows", 0),), "targets": (("part", 0),)}
        sources = tuple(source.replace(made_of=(made_of[source.place],)) for source in one.record.sources)
        tensors = {"source/0/0/0/": whole, "source/1/0/0/": part, "source/2/0/0/": part + 1}
        ranks.append(Process(one.record.replace(sources=sources), tensors))
    assert origins(ranks) == read


def test_what_rounding_leaves_of_a_gradient_whose_terms_cancel_is_no_difference_and_a_lost_one_is() -> None:
    def cancelled(name: str, whole: torch.Tensor, size: float) -> torch.Tensor:
        return torch.full_like(whole, size) if name == "head.bias" else whole

    ranks = sight(2, lambda name, whole, _: cancelled(name, whole, 3e-7))
    for process in (ranks.alone, ranks.shaken):
        process.tensors["gradient/1/head.bias"] = torch.zeros(4, 3)
        process.tensors["parameter/1/head.bias"] = torch.full((4, 3), 0.9)  # Adam steps by rounding as by any other
    assert first_difference(ranks)[0] is None
    lost = sight(2, lambda name, whole, _: cancelled(name, whole, 3e-3))
    for process in (lost.alone, lost.shaken):
        process.tensors["gradient/1/head.bias"] = torch.zeros(4, 3)
    found = first_difference(lost)[0]
    assert found is not None
    assert (found.quantity, found.name) == ("gradient", "head.bias")
