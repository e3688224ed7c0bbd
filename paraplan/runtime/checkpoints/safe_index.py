"""The index of a checkpoint, made anew from checked values: what is in it, and where it lies in which file."""

from __future__ import annotations

import itertools
import math
import pickletools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from paraplan.runtime.torch_private import StorageInfo

_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "collections": {"OrderedDict"},
    "builtins": {"getattr"},  # of Python 3.11.0 to 3.11.3, which write members of enums so; nothing here is called
    _METADATA: {
        "Metadata",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    _FILES: {StorageInfo.__name__},
}
_KINDS = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128 bool"
_KINDS += " uint8 int8 int16 int32 int64 uint16 uint32 uint64"
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _KINDS.split() if hasattr(torch, name)}
_FILE_NAME = re.compile(r"__\d{1,9}_\d{1,9}\.distcp")
_MOST_DIMENSIONS = 12
_MOST_BYTES = 2**31
_MOST_ELEMENTS = 2**56


def read_index(path: Path) -> Metadata:
    """Return the index in the file `path`. Runs nothing that it names.

    Every tensor is covered by its pieces, each once; every piece lies in a file of the same folder, large enough for
    it, and shares its bytes with no other. Raises `IndexSyntaxError` otherwise, and `OSError` for missing files.
    """
    if not path.is_file() or path.stat().st_size > _MOST_BYTES:
        raise IndexSyntaxError("it is not a file, or too large")
    root = _state(parse_index(path.read_bytes(), knows=_is_known), "Metadata")
    described, stored = root.get("state_dict_metadata"), root.get("storage_data")
    if type(described) is not dict or type(stored) is not dict:
        raise IndexSyntaxError("it is not the index of a checkpoint")
    entries = {}
    for name, entry in described.items():
        if type(name) is not str:
            raise IndexSyntaxError("a name of an entry is not a text")
        entries[name] = _entry(name, entry)
    places = dict(_place(key, info) for key, info in stored.items())
    if len(places) != len(stored):
        raise IndexSyntaxError("two pieces have one place")
    _check_storage(path.parent, entries, places)
    return Metadata(state_dict_metadata=dict(entries), storage_data=places)


def _is_known(name: Name) -> bool:
    return name.name in _NAMES.get(name.module, ()) or (name.module == "torch" and name.name in _DTYPES)


def _state(value: Any, name: str, module: str = _METADATA) -> dict[str, Any]:
    """Return the fields of an object of class `name`."""
    is_right = type(value) is Made and value.name == Name(module, name) and not value.arguments
    if not is_right or type(value.state) is not dict or any(type(key) is not str for key in value.state):
        raise IndexSyntaxError(f"it is not the index of a checkpoint: a {name} is missing")
    state: dict[str, Any] = value.state
    return state


def _size(value: Any) -> torch.Size:
    """Return a torch.Size of whole numbers that are not negative."""
    if type(value) is not Made or value.name != Name("torch", "Size") or value.state is not None:
        raise IndexSyntaxError("a size is missing")
    (numbers,) = value.arguments if len(value.arguments) == 1 else ((),)
    if type(numbers) not in (tuple, list) or len(numbers) > _MOST_DIMENSIONS:
        raise IndexSyntaxError("a size has too many dimensions")
    if any(type(number) is not int or not 0 <= number < _MOST_ELEMENTS for number in numbers):
        raise IndexSyntaxError("a size has a number that is not a count")
    return torch.Size(numbers)


def _volume(size: Sequence[int]) -> int:
    return math.prod(size)


def _entry(name: str, value: Any) -> TensorStorageMetadata:
    if type(value) is Made and value.name.name == "BytesStorageMetadata":
        raise IndexSyntaxError(f"{name} is not a tensor")
    state = _state(value, "TensorStorageMetadata")
    size, chunks = _size(state.get("size")), state.get("chunks")
    if _volume(size) > _MOST_ELEMENTS or type(chunks) is not list or not chunks:
        raise IndexSyntaxError(f"{name} has no pieces, or is too large")
    fields = [_state(chunk, "ChunkStorageMetadata") for chunk in chunks]
    pieces = [ChunkStorageMetadata(offsets=_size(one.get("offsets")), sizes=_size(one.get("sizes"))) for one in fields]
    if not _covers(size, pieces):
        raise IndexSyntaxError(f"the pieces of {name} do not make up a tensor of shape {tuple(size)}")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_dtype(name, state.get("properties"))), size=size, chunks=pieces
    )


