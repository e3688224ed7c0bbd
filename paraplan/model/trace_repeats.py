"""Blocks that are like one before are not run again in a trace: they would do the same, without values.

Of blocks that are alike the first two run. The first may make what all of them share, as tables of positions; the
second stands for those after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paraplan.model.trace_torch_private import pytree

_PLACES = ("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "block_idx")
"""Attributes that say where a block stands, and nothing of what it does."""


class Records(Protocol):
    """Who writes down what blocks do."""

    def same_as(self, scope: str, earlier: str) -> None:
        """Write down for one block what another one did."""


@contextmanager
def skipped_repeats(module: nn.Module, blocks: Mapping[str, nn.Module], records: Records) -> Iterator[None]:
    """Let blocks that are like two before them return what the second of these did, in this context."""
    known: dict[Any, _Repeats] = {}
    wrapped = [block for name, block in blocks.items() if name]
    try:
        for name, block in blocks.items():
            if name:
                block.forward = _forward(name, block, known, records)
        yield
    finally:
        for block in wrapped:
            del block.forward  # the class's own stands behind it


@dataclass
class _Repeats:
    """The traces of the first blocks of a kind."""

    names: list[str] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    output: Any = None


def _forward(name: str, block: nn.Module, known: dict[Any, _Repeats], records: Records) -> Callable[..., Any]:
    inner, kind, has_run = block.forward, _kind(block), False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if has_run:  # weights that several layers share: each does its work
            return inner(*args, **kwargs)
        has_run = True
        given, shape = pytree.tree_flatten((args, kwargs))
        same = known.setdefault((kind, str(shape), tuple(map(_outline, given))), _Repeats())
        if len(same.names) > 1:
            records.same_as(name, same.names[-1])
            return pytree.tree_map(lambda one: _again(one, same.inputs, given), same.output)
        output = inner(*args, **kwargs)
        same.names.append(name)
        same.inputs, same.output = given, output
        return output

    return forward


def _kind(block: nn.Module) -> Any:
    """Return what tells apart blocks that do different things: classes, parameters, and plain attributes."""
    return tuple(
        (
            path,
            type(part).__qualname__,
            tuple((name, tuple(one.shape), one.requires_grad) for name, one in part.named_parameters(recurse=False)),
            tuple((name, tuple(one.shape), one.dtype) for name, one in part.named_buffers(recurse=False)),
            tuple(
                (name, getattr(value, "__qualname__", None) or repr(value))
                for name, value in sorted(vars(part).items())
                if _is_plain(value) and name not in _PLACES
            ),
        )
        for path, part in block.named_modules()
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple | list | None) or hasattr(value, "__qualname__")


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    return repr(value) if isinstance(value, bool | int | float | str | None) else id(value)


def _again(value: Any, earlier: list[Any], given: list[Any]) -> Any:
    """Return what a later block returns where an earlier one returned `value`: of inputs its own, else a new tensor."""
    if not isinstance(value, Tensor):
        return value
    for before, now in zip(earlier, given, strict=True):
        if before is value:
            return now
    # A copy is no leaf, as what a block returns is none: code may change it in place.
    return torch.empty_like(value).requires_grad_(value.requires_grad).clone()
