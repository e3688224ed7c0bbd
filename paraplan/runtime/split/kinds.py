"""Which blocks of a model split alike, so that one of each kind is tried for all of them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from paraplan.runtime.structure.model_structure import BlockCall
from paraplan.runtime.structure.snapshots import MODULE_FIELDS


def kind_of(
    block_name: str, block: nn.Module, call: BlockCall, kept: Sequence[Any], numbering: frozenset[tuple[str, str]]
) -> Any:
    """Return what two blocks that split alike have in common."""
    shapes = tuple(
        (name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    )
    settings = tuple(
        (name, type(module).__qualname__, module.extra_repr(), _settings(block_name, name, module, numbering))
        for name, module in block.named_modules()
    )
    return (type(block), shapes, settings, tuple(kept), tuple(call.kwargs), len(call.args), call.read)


def _settings(
    block_name: str, path: str, module: nn.Module, numbering: frozenset[tuple[str, str]]
) -> tuple[tuple[str, Any], ...]:
    """Return the plain attributes of a module: another window or number of heads is another kind of block."""
    own_name = f"{block_name}.{path}".rstrip(".")
    return tuple(
        (name, _without_name(described(value), own_name))
        for name, value in vars(module).items()
        if name not in MODULE_FIELDS and (path, name) not in numbering
    )


def _without_name(setting: Any, own_name: str) -> Any:
    """Return a setting without the name of the module that has it, or the end of it: layers of peft keep theirs."""
    if not isinstance(setting, tuple):
        return setting
    if len(setting) == 2 and setting[0] == "str" and "." in setting[1] and f".{own_name}".endswith(f".{setting[1]}"):
        return ("own name",)
    return tuple(_without_name(one, own_name) for one in setting)


def numbering_of(blocks: Sequence[nn.Module]) -> frozenset[tuple[str, str]]:
    """Return the attributes that number the blocks, by the names of their modules in a block and their own."""
    offsets: dict[tuple[str, str], list[int | None]] = {}
    for index, block in enumerate(blocks):
        for path, module in block.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, int) and not isinstance(value, bool):
                    offsets.setdefault((path, name), []).append(value - index)
    # Of two blocks alone, sizes of 4 and 5 may be numbers of another kind.
    return frozenset(
        key
        for key, found in offsets.items()
        if len(found) > 1 and len(set(found)) == 1 and (len(found) > 2 or found[0] in (0, 1))
    )


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, enum.Enum, type)
_DEPTH = 4


def described(value: Any, depth: int = _DEPTH) -> Any:
    """Return what an attribute comes to, hashable: plain values, containers, functions with what they enclose.

    Of other objects (a configuration that all blocks share, caches) the type alone counts.
    """
    if isinstance(value, _PLAIN):
        return (type(value).__name__, value)
    if depth:
        if isinstance(value, FunctionType):
            enclosed = tuple(_content(cell, depth) for cell in value.__closure__ or ())
            return ("function", value.__code__, described(value.__defaults__, depth - 1), enclosed)
        if isinstance(value, MethodType):
            return ("method", value.__func__.__code__, type(value.__self__).__qualname__)
        if isinstance(value, partial):
            return ("partial", *(described(one, depth - 1) for one in (value.func, value.args, value.keywords)))
        if isinstance(value, Mapping):
            return ("mapping", *((str(key), described(one, depth - 1)) for key, one in value.items()))
        if isinstance(value, (list, tuple)):
            return ("sequence", *(described(one, depth - 1) for one in value))
        if isinstance(value, (set, frozenset)):
            return ("set", *sorted(repr(described(one, depth - 1)) for one in value))
        if is_dataclass(value) and not isinstance(value, type):
            names = [one.name for one in fields(value)]
            # What a configuration of transformers holds of each layer on its own, it refuses to give out as one.
            own = vars(value) if hasattr(value, "__dict__") else {name: getattr(value, name, None) for name in names}
            return (type(value).__qualname__, *((name, described(own.get(name), depth - 1)) for name in names))
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if callable(value) and type(value).__name__ in ("builtin_function_or_method", "ufunc"):
        return ("builtin", getattr(value, "__qualname__", ""))
    return type(value).__qualname__


def _content(cell: Any, depth: int) -> Any:
    try:
        return described(cell.cell_contents, depth - 1)
    except ValueError:  # a cell that nothing has filled
        return None
