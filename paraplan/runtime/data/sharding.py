"""The data of one rank: the same global batches in the same order under every plan, cut by data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from paraplan.errors import UsageError
from paraplan.runtime.data.packing import (
    PackedRows,
    Packing,
    ShuffledDocuments,
    packed,
)
from paraplan.runtime.data.streams import (
    DeviceCopies,
    ShareOfBatch,
    StreamBatches,
    check_stream,
    shard_stream,
    without_sequences,
)


@runtime_checkable
class SizedDataset(Protocol):
    """What `job.shard` takes beside streams: pairs of inputs and targets by number, and how many there are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ShareSampler(Sampler[list[int]]):
    """The numbers of the samples of one data-parallel rank, a list for each step.

    Every epoch has its own order, drawn from `seed` and the epoch's number alone, so that it is the same on every rank
    and under every plan. Global batch k is entries k * B .. (k + 1) * B - 1 of that order; rank r of `dp` takes the
    r-th of its equal parts. Samples that do not fill a global batch are left out of their epoch; without `drop_last`
    they are a short one, whose parts differ by one sample at most. A rank without a part of it is given the number of
    a sample inverted (~number): one whose shape counts, and nothing else. The first `skip` steps of all are not given.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        dp: int,
        dp_rank: int,
        seed: int,
        epochs: int,
        shuffle: bool,
        skip: int = 0,
        drop_last: bool = True,
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.dp = dp
        self.dp_rank = dp_rank
        self.seed = seed
        self.epochs = epochs
        self.shuffle = shuffle
        self.skip = skip
        self.drop_last = drop_last

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch, a short one counted."""
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

    def __len__(self) -> int:
        return max(0, self.steps_per_epoch * self.epochs - self.skip)

    def __iter__(self) -> Iterator[list[int]]:
        return self._steps(self.skip)  # as it is now: the loader asks for the first step later

    def _steps(self, skip: int) -> Iterator[list[int]]:
        per_epoch, share = self.steps_per_epoch, ShareOfBatch(self.batch_size, self.dp, self.dp_rank)
        for epoch in range(skip // max(1, per_epoch), self.epochs):
            order = self._order(epoch)
            for step in range(max(0, skip - epoch * per_epoch), per_epoch):
                batch = order[step * self.batch_size : (step + 1) * self.batch_size]
                yield batch[share.of(len(batch))] or [~batch[0]]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        return order


class _Samples:
    """A data set that is also asked for samples of which only the shape counts, by their inverted numbers."""

    def __init__(self, dataset: SizedDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> tuple[bool, Any]:
        return (True, self._dataset[index]) if index >= 0 else (False, self._dataset[~index])


class _Collate:
    """Makes a batch of samples; one of those that do not count has no sequences. Workers can pickle it."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate or default_collate

    def __call__(self, samples: list[tuple[bool, Any]]) -> Any:
        batch = self._collate([sample for _, sample in samples])
        return batch if samples[0][0] else without_sequences(batch)


class ShardedBatches:
    """Batches of this rank, one for each step, on its device. `len` is the number of steps."""

    def __init__(
        self,
        dataset: SizedDataset,
        sampler: ShareSampler,
        *,
        device: torch.device,
        num_workers: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._device = device
        self._sampler = sampler
        self._skip = sampler.skip
        self._num_steps = sampler.skip
        self._loaded: int | None = None
        # A generator of its own: the loader would draw from torch's global one, and dropout would then differ by plan.
        self._loader: DataLoader[Any] = DataLoader(
            dataset if sampler.drop_last else _Samples(dataset),  # type: ignore[arg-type]  # any with numbered samples
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate if sampler.drop_last else _Collate(collate),
            pin_memory=device.type == "cuda",
            generator=torch.Generator().manual_seed(sampler.seed),
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        skip = self._skip if self._loaded is None else self._loaded
        self._num_steps, self._loaded, self._sampler.skip = skip, None, skip
        loaded, copied = iter(self._loader), DeviceCopies(self._device)
        self._sampler.skip = self._skip
        for pair in loaded:
            self._num_steps += 1
            yield copied(pair)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the data is read, the same on every rank and under every plan.

        Inside the loop it is the state behind the batch that the loop has been given last.
        """
        num_steps = self._num_steps if self._loaded is None else self._loaded
        return {"num_steps": num_steps, "batch_size": self._sampler.batch_size, "seed": self._sampler.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next loop where `state_dict` was taken; raise `UsageError` where that was other data."""
        own = self.state_dict()
        for name in ("batch_size", "seed"):
            if state.get(name) != own[name]:
                raise UsageError(
                    f"the saved data was read with {name}={state.get(name)}, and this is read with {name}={own[name]}",
                    hint=f"use the same {name}, or begin the data anew",
                )
        self._loaded = int(state["num_steps"])


def is_stream(dataset: object) -> TypeGuard[Iterable[Any]]:
    """Whether `dataset` is read from start to end, and has no samples by number."""
    if isinstance(dataset, IterableDataset):  # which has torch's __getitem__, that raises
        return True
    return not isinstance(dataset, SizedDataset) and isinstance(dataset, Iterable)


def shard_dataset(
    dataset: SizedDataset | Iterable[Any],
    *,
    batch_size: int,
    dp: int,
    dp_rank: int,
    device: torch.device,
    seed: int = 0,
    epochs: int = 1,
    shuffle: bool | None = None,
    skip: int = 0,
    drop_last: bool = True,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    check: Callable[[list[Any]], None] | None = None,
    pack: Packing | None = None,
) -> ShardedBatches | StreamBatches:
    """Return the batches of data-parallel rank `dp_rank`; `batch_size` is the global one. See `Job.shard`.

    `check` is called with the samples of the first global batch of a stream.
    """
    _check_batch_size(batch_size, dp)
    if shuffle and is_stream(dataset):
        raise UsageError(
            f"a {type(dataset).__name__} has no numbered samples that job.shard could shuffle",
            hint="shuffle the stream itself, by one seed on every rank, and leave shuffle out",
        )
    if pack is not None:
        dataset = _rows(dataset, pack, seed=seed, epochs=epochs, shuffle=shuffle is not False, num_workers=num_workers)
    if is_stream(dataset):
        return shard_stream(
            dataset,
            ShareOfBatch(batch_size, dp, dp_rank),
            device=device,
            epochs=epochs,
            skip=skip,
            drop_last=drop_last,
            num_workers=num_workers,
            collate=collate,
            check=check,
        )
    if not isinstance(dataset, SizedDataset):
        raise _no_data(dataset)
    if len(dataset) < (batch_size if drop_last else 1):
        raise UsageError(
            f"the dataset has {len(dataset)} samples, fewer than one global batch of {batch_size}",
            hint="use a smaller batch or more data",
        )
    sampler = ShareSampler(
        num_samples=len(dataset),
        batch_size=batch_size,
        dp=dp,
        dp_rank=dp_rank,
        seed=seed,
        epochs=epochs,
        shuffle=shuffle is not False,
        skip=skip,
        drop_last=drop_last,
    )
    return ShardedBatches(dataset, sampler, device=device, num_workers=num_workers, collate=collate)


def _rows(
    dataset: SizedDataset | Iterable[Any], pack: Packing, *, seed: int, epochs: int, shuffle: bool, num_workers: int
) -> PackedRows:
    """Return the rows of the documents that `dataset` holds."""
    if is_stream(dataset):
        check_stream(dataset, epochs=epochs, num_workers=num_workers)
        return packed(dataset, pack)
    if not isinstance(dataset, SizedDataset):
        raise _no_data(dataset)
    return packed(ShuffledDocuments(dataset, seed=seed, shuffle=shuffle), pack)


def _no_data(dataset: object) -> UsageError:
    return UsageError(
        f"a {type(dataset).__name__} has neither numbered samples nor an iterator",
        hint="give job.shard a dataset or an iterable, or cut the data yourself by job.dp_rank and job.dp",
    )


def _check_batch_size(batch_size: int, dp: int) -> None:
    if batch_size < 1 or batch_size % dp:
        raise UsageError(
            f"a global batch of {batch_size} does not divide over dp={dp} ranks",
            hint=f"use a multiple of {dp}, such as {max(1, batch_size // dp) * dp}",
        )
