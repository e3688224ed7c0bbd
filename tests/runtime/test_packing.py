"""Packing: rows of documents that do not see each other, the same under every plan, read on from where it was left."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import tiny_transformers
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from hypothesis import given
from hypothesis import strategies as st
from rank_harness import RankHarness
from torch.utils.data import IterableDataset

from paraplan import runtime
from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime import Packing
from paraplan.runtime.data.packing import packed
from paraplan.runtime.data.sharding import shard_dataset
from paraplan.runtime.data.streams import BatchSettings

CPU, LENGTH, ROWS = torch.device("cpu"), 16, 8
Trained = tuple[list[float], float, dict[str, torch.Tensor]]


def documents(count: int = 200) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(1, tiny_transformers.VOCABULARY, (length,), generator=generator) for length in lengths]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(documents())


class StatefulDocuments(Stream):
    """Knows where it is, and counts what is read."""

    def __init__(self) -> None:
        self.at = self.start = self.num_read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.start = self.start, 0
        for document in documents()[self.at :]:
            self.at += 1
            self.num_read += 1
            yield document

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def test_a_document_goes_to_the_first_row_with_room_and_padding_is_a_document_of_its_own() -> None:
    given = [
        [1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [10],
        {"input_ids": [11, 12, 13], "labels": [-100, -100, 13]},
        list(range(20, 27)),
    ]
    rows = list(packed(given, Packing(5, open_rows=2, pad_id=99, with_labels=True)))
    assert [inputs["input_ids"].tolist() for inputs, _ in rows] == [
        [1, 2, 3, 8, 9],
        [4, 5, 6, 7, 10],
        [11, 12, 13, 25, 26],
        [20, 21, 22, 23, 24],
    ]
    inputs, targets = rows[2]
    assert inputs["position_ids"].tolist() == [0, 1, 2, 0, 1]
    assert inputs["labels"].tolist() == [-100, -100, 13, -100, 26]
    assert targets.tolist() == [-100, 13, -100, 26, -100]
    ((inputs, targets),) = packed([[1, 2]], Packing(5, pad_id=99))
    assert inputs["input_ids"].tolist() == [1, 2, 99, 99, 99]
    assert inputs["position_ids"].tolist() == [0, 1, 0, 1, 2]
    assert targets.tolist() == [2, -100, -100, -100, -100]


@given(lengths=st.lists(st.integers(0, 20), max_size=40), open_rows=st.integers(1, 5), dp=st.sampled_from([1, 2, 4]))
def test_every_token_stands_in_one_row_and_every_rank_has_as_many_steps(
    lengths: list[int], open_rows: int, dp: int
) -> None:
    starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    given = [list(range(start + 1, end + 1)) for start, end in pairwise(starts)]
    if not any(given):
        return
    shards = [
        list(
            shard_dataset(
                given,
                BatchSettings(4, dp, rank, CPU, drop_last=False),
                pack=Packing(8, open_rows=open_rows),
            )
        )
        for rank in range(dp)
    ]
    assert len({len(steps) for steps in shards}) == 1
    rows = [row for steps in shards for inputs, _ in steps for row in inputs["input_ids"].tolist()]
    assert all(len(row) == 8 for row in rows)
    assert sorted(token for row in rows for token in row if token) == list(range(1, starts[-1] + 1))


def test_a_row_is_what_the_collator_of_transformers_makes_of_its_documents() -> None:
    from transformers import DataCollatorWithFlattening

    mine = documents(3)
    ((inputs, _),) = packed(mine, Packing(sum(map(len, mine)), with_labels=True))
    theirs = DataCollatorWithFlattening()([{"input_ids": one} for one in mine])
    assert inputs.keys() == theirs.keys()
    assert all(torch.equal(inputs[name][None], theirs[name]) for name in inputs)


@pytest.mark.parametrize("kind", [documents, Stream, StatefulDocuments])
def test_reading_goes_on_exactly_where_it_was_left_under_another_plan_too(kind: Any) -> None:
    def batches(dp: int, rank: int) -> Any:
        return shard_dataset(kind(), BatchSettings(ROWS, dp, rank, CPU, seed=4, epochs=2), pack=Packing(LENGTH))

    whole = [inputs["input_ids"] for inputs, _ in batches(1, 0)]
    assert len(whole) > 10
    if kind is documents:
        assert not torch.equal(whole[0], whole[len(whole) // 2])  # another order in the second epoch
    for left in (1, 4, len(whole) // 2, len(whole) - 2):
        before, states = batches(1, 0), []
        for number, _ in enumerate(before, 1):
            if number == left:
                states.append(json.loads(json.dumps(before.state_dict())))
                break
        rest = []
        for rank in range(2):
            behind = batches(2, rank)
            behind.load_state_dict(states[0])
            rest.append([inputs["input_ids"] for inputs, _ in behind])
        assert len(rest[0]) == len(rest[1]) == len(whole) - left
        for number, halves in enumerate(zip(*rest, strict=True), left):
            assert torch.equal(torch.cat(halves), whole[number])


def test_documents_that_know_where_they_are_are_not_read_again() -> None:
    first = shard_dataset(StatefulDocuments(), BatchSettings(4, 1, 0, CPU), pack=Packing(LENGTH))
    next(iter(first))
    again = StatefulDocuments()
    behind = shard_dataset(again, BatchSettings(4, 1, 0, CPU), pack=Packing(LENGTH))
    behind.load_state_dict(first.state_dict())
    list(behind)
    assert again.num_read == len(documents()) - first.state_dict()["stream"]["documents"]["at"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_the_loss_of_a_row_is_that_of_its_documents_alone(family: str, attention: str) -> None:
    torch.manual_seed(0)
    model = tiny_transformers.build(family, attn_implementation=attention).eval()
    for inputs, targets in list(packed(documents(20), Packing(LENGTH)))[:3]:
        logits = model(**{name: one[None] for name, one in inputs.items()}).logits[0]
        together = F.cross_entropy(logits, targets, reduction="sum")
        starts = [*(inputs["position_ids"] == 0).nonzero().flatten().tolist(), LENGTH]
        alone = torch.zeros(())
        for start, end in pairwise(starts):
            own = model(input_ids=inputs["input_ids"][None, start:end]).logits[0]
            alone = alone + F.cross_entropy(own, targets[start:end], reduction="sum").nan_to_num()
        assert together.item() == pytest.approx(alone.item(), rel=1e-5)


def trained(plan: ParallelPlan, *, with_labels: bool) -> Trained:
    warnings.simplefilter("ignore")
    job = runtime.init(plan, precision="fp32")
    torch.manual_seed(0)
    example = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long), "position_ids": torch.arange(LENGTH).repeat(2, 1)}
    engine = job.prepare(
        tiny_transformers.build("llama", attn_implementation="sdpa"),
        loss_fn=own_loss if with_labels else token_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_grad_norm=10.0,
        verify="off",
        example_inputs=example | ({"labels": example["input_ids"]} if with_labels else {}),
    )
    losses = []
    batches = job.shard(documents(), batch_size=ROWS, seed=3, pack=Packing(LENGTH, with_labels=with_labels))
    for inputs, targets in batches:
        losses.append(engine.step(inputs, targets).item())
        if len(losses) == 2:
            break
    held = {name: one.grad for name, one in engine.parameters.items() if one.grad is not None}
    return losses, engine.grad_norm.item(), {name: engine.whole(name, one).clone() for name, one in held.items()}


def own_loss(outputs: Any, _: Any) -> torch.Tensor:
    return outputs.loss


def token_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def trained_all(plans: list[ParallelPlan]) -> list[Trained]:
    return [trained(plan, with_labels=number % 2 == 0) for number, plan in enumerate(plans)]


def plan_of(**options: Any) -> ParallelPlan:
    shares = options.get("dp", 1) * options.setdefault("num_microbatches", 1)
    return ParallelPlan(**options, micro_batch_size=ROWS // shares)


TWO_RANKS = [
    plan_of(dp=2, zero_stage=3, num_microbatches=2),
    plan_of(cp=2),
    *with_all([plan_of(pp=2, pipeline_schedule="1f1b", num_microbatches=4), plan_of(tp=2, sequence_parallel=True)]),
    # The first ones cut rows in these ways too.
    *with_all([plan_of(pp=2, pipeline_schedule="zero_bubble", num_microbatches=4, recompute="full")]),
    *with_all([plan_of(dp=2), plan_of(tp=2), plan_of(cp=2, zero_stage=2)]),
]
FOUR_RANKS = [
    plan_of(pp=2, cp=2, pipeline_schedule="1f1b", num_microbatches=2),
    *with_all([plan_of(tp=2, cp=2)]),  # split layers leave rows as they are
]


@pytest.fixture(scope="module")
def one_process(ranks: RankHarness) -> list[Trained]:
    found: list[Trained] = ranks.run_alone(trained_all, [plan_of(), plan_of()])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("plans", "size"), [(TWO_RANKS, 2), *with_all([(FOUR_RANKS, 4)])])
def test_packed_rows_train_as_in_one_process(
    ranks: RankHarness, one_process: list[Trained], plans: list[ParallelPlan], size: int
) -> None:
    expected = one_process
    assert expected[0][0] == pytest.approx(expected[1][0], rel=1e-6)  # by the model's own loss and by ours
    by_rank = ranks.run(trained_all, plans, size=size)
    for number, plan in enumerate(plans):
        gradients: dict[str, torch.Tensor] = {}
        for answers in by_rank:
            losses, norm, held = answers[number]
            assert losses == pytest.approx(expected[0][0], rel=2e-6), plan
            assert norm == pytest.approx(expected[0][1], rel=1e-5), plan
            gradients |= held
        assert gradients.keys() == expected[0][2].keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[0][2][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_cache_beside_packed_rows_is_refused(*, is_first: bool) -> None:
    model = tiny_transformers.build("llama")
    model.config.use_cache = True
    job = runtime.init(plan_of(), precision="fp32")

    def prepare() -> None:
        job.prepare(model, loss_fn=own_loss, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def shard() -> None:
        job.shard(documents(), batch_size=ROWS, pack=Packing(LENGTH))

    first, second = (shard, prepare) if is_first else (prepare, shard)
    first()
    with pytest.raises(UsageError, match="use_cache=True, and with a cache"):
        second()


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (torch.rand(3), "must be token ids"),
        ("text", "must be token ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
    ],
)
def test_what_is_no_document_is_refused(document: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        list(packed([document], Packing(4)))


def test_rows_without_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match=r"Packing\(seq_length=0\)"):
        Packing(0)
