"""Streams: data without numbered samples, dealt out alike under every plan, and read on from where it was left."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from case_selection import with_all
from hypothesis import given
from hypothesis import strategies as st
from rank_harness import RankHarness, RanksFailedError
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training_cases import GLOBAL_BATCH, TOKENS, VOCABULARY, TokenPairs, Transformer, loss_fn

from paraplan import runtime
from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.data.sharding import ShardedBatches, shard_dataset
from paraplan.runtime.data.streams import BatchSettings, DataPasses, StreamBatches

CPU = torch.device("cpu")


class Numbers(IterableDataset[Any]):
    """Pairs of numbers; every pass begins with another one where it is told the epoch."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(self.count):
            yield torch.tensor(100 * self.epoch + number), torch.tensor(1000 + number)


class Remembering(Numbers):
    """A stream that knows where it is, and counts what is read of it."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.at = self.start = self.num_read = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.at, self.start = self.start, 0
        while self.at < self.count:
            self.at += 1
            self.num_read += 1
            yield torch.tensor(self.at - 1), torch.tensor(0)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def stream_of(count: int, *, batch_size: int, dp: int = 1, rank: int = 0, **options: Any) -> StreamBatches:
    stream = options.pop("stream", None) or Numbers(count)
    made = batches_of(stream, batch_size=batch_size, dp=dp, dp_rank=rank, **options)
    assert isinstance(made, StreamBatches)
    return made


def numbers_of(batches: Any) -> list[list[int]]:
    return [inputs.tolist() for inputs, _ in batches]


@given(
    count=st.integers(1, 40),
    share=st.integers(1, 3),
    dp=st.sampled_from([1, 2, 4]),
    epochs=st.integers(1, 2),
    drop_last=st.booleans(),
)
def test_ranks_together_see_the_batches_of_a_stream_that_one_process_sees(
    count: int, share: int, dp: int, epochs: int, drop_last: bool
) -> None:
    options: dict[str, Any] = {"batch_size": share * dp, "epochs": epochs, "drop_last": drop_last}
    by_rank = [numbers_of(stream_of(count, dp=dp, rank=rank, **options)) for rank in range(dp)]
    together = [list(chain(*parts)) for parts in zip(*by_rank, strict=True)]
    assert together == numbers_of(stream_of(count, **options))
    per_epoch = count // (share * dp) if drop_last else -(-count // (share * dp))
    assert len(together) == per_epoch * epochs


def test_a_rank_without_a_part_of_the_last_batch_has_one_without_sequences() -> None:
    parts = [[*stream_of(5, batch_size=4, dp=2, rank=rank, drop_last=False)] for rank in (0, 1)]
    assert [len(inputs) for inputs, _ in parts[0]] == [2, 0]
    assert [len(inputs) for inputs, _ in parts[1]] == [2, 1]


@given(skip=st.integers(0, 9))
def test_skipped_steps_of_a_stream_are_the_first_ones(skip: int) -> None:
    whole = numbers_of(stream_of(13, batch_size=3, epochs=2))
    assert numbers_of(stream_of(13, batch_size=3, epochs=2, skip=skip)) == whole[skip:]


@pytest.mark.parametrize("num_workers", [0, *with_all([1])])
@pytest.mark.parametrize("kind", [Numbers, Remembering])
@pytest.mark.parametrize("num_done", [0, 2, 4, 6])
def test_a_loaded_state_goes_on_exactly_also_under_another_dp(num_done: int, kind: Any, num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "epochs": 2, "num_workers": num_workers}
    whole = numbers_of(stream_of(18, stream=kind(18), **options))
    first = stream_of(18, stream=kind(18), dp=2, rank=1, **options)
    steps = iter(first)
    for _ in range(num_done):
        next(steps)
    state = json.loads(json.dumps(first.state_dict()))
    again = stream_of(18, stream=kind(18), **options)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert numbers_of(again) == whole[num_done:]


def test_a_stream_with_a_state_of_its_own_is_not_read_again() -> None:
    first = stream_of(40, stream=Remembering(40), batch_size=4)
    steps = iter(first)
    for _ in range(6):
        next(steps)
    stream = Remembering(40)
    again = stream_of(40, stream=stream, batch_size=4)
    again.load_state_dict(first.state_dict())
    assert numbers_of(again)[0] == [24, 25, 26, 27]
    assert stream.num_read == 40 - 24


@pytest.mark.parametrize("num_done", [0, 3, 7])
def test_numbered_samples_have_a_state_too(num_done: int) -> None:
    def batches(**options: Any) -> ShardedBatches:
        pairs = TensorDataset(torch.arange(20), torch.arange(20))
        made = batches_of(pairs, batch_size=4, epochs=2, **options)
        assert isinstance(made, ShardedBatches)
        return made

    whole, first, again = numbers_of(batches()), batches(), batches()
    steps = iter(first)
    for _ in range(num_done):
        next(steps)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert numbers_of(again) == whole[num_done:]
    assert len(numbers_of(again)) == len(whole)  # the state was for one loop
    with pytest.raises(UsageError, match="read with seed=0, and this is read with seed=5"):
        batches(seed=5).load_state_dict(first.state_dict())


def numbered(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count), torch.arange(count))


def batches_of(
    data: Any, *, dp: int = 1, dp_rank: int = 0, passes: DataPasses | None = None, **options: Any
) -> ShardedBatches | StreamBatches:
    return shard_dataset(data, BatchSettings(dp=dp, dp_rank=dp_rank, device=CPU, **options), passes=passes)


@pytest.mark.parametrize(
    ("kind", "num_workers", "num_done"),
    [
        # Where an epoch ends and where one goes on are the same to a worker.
        pytest.param(kind, num_workers, num_done, marks=[pytest.mark.with_all] * (num_workers > 0 and num_done != few))
        for kind, num_workers, few in ((numbered, 0, 0), (numbered, 1, 6), (Numbers, 0, 0), (Numbers, 1, 4))
        for num_done in (0, 3, 4, 6, 8)
    ],
)
def test_a_loop_over_epochs_goes_on_exactly_after_a_checkpoint(kind: Any, num_workers: int, num_done: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers}
    whole = numbers_of(batches_of(kind(18), epochs=3, **options))
    assert len(whole) == 12
    assert whole[:4] != whole[4:8] != whole[8:]

    first, given, state = batches_of(kind(18), **options), [], None
    for _ in range(3):
        for batch in first:
            given += numbers_of([batch])
            if len(given) == num_done:
                state = json.loads(json.dumps(first.state_dict()))
    assert given == whole, "one object"

    data, passes = kind(18), DataPasses()
    made = [numbers_of(batches_of(data, passes=passes, **options)) for _ in range(3)]
    assert list(chain(*made)) == whole, "a new one for each epoch"

    data, passes = kind(18), DataPasses()
    made = [numbers_of(batches_of(data, passes=passes, skip=num_done, **options)) for _ in range(3)]
    assert list(chain(*made)) == whole[num_done:], "steps that are done are skipped in all epochs"
    again = batches_of(kind(18), skip=num_done, **options)
    assert [one for _ in range(3) for one in numbers_of(again)] == whole[num_done:]

    if state is not None:
        again = batches_of(kind(18), **options)
        again.load_state_dict(state)
        rest = [one for _ in range((num_done - 1) // 4, 3) for one in numbers_of(again)]
        assert rest == whole[num_done:], "from the epoch of a state on"


def test_a_state_behind_an_epoch_begins_the_next_one() -> None:
    for data in (numbered, Numbers):
        first = batches_of(data(8), batch_size=4)
        numbers_of(first)
        again = batches_of(data(8), batch_size=4)
        again.load_state_dict(first.state_dict())
        assert numbers_of(again) == numbers_of(first) != []


def test_other_data_and_the_same_data_read_otherwise_have_epochs_of_their_own() -> None:
    passes, training, evaluation = DataPasses(), numbered(18), numbered(18)
    first = numbers_of(batches_of(training, passes=passes, batch_size=4))
    assert numbers_of(batches_of(evaluation, passes=passes, batch_size=4)) == first
    assert numbers_of(batches_of(training, passes=passes, batch_size=4, shuffle=False))[0] == [0, 1, 2, 3]
    assert numbers_of(batches_of(training, passes=passes, batch_size=4)) != first
    texts = [(number, number) for number in range(8)]  # a list cannot be referred to weakly
    batches = [numbers_of(batches_of(texts, passes=passes, batch_size=4)) for _ in range(2)]
    assert batches[0] != batches[1]


def test_streams_that_cannot_be_dealt_out_are_refused() -> None:
    once = iter([(1, 2)])
    for stream, options, words in [
        (once, {"epochs": 2}, "can be read once only"),
        (Numbers(4), {"shuffle": True}, "no numbered samples that job.shard could shuffle"),
        (Numbers(4), {"num_workers": 2}, "only one worker"),
        (DataLoader(Numbers(4), batch_size=2), {}, "gives batches, and job.shard takes samples"),
    ]:
        with pytest.raises(UsageError, match=words):
            batches_of(stream, batch_size=1, **options)
    with pytest.raises(UsageError, match="has no samples"):
        list(stream_of(0, batch_size=1))


class Pairs(IterableDataset[Any]):
    """Token sequences, other ones from sample `differs_from` on if that is given."""

    def __init__(self, differs_from: int | None = None) -> None:
        self._data, self._differs_from = TokenPairs(), differs_from

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(3 * GLOBAL_BATCH + 5):
            inputs, targets = self._data[number]
            differs = self._differs_from is not None and number >= self._differs_from
            yield (VOCABULARY - 1 - inputs if differs else inputs), targets


def train_on_a_stream(plan: ParallelPlan | None) -> list[float]:
    with runtime.init(plan) as job:
        torch.manual_seed(0)
        engine = job.prepare(
            Transformer(num_layers=2),
            loss_fn=loss_fn,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, fused=True),
            example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
        )
        batches = job.shard(Pairs(), batch_size=GLOBAL_BATCH, epochs=2, drop_last=False)
        return [engine.step(inputs, targets).item() for inputs, targets in batches]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(ParallelPlan(dp=2, micro_batch_size=6), id="ddp"),
        pytest.param(
            ParallelPlan(dp=2, tp=2, micro_batch_size=6), id="ddp and split layers", marks=pytest.mark.with_all
        ),
        pytest.param(
            ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=3),
            id="pipeline",
            marks=pytest.mark.with_all,  # as split layers, every stage reads the same samples
        ),
    ],
)
def test_a_stream_trains_under_a_plan_as_in_one_process(plan: ParallelPlan, ranks: RankHarness) -> None:
    alone = ranks.run_alone(train_on_a_stream, None)
    assert len(alone) == 8, "two epochs with a short batch at the end of each"
    for losses in ranks.run(train_on_a_stream, plan, size=plan.world_size):
        assert losses == pytest.approx(alone, rel=1e-5)


def read_another_stream() -> list[str]:
    with runtime.init() as job:
        stream = Pairs(differs_from=4 if job.world.rank == 1 else None)
        return [str(job.dp_rank) for _ in job.shard(stream, batch_size=GLOBAL_BATCH)]


@pytest.mark.ranks
def test_ranks_that_read_other_streams_are_told(ranks: RankHarness) -> None:
    with pytest.raises(RanksFailedError, match="gives rank 1 other samples than rank 0"):
        ranks.run(read_another_stream, size=2)


def read_two_jobs() -> int:
    """Read a stream in one job and another stream in the next, rank 0 last."""
    steps = 0
    for begin in (0, 50):
        job = runtime.init(ParallelPlan(dp=2, micro_batch_size=1))
        if job.is_main:
            time.sleep(0.5)
        samples = [(torch.tensor(begin + number), torch.tensor(0)) for number in range(8)]
        steps += sum(1 for _ in job.shard(iter(samples), batch_size=2))
    return steps


@pytest.mark.ranks
def test_the_stream_of_a_second_job_is_not_compared_with_that_of_the_first(ranks: RankHarness) -> None:
    assert ranks.run(read_two_jobs, size=2) == [8, 8]
