"""Data without numbered samples: every rank reads one stream, and takes its share of each global batch of it.

The order is that of the stream, so that one process and every plan see the same global batches. Where a stream is, is
the same on every rank: its state can be saved under one plan and loaded under another. A loop over the same data,
numbered or not, is the next pass over it, whatever object it goes over (`DataPasses`).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from paraplan.errors import UsageError
from paraplan.runtime.data.batches import to_device
from paraplan.runtime.torch_private import default_store, pytree
from paraplan.runtime.world import World

_MOST = 16  # of data that cannot be referred to weakly, as a list, and would be kept


@dataclass
class Passes:
    """The `number` of the pass that the next loop begins, from 0, and the steps of a stream's passes before it."""

    number: int = 0
    num_steps: int = 0


class DataPasses:
    """The passes over each data set that a job has been given, by the data and how it is read."""

    def __init__(self) -> None:
        self._known: list[tuple[Callable[[], Any], tuple[Any, ...], Passes]] = []

    def of(self, dataset: object, *settings: object) -> Passes:
        """Return the passes over `dataset`, read with `settings`: the same ones for the same object."""
        self._known = [one for one in self._known if one[0]() is not None][-_MOST:]
        for refer, known, passes in self._known:
            if refer() is dataset and known == settings:
                return passes
        passes = Passes()
        self._known.append((_reference(dataset), settings, passes))
        return passes


def _reference(dataset: object) -> Callable[[], Any]:
    try:
        return weakref.ref(dataset)
    except TypeError:
        return lambda: dataset


Collate = Callable[[list[Any]], Any]


@runtime_checkable
class StatefulStream(Protocol):
    """A stream that can say where it is, and go on from there at its next `iter`."""

    def state_dict(self) -> Any:
        """Return where the stream is."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Begin the next `iter` there."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class StreamPosition:
    """How far a stream is read: the pass over it, the samples read of that pass, and the steps given in all."""

    epoch: int = 0
    num_samples: int = 0
    num_steps: int = 0


@dataclass(frozen=True)
class BatchSettings:
    """How data-parallel rank `dp_rank` reads its part of each global batch of `batch_size` samples; see `Job.shard`.

    `check` is called with the samples of the first global batch of a stream.
    """

    batch_size: int
    dp: int
    dp_rank: int
    device: torch.device
    seed: int = 0
    epochs: int = 1
    shuffle: bool | None = None
    skip: int = 0
    drop_last: bool = True
    num_workers: int = 0
    collate: Collate | None = None
    check: Callable[[list[Any]], None] | None = None

    def __post_init__(self) -> None:
        for name, number in (("skip", self.skip), ("num_workers", self.num_workers)):
            if number < 0:
                raise UsageError(f"{name}={number} of job.shard", hint="give 0 or more")
        if self.epochs < 1:
            raise UsageError(f"epochs={self.epochs}", hint="a loop goes over one epoch at least")
        if self.batch_size < 1 or self.batch_size % self.dp:
            raise UsageError(
                f"a global batch of {self.batch_size} does not divide over dp={self.dp} ranks",
                hint=f"use a multiple of {self.dp}, such as {max(1, self.batch_size // self.dp) * self.dp}",
            )

    def part_of(self, num_samples: int) -> slice:
        """Return the part of a batch of `num_samples`; parts differ by one sample at most, some may be empty."""
        first, end = (num_samples * rank // self.dp for rank in (self.dp_rank, self.dp_rank + 1))
        return slice(first, end)


def order_of_epoch(num_samples: int, settings: BatchSettings, epoch: int) -> list[int]:
    """Return the numbers of samples in their order in an epoch, drawn from the seed and the epoch's number alone."""
    if settings.shuffle is False:
        return list(range(num_samples))
    generator = torch.Generator().manual_seed(settings.seed + epoch)
    order: list[int] = torch.randperm(num_samples, generator=generator).tolist()
    return order