def _dtype(name: str, value: Any) -> torch.dtype:
    is_right = type(value) is Made and value.name == Name(_METADATA, "TensorProperties") and not value.arguments
    state = value.state if is_right else None
    if type(state) is dict:
        state = (state.get("dtype"),)
    if type(state) is not tuple or not state or type(state[0]) is not Name or state[0].name not in _DTYPES:
        raise IndexSyntaxError(f"{name} has values of no known type")
    return _DTYPES[state[0].name]


def _covers(size: torch.Size, pieces: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether the pieces lie in a tensor of `size` and every element is in one of them, and in one alone.

    Boxes whose corners cancel out, but for those of the whole, cover each element an odd number of times. With the
    volume of the whole that is once.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for piece in pieces:
        if not len(piece.offsets) == len(piece.sizes) == len(size):
            return False
        ends = [start + length for start, length in zip(piece.offsets, piece.sizes, strict=True)]
        if any(end > whole for end, whole in zip(ends, size, strict=True)):
            return False
        if len(pieces) > 1 and _volume(piece.sizes):
            corners.update(itertools.product(*zip(piece.offsets, ends, strict=True)))
    if sum(_volume(piece.sizes) for piece in pieces) != _volume(size):
        return False
    if len(pieces) == 1 or not _volume(size):
        return True
    odd = {corner for corner, count in corners.items() if count % 2}
    return odd == set(itertools.product(*((0, whole) for whole in size)))


def _place(key: Any, info: Any) -> tuple[MetadataIndex, StorageInfo]:
    index, state = _state(key, "MetadataIndex"), _state(info, StorageInfo.__name__, _FILES)
    name, offset = index.get("fqn"), index.get("offset")
    if type(name) is not str or offset is None:
        raise IndexSyntaxError("a place belongs to no tensor")
    path, start, length = (state.get(field) for field in ("relative_path", "offset", "length"))
    if type(path) is not str or not _FILE_NAME.fullmatch(path):
        raise IndexSyntaxError(f"values of {name[:100]} lie in a file that is not of the checkpoint: {str(path)[:100]}")
    if type(start) is not int or type(length) is not int or start < 0 or length <= 0:
        raise IndexSyntaxError(f"values of {name[:100]} lie at no place in {path}")
    if state.get("transform_descriptors"):
        raise IndexSyntaxError(f"values of {name[:100]} are transformed")
    return MetadataIndex(name, _size(offset)), StorageInfo(path, start, length)


def _check_storage(
    folder: Path, entries: dict[str, TensorStorageMetadata], places: dict[MetadataIndex, StorageInfo]
) -> None:
    """See that each piece has a place, large enough, and that the files hold all places beside each other."""
    for name, entry in entries.items():
        for piece in entry.chunks:
            place = places.get(MetadataIndex(name, piece.offsets))
            if place is None:
                raise IndexSyntaxError(f"it does not say where {name} lies")
            if place.length < _volume(piece.sizes) * entry.properties.dtype.itemsize:
                raise IndexSyntaxError(f"{name} is larger than the {place.length} bytes that it lies in")
    by_file: dict[str, list[StorageInfo]] = {}
    for place in places.values():
        by_file.setdefault(place.relative_path, []).append(place)
    for name, found in by_file.items():
        file = folder / name
        held = file.stat().st_size
        if not file.is_file() or file.resolve().parent != folder.resolve():
            raise IndexSyntaxError(f"{name} is not a file of this folder")
        end = 0
        for place in sorted(found, key=lambda one: one.offset):
            if place.offset < end:
                raise IndexSyntaxError(f"values overlap in {name}")
            end = place.offset + place.length
        if end > held:
            raise IndexSyntaxError(f"{name} has {held} bytes, and should have {end}")


class IndexSyntaxError(Exception):
    """A pickle that cannot be the index of a checkpoint; the text says why."""


@dataclass(frozen=True)
class Name:
    """A class or another global that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Made:
    """An object that the pickle makes: of `name`, called with `arguments`, then given `state`."""

    name: Name
    arguments: tuple[Any, ...]
    state: Any = None


_Push = Callable[[Any], Any]
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_STORES, _LOADS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
_MARK: Any = object()


class _Machine:
    """The stack and the memo of one pickle. `knows` says which names an index may have."""

    def __init__(self, knows: Callable[[Name], bool]) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._knows = knows
        self._actions: dict[str, Callable[[], None]] = {
            "SETITEM": lambda: self._set_items([self.stack.pop(-2), self.stack.pop()]),
            "SETITEMS": lambda: self._set_items(self._marked()),
            "APPEND": lambda: self._extend([self.stack.pop()]),
            "APPENDS": lambda: self._extend(self._marked()),
            "TUPLE": lambda: self.stack.append(tuple(self._marked())),
            "STACK_GLOBAL": lambda: self._name(self.stack.pop(-2), self.stack.pop()),
            "NEWOBJ": self._make,
            "REDUCE": self._make,
            "BUILD": self._build,
        }

    def run(self, opcode: str, argument: Any) -> None:
        """Carry out one opcode."""
        if opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode]())
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            if len(self.stack) < count:
                raise IndexSyntaxError("its stack is empty")
            self.stack[-count:] = [tuple(self.stack[-count:])]
        elif opcode == "MARK":
            self.stack.append(_MARK)
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = self.stack[-1]
        elif opcode in _STORES:
            self._memo[argument] = self.stack[-1]
        elif opcode in _LOADS:
            self.stack.append(self._memo[argument])
        elif opcode == "GLOBAL":
            self._name(*argument.split(" ", 1))
        elif opcode in self._actions:
            self._actions[opcode]()
        elif opcode not in ("PROTO", "FRAME"):
            raise IndexSyntaxError(f"it has the opcode {opcode}, which no index of a checkpoint needs")

    def _marked(self) -> list[Any]:
        """Take what lies above the last mark."""
        start = len(self.stack) - 1
        while start >= 0 and self.stack[start] is not _MARK:
            start -= 1
        if start < 0:
            raise IndexSyntaxError("a mark is missing")
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def _set_items(self, items: list[Any]) -> None:
        held, keys, values = self.stack[-1], items[::2], items[1::2]
        # Only these are hashed: a nest of tuples could be too deep for that.
        if type(held) is not dict or len(keys) != len(values) or any(type(key) not in (str, Made) for key in keys):
            raise IndexSyntaxError("a dictionary has keys that are not texts")
        held.update(zip(keys, values, strict=True))

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise IndexSyntaxError("items are appended to what is not a list")
        self.stack[-1].extend(items)

    def _name(self, module: Any, name: Any) -> None:
        found = Name(module, name) if type(module) is str and type(name) is str else None
        if found is None or not self._knows(found):
            raise IndexSyntaxError(f"it names {str(found)[:200]}, which no index of a checkpoint needs")
        self.stack.append(found)

    def _make(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise IndexSyntaxError("it calls what is not a class")
        is_dictionary = name.name == "OrderedDict" and not arguments
        self.stack.append({} if is_dictionary else Made(name, arguments))

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not Made or made.state is not None:
            raise IndexSyntaxError("it gives a state to what takes none")
        made.state = state


def parse_index(data: bytes, *, knows: Callable[[Name], bool]) -> Any:
    """Return what the pickle `data` holds: dicts, lists, tuples, texts, numbers, `Name` and `Made`.

    Raises `IndexSyntaxError` for a pickle that is cut off, or has opcodes or names that no index needs.
    """
    machine = _Machine(knows)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            machine.run(opcode.name, argument)
        (found,) = machine.stack
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise IndexSyntaxError(f"it is damaged: {str(error)[:200]}") from error
    return found
