"""The data of one rank: the same global batches in the same order under every plan, cut by data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from paraplan.errors import UsageError
from paraplan.runtime.data.packing import (
    Packing,
    ShuffledDocuments,
    packed,
)
from paraplan.runtime.data.streams import (
    BatchSettings,
    DataPasses,
    DeviceCopies,
    Passes,
    Reading,
    StreamBatches,
    check_stream,
    order_of_epoch,
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

    def __init__(self, num_samples: int, settings: BatchSettings) -> None:
        self.num_samples = num_samples
        self.settings = settings
        self.skip = settings.skip
        self.number = 0

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch, a short one counted."""
        size = self.settings.batch_size
        return self.num_samples // size if self.settings.drop_last else -(-self.num_samples // size)

    @property
    def steps_per_pass(self) -> int:
        """Global batches of all epochs of a pass."""
        return self.steps_per_epoch * self.settings.epochs

    @property
    def first_step(self) -> int:
        """The number of the first step that this pass gives."""
        return max(self.skip, self.number * self.steps_per_pass)

    def __len__(self) -> int:
        return max(0, (self.number + 1) * self.steps_per_pass - self.first_step)

    def __iter__(self) -> Iterator[list[int]]:
        return self._steps(self.first_step, len(self))  # as it is now: the loader asks for the first step later

    def _steps(self, first: int, count: int) -> Iterator[list[int]]:
        size, order, epoch = self.settings.batch_size, list[int](), -1
        for step in range(first, first + count):
            if epoch != step // self.steps_per_epoch:
                epoch = step // self.steps_per_epoch
                order = order_of_epoch(self.num_samples, self.settings, epoch)
            start = step % self.steps_per_epoch * size
            batch = order[start : start + size]
            yield batch[self.settings.part_of(len(batch))] or [~batch[0]]


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

    def __init__(self, dataset: SizedDataset, settings: BatchSettings, passes: Passes) -> None:
        self._settings = settings
        self._sampler = ShareSampler(len(dataset), settings)
        self._passes = passes
        self._at: tuple[int, int] | None = None  # the pass, and the steps given of all
        self._is_loaded = False
        self.reading: Reading = nullcontext
        # A generator of its own: the loader would draw from torch's global one, and dropout would then differ by plan.
        self._loader: DataLoader[Any] = DataLoader(
            dataset if settings.drop_last else _Samples(dataset),  # type: ignore[arg-type]  # any with numbered samples
            batch_sampler=self._sampler,
            num_workers=settings.num_workers,
            collate_fn=settings.collate if settings.drop_last else _Collate(settings.collate),
            pin_memory=settings.device.type == "cuda",
            generator=torch.Generator().manual_seed(settings.seed),
        )

    def _begin(self) -> tuple[int, int]:
        """Return the pass and the step that a loop begins with where none has begun."""
        number = self._passes.number
        return number, max(self._settings.skip, number * self._sampler.steps_per_pass)

    def __len__(self) -> int:
        self._sampler.number = self._begin()[0] if self._at is None else self._at[0]
        self._sampler.skip = self._settings.skip
        return len(self._sampler)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        number, num_steps = self._at if self._at is not None and self._is_loaded else self._begin()
        self._sampler.number, self._sampler.skip = number, num_steps
        self._at, self._is_loaded, self._passes.number = (number, num_steps), False, number + 1
        copied = DeviceCopies(self._settings.device)
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
        settings = self._settings
        return {"pass": number, "num_steps": num_steps, "batch_size": settings.batch_size, "seed": settings.seed}

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
    settings: BatchSettings,
    *,
    pack: Packing | None = None,
    passes: DataPasses | None = None,
) -> ShardedBatches | StreamBatches:
    """Return the batches of a data-parallel rank by `settings`. See `Job.shard`. `passes` are those of the job."""
    over = (passes or DataPasses()).of(
        dataset,
        *(settings.batch_size, settings.seed, settings.epochs, settings.shuffle, settings.drop_last, pack),
    )
    if not is_stream(dataset) and not isinstance(dataset, SizedDataset):
        raise UsageError(
            f"a {type(dataset).__name__} has neither numbered samples nor an iterator",
            hint="give job.shard a dataset or an iterable, or cut the data yourself by job.dp_rank and job.dp",
        )
    if settings.shuffle and is_stream(dataset):
        raise UsageError(
            f"a {type(dataset).__name__} has no numbered samples that job.shard could shuffle",
            hint="shuffle the stream itself, by one seed on every rank, and leave shuffle out",
        )
    if pack is not None:
        if is_stream(dataset):
            check_stream(dataset, settings)
        elif isinstance(dataset, SizedDataset):
            dataset = ShuffledDocuments(dataset, settings)
        dataset = packed(dataset, pack)
    if is_stream(dataset):
        return StreamBatches(dataset, settings, over)
    assert isinstance(dataset, SizedDataset)
    least = settings.batch_size if settings.drop_last else 1
    if len(dataset) < least:
        raise UsageError(
            f"the dataset has {len(dataset)} samples, fewer than one global batch of {least}",
            hint="use a smaller batch or more data",
        )
    return ShardedBatches(dataset, settings, over)
