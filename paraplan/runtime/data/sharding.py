"""The data of one rank: the same global batches in the same order under every plan, cut by data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
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
    DataPasses,
    DeviceCopies,
    Passes,
    Reading,
    ShareOfBatch,
    StreamBatches,
    check_stream,
    read_in,
    without_sequences,
)


@runtime_checkable
class SizedDataset(Protocol):
    """A dataset for `job.shard`, beside streams: pairs of inputs and targets by number, and how many there are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ShareSampler(Sampler[list[int]]):
    """The numbers of the samples of one data-parallel rank, a list for each step.

    Every epoch has its own order, drawn from `seed` and the epoch's number alone, so that it is the same on every rank
    and under every plan. Global batch k is entries k * B .. (k + 1) * B - 1 of that order; rank r of `dp` takes the
    r-th of its equal parts. Samples that do not fill a global batch are left out of their epoch; without `drop_last`
    they are a short one, whose parts differ by one sample at most. A rank without a part of it is given the number of
    a sample inverted (~number): one whose shape counts, and nothing else. A pass goes over `epochs` epochs: `number`
    says which pass it is, and the first `skip` steps of all passes are not given.
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
        number: int = 0,
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
        self.number = number
        self.drop_last = drop_last

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch, a short one counted."""
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

    @property
    def steps_per_pass(self) -> int:
        """Global batches of all epochs of a pass."""
        return self.steps_per_epoch * self.epochs

    @property
    def first_step(self) -> int:
        """The number of the first step that this pass gives."""
        return max(self.skip, self.number * self.steps_per_pass)

    def __len__(self) -> int:
        return max(0, (self.number + 1) * self.steps_per_pass - self.first_step)

    def __iter__(self) -> Iterator[list[int]]:
        return self._steps(self.first_step, len(self))  # as it is now: the loader asks for the first step later

    def _steps(self, first: int, count: int) -> Iterator[list[int]]:
        share, order, epoch = ShareOfBatch(self.batch_size, self.dp, self.dp_rank), list[int](), -1
        for step in range(first, first + count):
            if epoch != step // self.steps_per_epoch:
                epoch = step // self.steps_per_epoch
                order = self._order(epoch)
            start = step % self.steps_per_epoch * self.batch_size
            batch = order[start : start + self.batch_size]
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
    """Batches of this rank, one for each step, on its device. `len` is the number of steps of a loop.

    Each loop is the next of `passes`, also of other objects that have these. Each is read in a context of `reading`.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        sampler: ShareSampler,
        *,
        device: torch.device,
        num_workers: int,
        collate: Callable[[list[Any]], Any] | None,
        passes: Passes,
    ) -> None:
        self._device = device
        self._sampler = sampler
        self._skip = sampler.skip
        self._passes = passes
        self._at: tuple[int, int] | None = None  # the pass, and the steps given of all
        self._is_loaded = False
        self.reading: Reading = nullcontext
        # A generator of its own: the loader would draw from torch's global one, and dropout would then differ by plan.
        self._loader: DataLoader[Any] = DataLoader(
            dataset if sampler.drop_last else _Samples(dataset),  # type: ignore[arg-type]  # any with numbered samples
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate if sampler.drop_last else _Collate(collate),
            pin_memory=device.type == "cuda",
            generator=torch.Generator().manual_seed(sampler.seed),
        )

    def _begin(self) -> tuple[int, int]:
        """Return the pass and the step that a loop begins with where none has begun."""
        number = self._passes.number
        return number, max(self._skip, number * self._sampler.steps_per_pass)

    def __len__(self) -> int:
        self._sampler.number, self._sampler.skip = self._begin()[0] if self._at is None else self._at[0], self._skip
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        number, num_steps = self._at if self._at is not None and self._is_loaded else self._begin()
        self._sampler.number, self._sampler.skip = number, num_steps
        self._at, self._is_loaded, self._passes.number = (number, num_steps), False, number + 1
        copied = DeviceCopies(self._device)
        for pair in read_in(self.reading, self._loader):
            num_steps += 1
            self._at = (number, num_steps)
            yield copied(pair)
        self._at = (number + 1, num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the data is read, the same on every rank and under every plan.

        Inside the loop it is the state behind the batch that the loop has been given last.
        """
        number, num_steps = self._begin() if self._at is None else self._at
        sampler = self._sampler
        return {"pass": number, "num_steps": num_steps, "batch_size": sampler.batch_size, "seed": sampler.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next loop where `state_dict` was taken; raise `UsageError` where that was other data."""
        own = self.state_dict()
        for name in ("batch_size", "seed"):
            if state.get(name) != own[name]:
                raise UsageError(
                    f"the saved data was read with {name}={state.get(name)}, and this is read with {name}={own[name]}",
                    hint=f"use the same {name}, or begin the data anew",
                )
        num_steps = int(state["num_steps"])
        number = int(state.get("pass", max(0, num_steps - 1) // self._sampler.steps_per_pass))
        self._at, self._is_loaded = (number, num_steps), True


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
    passes: DataPasses | None = None,
) -> ShardedBatches | StreamBatches:
    """Return the batches of data-parallel rank `dp_rank`; `batch_size` is the global one. See `Job.shard`.

    `check` is called with the samples of the first global batch of a stream. `passes` are those of the job.
    """
    _check_sizes(batch_size, dp, epochs, skip=skip, num_workers=num_workers)
    over = (passes or DataPasses()).of(dataset, batch_size, seed, epochs, shuffle, drop_last, pack)
    if shuffle and is_stream(dataset):
        raise UsageError(
            f"a {type(dataset).__name__} has no numbered samples that job.shard could shuffle",
            hint="shuffle the stream itself, by one seed on every rank, and leave shuffle out",
        )
    if pack is not None:
        dataset = _rows(dataset, pack, seed=seed, epochs=epochs, shuffle=shuffle is not False, num_workers=num_workers)
    if is_stream(dataset):
        return StreamBatches(
            dataset,
            ShareOfBatch(batch_size, dp, dp_rank),
            device=device,
            epochs=epochs,
            skip=skip,
            drop_last=drop_last,
            num_workers=num_workers,
            collate=collate,
            check=check,
            passes=over,
        )
    numbered = _numbered(dataset, least=batch_size if drop_last else 1)
    sampler = ShareSampler(
        num_samples=len(numbered),
        batch_size=batch_size,
        dp=dp,
        dp_rank=dp_rank,
        seed=seed,
        epochs=epochs,
        shuffle=shuffle is not False,
        skip=skip,
        drop_last=drop_last,
    )
    return ShardedBatches(numbered, sampler, device=device, num_workers=num_workers, collate=collate, passes=over)


def _numbered(dataset: object, *, least: int) -> SizedDataset:
    if not isinstance(dataset, SizedDataset):
        raise _no_data(dataset)
    if len(dataset) < least:
        raise UsageError(
            f"the dataset has {len(dataset)} samples, fewer than one global batch of {least}",
            hint="use a smaller batch or more data",
        )
    return dataset


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


def _check_sizes(batch_size: int, dp: int, epochs: int, **counts: int) -> None:
    for name, number in counts.items():
        if number < 0:
            raise UsageError(f"{name}={number} of job.shard", hint="give 0 or more")
    if epochs < 1:
        raise UsageError(f"epochs={epochs}", hint="a loop goes over one epoch at least")
    if batch_size < 1 or batch_size % dp:
        raise UsageError(
            f"a global batch of {batch_size} does not divide over dp={dp} ranks",
            hint=f"use a multiple of {dp}, such as {max(1, batch_size // dp) * dp}",
        )
