"""Reading checkpoints of torch.distributed.checkpoint without running what is in them.

torch reads the index of a checkpoint with `pickle`, which runs any code that it names; here it is read as data and made
anew (`safe_index`). Values are read with `weights_only`, as plain tensors of the type and shape that the index names.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from paraplan.errors import ParaplanError
from paraplan.runtime.checkpoints.safe_index import IndexSyntaxError, read_index
from paraplan.runtime.torch_private import StorageInfo

INDEX_NAME = ".metadata"

_DAMAGED = "it is damaged; load an older one"


class CheckpointError(ParaplanError):
    """A checkpoint that does not exist, cannot be read, or belongs to another model."""


class SafeReader(FileSystemReader):
    """torch's reader of a folder, which cannot run code. `index` is that of the folder, if it has been read already."""

    def __init__(self, path: Path, index: Metadata | None = None) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index of the checkpoint. Raises `CheckpointError` where it is damaged or names what it may not."""
        if self._index is None:
            path = Path(self.path) / INDEX_NAME
            try:
                self._index = read_index(path)
            except IndexSyntaxError as error:
                raise CheckpointError(
                    f"the checkpoint {self.path} cannot be read: {error}", hint="name a folder that engine.save wrote"
                ) from error
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint {self.path} cannot be read: {reason_of(error)}", hint=_DAMAGED
                ) from error
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of `plan`. Raises `CheckpointError` for what is no plain tensor as the index names it."""
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise CheckpointError(f"{item.storage_index.fqn} is not a tensor", hint=_DAMAGED)
            with (Path(self.path) / self.storage_data[item.storage_index].relative_path).open("rb") as stream:
                value = self._tensor(stream, item)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                value = value.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != value.shape:
                raise CheckpointError(f"{item.storage_index.fqn} has another shape than is read", hint=_DAMAGED)
            target.copy_(value)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _tensor(self, stream: io.BufferedReader, item: ReadItem) -> torch.Tensor:
        """Return the piece of a tensor that `item` is a part of."""
        name, place = item.storage_index.fqn, cast("StorageInfo", self.storage_data[item.storage_index])
        assert self._index is not None
        entry = self._index.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        piece = next(one for one in entry.chunks if MetadataIndex(name, one.offsets) == item.storage_index)
        part: Any = _Window(stream, place.offset, place.length)
        try:
            with zipfile.ZipFile(part) as archive:  # what is packed could be of any size
                files = archive.infolist()
            if any(file.compress_type != zipfile.ZIP_STORED for file in files):
                raise CheckpointError(f"the values of {name} are packed", hint=_DAMAGED)
            part.seek(0)
            value = torch.load(part, map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, EOFError) as error:
            raise _unread(name, error) from error
        except (OSError, zipfile.BadZipFile, NotImplementedError, pickle.UnpicklingError) as error:
            raise _unread(name, error) from error
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(f"the values of {name} are not a plain tensor", hint=_DAMAGED)
        if value.shape != piece.sizes or value.dtype != entry.properties.dtype or value.device.type != "cpu":
            raise CheckpointError(f"the values of {name} are others than the index says", hint=_DAMAGED)
        return value


class _Window(io.RawIOBase):
    """The `length` bytes at `start` of a file, as a file."""

    def __init__(self, stream: io.BufferedReader, start: int, length: int) -> None:
        super().__init__()
        self._stream, self._start, self._length, self._position = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} lies before the values")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._stream.seek(self._start + self._position)
        done = self._stream.readinto(view) or 0
        self._position += done
        return done


def read_entries(
    whole: Path, entries: dict[str, torch.Tensor], *, index: Metadata | None = None, alone: bool = False
) -> None:
    """Fill the tensors of `entries` from a checkpoint. Every rank calls it, with its own entries, or one `alone`.

    `index` is that of the checkpoint, if it has been read already. Raises `CheckpointError` where a file of the
    checkpoint is missing or damaged.
    """
    try:
        with without_the_note_on_single_processes():
            load(entries, storage_reader=SafeReader(whole, index), no_dist=alone)
    except CheckpointException as error:  # no Exception
        raise CheckpointError(
            f"the checkpoint {whole} cannot be read: {reason_of(error)}", hint="it is damaged; load an older one"
        ) from error


def reason_of(error: BaseException) -> str:
    """Return why a checkpoint could not be read or written, in the words of the first rank that knows."""
    found = [error]
    if isinstance(error, CheckpointException):
        found = [failure for _, (failure, _) in sorted(error.failures.items())]
    told = (one for one in found if isinstance(one, (OSError, CheckpointError)))
    first = next(told, found[0])
    if isinstance(first, CheckpointError):
        return first.message
    if isinstance(first, OSError) and first.strerror:
        return f"{first.strerror}: {first.filename}" if first.filename else first.strerror
    return f"{type(first).__name__}: {first}"


@contextmanager
def without_the_note_on_single_processes() -> Iterator[None]:
    """Silence what torch.distributed.checkpoint says in one process: that it takes it for one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _unread(name: str, error: BaseException) -> CheckpointError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return CheckpointError(f"the values of {name} are damaged: {said}", hint=_DAMAGED)
