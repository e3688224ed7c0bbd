"""Attributes of modules as values that compare: two blocks with equal ones compute alike."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

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
            own = ((one.name, described(getattr(value, one.name, None), depth - 1)) for one in fields(value))
            return (type(value).__qualname__, *own)
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