class _StreamReader(IterableDataset[Any]):
    """Gives this rank's part of each global batch, collated. It runs in the process of the rank or in one worker.

    With `sends_state` a batch comes with the position behind it and the stream's own state there.
    """

    def __init__(self, stream: Iterable[Any], settings: BatchSettings) -> None:
        self.stream = stream
        self.settings = settings
        self.sends_state = settings.num_workers > 0
        self.start = StreamPosition()
        self.start_state: Any = None
        self.skip = 0
        self.position = StreamPosition()

    def __iter__(self) -> Iterator[Any]:
        self.position, left, check, epochs = self.start, self.skip, self.settings.check, self.settings.epochs
        while self.position.epoch < (self.start.epoch // epochs + 1) * epochs:
            samples = self._samples()
            while batch := self._read(samples):
                if left:
                    left -= 1
                    continue
                if check is not None:
                    check(batch)
                    check = None
                made = self._made(batch)
                yield (made, asdict(self.position), self.own_state()) if self.sends_state else made
            at = self.position
            if at.epoch == self.start.epoch and not at.num_samples:
                raise UsageError("the stream of job.shard has no samples", hint="a generator can be read once only")
            self.position = StreamPosition(epoch=at.epoch + 1, num_steps=at.num_steps)
        if self.sends_state:
            yield None, asdict(self.position), None

    def own_state(self) -> Any:
        """Return the stream's own state, None where it keeps none."""
        return self.stream.state_dict() if isinstance(self.stream, StatefulStream) else None

    def _samples(self) -> Iterator[Any]:
        at = self.position
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(at.epoch)
        if at != self.start or not at.num_samples:
            return iter(self.stream)
        if self.start_state is not None and isinstance(self.stream, StatefulStream):
            self.stream.load_state_dict(self.start_state)
            return iter(self.stream)
        samples = iter(self.stream)
        for _ in islice(samples, at.num_samples):
            pass
        return samples

    def _read(self, samples: Iterator[Any]) -> list[Any]:
        """Return the next global batch, nothing at the end of the stream."""
        at, size = self.position, self.settings.batch_size
        batch = list(islice(samples, size))
        is_given = len(batch) == size or (bool(batch) and not self.settings.drop_last)
        self.position = StreamPosition(at.epoch, at.num_samples + len(batch), at.num_steps + is_given)
        return batch if is_given else []

    def _made(self, batch: list[Any]) -> Any:
        own, collate = batch[self.settings.part_of(len(batch))], self.settings.collate or default_collate
        if own:
            return collate(own)
        # A rank without a part of a short batch: the shape counts, and nothing else.
        return without_sequences(collate(batch[:1]))


class StreamBatches:
    """Batches of this rank from a stream, one for each step, on its device. Their number is not known beforehand.

    See `Job.shard` and `check_stream`. Each loop is the next of `passes`.
    """

    def __init__(self, stream: Iterable[Any], settings: BatchSettings, passes: Passes) -> None:
        check_stream(stream, settings)
        # A worker checks nothing, and what would check it need not be sent there.
        self._reader = _StreamReader(stream, replace(settings, check=None) if settings.num_workers else settings)
        self._settings = settings
        self._passes = passes
        self._loaded: Mapping[str, Any] | None = None
        self._given: tuple[dict[str, int], Any] | None = None
        self.reading: Reading = nullcontext

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        reader, loaded, settings = self._reader, self._loaded, self._settings
        reader.start = self._begin() if loaded is None else StreamPosition(**loaded["position"])
        reader.start_state = None if loaded is None else loaded["stream"]
        reader.skip = max(0, settings.skip - reader.start.num_steps) if loaded is None else 0
        self._passes.number = reader.start.epoch // settings.epochs + 1
        reader.position = reader.start
        loader: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            num_workers=settings.num_workers,
            pin_memory=settings.device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # the global one is that of dropout
        )
        self._loaded, self._given = None, None
        copied = DeviceCopies(settings.device)
        try:
            for item in read_in(self.reading, loader):
                batch, *state = item if reader.sends_state else (item,)
                if state:
                    self._given = (state[0], state[1])
                if batch is not None:
                    yield copied(batch)
        finally:
            self._passes.num_steps = (asdict(reader.position) if self._given is None else self._given[0])["num_steps"]

    def _begin(self) -> StreamPosition:
        return StreamPosition(self._passes.number * self._settings.epochs, num_steps=self._passes.num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return how far the stream is read, the same on every rank and under every plan.

        Inside the loop it is the state behind the batch that the loop has been given last. "stream" is the state of
        the stream itself where it has a `state_dict`; without one the stream is read again up to "position".
        """
        if self._loaded is not None:
            return dict(self._loaded)
        if self._given is not None:
            position, stream = self._given
        elif self._reader.sends_state:  # nothing was given yet, and the worker may be ahead
            position, stream = asdict(self._begin()), None
        else:
            position, stream = asdict(self._reader.position), self._reader.own_state()
        return {"position": dict(position), "stream": stream}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next loop where `state_dict` was taken. Raises `UsageError` for a state of something else."""
        position = state.get("position")
        if not isinstance(position, Mapping) or position.keys() != asdict(StreamPosition()).keys():
            raise UsageError("this is not the state of a stream", hint="give what state_dict of job.shard returned")
        self._loaded = {"position": dict(position), "stream": state.get("stream")}


def check_stream(stream: Iterable[Any], settings: BatchSettings) -> None:
    """Raise `UsageError` for batches in place of samples, passes over what can be read once, and several workers."""
    if isinstance(stream, DataLoader) and stream.batch_size is not None:
        raise UsageError(
            f"a DataLoader with batch_size={stream.batch_size} gives batches, and job.shard takes samples",
            hint="give job.shard the loader's dataset, or a loader with batch_size=None",
        )
    if isinstance(stream, Iterator) and settings.epochs > 1:
        raise UsageError(
            f"a {type(stream).__name__} can be read once only, and epochs={settings.epochs}",
            hint="give job.shard an object whose __iter__ starts from the beginning",
        )
    if settings.num_workers > 1:
        raise UsageError(
            f"num_workers={settings.num_workers}, but only one worker can keep the order of a stream",
            hint="use num_workers=1 for a stream",
        )


def without_sequences(batch: Any) -> Any:
    """Return a batch of the same shape with no sequence in it."""
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf[:0], batch)


