"""Shapes of what operations on the meta device return, worked out once for each operation and its arguments."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from paraplan.model.trace_torch_private import TorchDispatchMode, schema_of, storage_key

_VALUES = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEPEND_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MOST = 50_000
"""Number of operations that are remembered, about 500 bytes each: those of hundreds of unlike blocks."""
_known: dict[Any, Any] = {}


class MetaShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Makes anew what an operation on the meta device returned before, by its sizes, strides and types.

    torch works them out in Python, 0.1 to 4 ms for each operation, and who asks a model how it is built runs the same
    ones in each block, and again for each question. Operations that return views, write to their arguments or depend
    on values run as ever, and so do those of subclasses of tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _makes_tensors(func):
            return func(*args, **kwargs)
        try:
            key = (func, _key(args), *((name, _key(value)) for name, value in kwargs.items()))
        except _UnknownArgumentError:
            return func(*args, **kwargs)
        form = _known.get(key)
        if form is not None:
            return _made(form)
        returned = func(*args, **kwargs)
        form = _form(returned, {storage_key(one) for one in _tensors_in((*args, *kwargs.values()))})
        if form is not None and len(_known) < _MOST:
            _known[key] = form
        return returned


class _UnknownArgumentError(Exception):
    """An argument of which this does not know what decides about shapes."""


@cache
def _makes_tensors(func: Any) -> bool:
    """Whether an operation only makes new tensors, whose sizes follow from those of its arguments."""
    schema = schema_of(func)
    if schema is None or not schema.returns or _DEPEND_ON_VALUES & {*func.tags}:
        return False
    return all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


def _key(value: Any) -> Any:
    """Return what of an argument decides about shapes; a number is told from an equal one of another type."""
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter:
        if value.is_meta and value.layout is torch.strided:
            return value.shape, value.stride(), value.dtype
    elif kind is tuple or kind is list:
        return tuple([_key(each) for each in value])
    elif kind in _VALUES:
        return kind, value
    raise _UnknownArgumentError


def _form(returned: Any, storages: set[int]) -> Any:
    """Return what `_made` makes tensors like `returned` of; None where one of them is a view of `storages`, or none."""
    if type(returned) is Tensor and returned.is_meta and returned.layout is torch.strided:
        is_new = storage_key(returned) not in storages
        return (returned.shape, returned.stride(), returned.dtype) if is_new else None
    if isinstance(returned, tuple | list):
        forms = [_form(each, storages) for each in returned]
        return None if None in forms else [type(returned), forms]
    return None


def _made(form: Any) -> Any:
    if type(form) is list:
        kind, forms = form
        return kind([_made(each) for each in forms])
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _tensors_in(values: Any) -> list[Tensor]:
    found = [each for each in values if isinstance(each, Tensor)]
    return found + [one for each in values if isinstance(each, list | tuple) for one in _tensors_in(each)]
