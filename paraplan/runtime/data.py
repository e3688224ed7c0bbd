"""The data of one rank: the same global batches in the same order under every plan, cut by data-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Sampler, default_collate

from paraplan.errors import UsageError
from paraplan.runtime.step.batches import to_device


class SizedDataset(Protocol):
    """What `job.shard` takes: pairs of inputs and targets by number, and how many there are."""

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
        per_epoch = self.steps_per_epoch
        for epoch in range(self.skip // max(1, per_epoch), self.epochs):
            order = self._order(epoch)
            for step in range(max(0, self.skip - epoch * per_epoch), per_epoch):
                batch = order[step * self.batch_size : (step + 1) * self.batch_size]
                first, end = (len(batch) * rank // self.dp for rank in (self.dp_rank, self.dp_rank + 1))
                yield batch[first:end] or [~batch[0]]

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
        if samples[0][0]:
            return batch
        return pytree.tree_map(lambda leaf: leaf[:0] if isinstance(leaf, torch.Tensor) else leaf, batch)


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
        for pair in self._loader:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise UsageError(
                    f"a sample must be a pair (inputs, targets), found {type(pair).__name__}",
                    hint="let the dataset return pairs, or pass collate= to job.shard",
                )
            yield to_device(pair[0], self._device), to_device(pair[1], self._device)


def shard_dataset(
    dataset: SizedDataset,
    *,
    batch_size: int,
    dp: int,
    dp_rank: int,
    device: torch.device,
    seed: int = 0,
    epochs: int = 1,
    shuffle: bool = True,
    skip: int = 0,
    drop_last: bool = True,
    num_workers: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
) -> ShardedBatches:
    """Return the batches of data-parallel rank `dp_rank`; `batch_size` is the global one. See `Job.shard`."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"a {type(dataset).__name__} has no length or no numbered samples, so it cannot be dealt out to ranks",
            hint="give job.shard a map-style dataset, or cut the data yourself by job.dp_rank and job.dp",
        )
    if batch_size < 1 or batch_size % dp:
        raise UsageError(
            f"a global batch of {batch_size} does not divide over dp={dp} ranks",
            hint=f"use a multiple of {dp}, such as {max(1, batch_size // dp) * dp}",
        )
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
        shuffle=shuffle,
        skip=skip,
        drop_last=drop_last,
    )
    return ShardedBatches(dataset, sampler, device=device, num_workers=num_workers, collate=collate)
