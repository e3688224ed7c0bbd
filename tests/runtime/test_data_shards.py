"""The data of each rank: one order under every plan, dealt out without overlap."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from paraplan.errors import UsageError
from paraplan.runtime.data.sharding import ShardedBatches, ShareSampler, shard_dataset
from paraplan.runtime.data.streams import BatchSettings

CPU = torch.device("cpu")


def numbered(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count), torch.arange(count) + 1000)


def shards(count: int, *, batch_size: int, dp: int, **options: object) -> list[ShardedBatches]:
    return [shard_dataset(numbered(count), BatchSettings(batch_size, dp, rank, CPU, **options)) for rank in range(dp)]


@given(
    num_samples=st.integers(1, 60),
    share=st.integers(1, 4),
    dp=st.integers(1, 4),
    seed=st.integers(0, 5),
    epochs=st.integers(1, 3),
)
def test_ranks_together_see_the_batches_that_one_process_sees(
    num_samples: int, share: int, dp: int, seed: int, epochs: int
) -> None:
    def steps(world: int, rank: int) -> list[list[int]]:
        sampler = ShareSampler(num_samples, BatchSettings(share * dp, world, rank, CPU, seed=seed, epochs=epochs))
        assert len(list(sampler)) == len(sampler)
        return list(sampler)

    by_rank = [steps(dp, rank) for rank in range(dp)]
    together = [list(chain(*parts)) for parts in zip(*by_rank, strict=True)]
    assert together == steps(1, 0)
    per_epoch = num_samples // (share * dp)
    for epoch in range(epochs):
        seen = list(chain(*together[epoch * per_epoch : (epoch + 1) * per_epoch]))
        assert len(set(seen)) == len(seen)


def test_the_last_short_batch_of_an_epoch_is_left_out() -> None:
    first, second = shards(11, batch_size=4, dp=2, epochs=2, shuffle=False)
    assert len(first) == 4
    assert [inputs.tolist() for inputs, _ in first] == [[0, 1], [4, 5], [0, 1], [4, 5]]
    assert [targets.tolist() for _, targets in second] == [[1002, 1003], [1006, 1007], [1002, 1003], [1006, 1007]]


def test_epochs_have_orders_of_their_own_and_seeds_too() -> None:
    (batches,) = shards(64, batch_size=64, dp=1, epochs=2)
    first, second = (inputs.tolist() for inputs, _ in batches)
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    (other,) = shards(64, batch_size=64, dp=1, seed=9)
    assert next(iter(other))[0].tolist() != first


@given(skip=st.integers(0, 9))
def test_skipped_steps_are_the_first_ones(skip: int) -> None:
    (whole,) = shards(13, batch_size=3, dp=1, epochs=2)
    (rest,) = shards(13, batch_size=3, dp=1, epochs=2, skip=skip)
    assert len(rest) == max(0, 8 - skip)
    assert [inputs.tolist() for inputs, _ in rest] == [inputs.tolist() for inputs, _ in whole][skip:]


def test_reading_data_leaves_the_random_numbers_of_the_training_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    (batches,) = shards(8, batch_size=4, dp=1)
    list(batches)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("count", "batch_size", "dp", "words"),
    [
        (8, 3, 2, "global batch of 3 does not divide over dp=2"),
        (8, 0, 1, "global batch of 0 does not divide"),
        (8, 16, 2, "8 samples, fewer than one global batch of 16"),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_the_numbers(
    count: int, batch_size: int, dp: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        shards(count, batch_size=batch_size, dp=dp)


def test_data_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(UsageError, match="object has neither numbered samples nor an iterator"):
        shard_dataset(object(), BatchSettings(1, 1, 0, CPU))


def test_samples_that_are_no_pairs_are_refused() -> None:
    batches = shard_dataset(torch.arange(4), BatchSettings(2, 1, 0, CPU))
    with pytest.raises(UsageError, match="pair"):
        list(batches)
