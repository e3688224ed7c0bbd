"""Reading checkpoints of torch.distributed.checkpoint without running what is in them.

torch reads the values of tensors with `weights_only`, and the index of a checkpoint with `pickle`, which runs any code
that it names. Here the index may name the classes of such an index alone.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load

from paraplan.errors import ParaplanError

INDEX_NAME = ".metadata"

_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "collections": {"OrderedDict"},
}
_ALLOWED_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class CheckpointError(ParaplanError):
    """A checkpoint that does not exist, cannot be read, or belongs to another model."""


class SafeReader(FileSystemReader):
    """torch's reader of a folder, with an index that cannot run code."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index of the checkpoint. Raises `CheckpointError` where it names what no index needs."""
        path = Path(self.path) / INDEX_NAME
        try:
            metadata = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise CheckpointError(
                f"the index {path} cannot be read: {error}", hint="name a folder that engine.save wrote"
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} is no index of a checkpoint", hint="name a folder that engine.save wrote")
        meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        meta.load_id = self.load_id
        metadata.storage_meta = meta
        return metadata


def read_entries(whole: Path, entries: dict[str, torch.Tensor], *, alone: bool = False) -> None:
    """Fill the tensors of `entries` from a checkpoint. Every rank calls it, with its own entries, or one `alone`.

    Raises `CheckpointError` where a file of the checkpoint is missing or damaged.
    """
    try:
        with without_the_note_on_single_processes():
            load(entries, storage_reader=SafeReader(whole), no_dist=alone)
    except CheckpointException as error:  # no Exception
        raise CheckpointError(
            f"the checkpoint {whole} cannot be read: {reason_of(error)}", hint="it is damaged; load an older one"
        ) from error


def reason_of(error: BaseException) -> str:
    """Return why a checkpoint could not be read or written, in the words of the first rank that knows."""
    found = [error]
    if isinstance(error, CheckpointException):
        found = [failure for _, (failure, _) in sorted(error.failures.items())]
    first = next((one for one in found if isinstance(one, OSError)), found[0])
    if isinstance(first, OSError) and first.strerror:
        return f"{first.strerror}: {first.filename}" if first.filename else first.strerror
    return f"{type(first).__name__}: {first}"


@contextmanager
def without_the_note_on_single_processes() -> Iterator[None]:
    """Silence what torch.distributed.checkpoint says in one process: that it takes it for one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class that an index is made of."""
        if module in _ALLOWED_MODULES or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint needs")