Reading = Callable[[], AbstractContextManager[Any]]


def read_in(reading: Reading, items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`, each of which is read in a context of `reading`."""
    iterator, end = iter(items), object()
    while True:
        with reading():
            item = next(iterator, end)
        if item is end:
            return
        yield item


class DeviceCopies:
    """Brings batches to a device. To a GPU they travel on a stream of their own, while the step before is computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        made = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._stream = made if isinstance(made, torch.Stream) else None  # a run without GPUs has stand-ins

    def __call__(self, pair: Any) -> tuple[Any, Any]:
        """Return a batch (inputs, targets) on the device; raise `UsageError` for anything else."""
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise UsageError(
                f"a sample must be a pair (inputs, targets), found {type(pair).__name__}",
                hint="let the dataset return pairs, or pass collate= to job.shard",
            )
        if self._stream is None:
            return to_device(pair[0], self._device), to_device(pair[1], self._device)
        with torch.cuda.stream(self._stream):
            inputs, targets = to_device(pair[0], self._device), to_device(pair[1], self._device)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for leaf in pytree.tree_leaves((inputs, targets)):
            if isinstance(leaf, torch.Tensor):
                leaf.record_stream(current)  # the allocator of the other stream may not reuse it before
        return inputs, targets


class SameStream:
    """Sees that every rank reads what rank 0 reads, by a digest of the first global batch. `number` is the stream's."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number

    def __call__(self, samples: list[Any]) -> None:
        """Raise `UsageError` on a rank whose samples are not those of rank 0."""
        if not self._world.is_distributed or not torch.distributed.is_initialized():
            return
        # The store outlives a job: a script may have trained before, on other data.
        count = default_store().add(f"paraplan/stream/{self._number}/count/{self._world.rank}", 1)
        key, own = f"paraplan/stream/{self._number}/{count}", digest(samples)
        if self._world.rank == 0:
            default_store().set(key, own)
        elif default_store().get(key).decode() != own:
            raise UsageError(
                f"the stream of job.shard gives rank {self._world.rank} other samples than rank 0",
                hint="let every rank read the same stream in the same order (one seed, no sharding by rank); "
                "job.shard takes each rank's share of it",
            )


def digest(samples: list[Any]) -> str:
    """Return a digest of the tensors, texts and numbers in `samples`."""
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(samples):
        if isinstance(leaf, torch.Tensor):
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, (str, bytes, int, float)):
            found.update(repr(leaf).encode())
    return found.hexdigest()
