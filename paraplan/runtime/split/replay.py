"""Calls on split tensors that were made before: what they came to is remembered, so that they cost little again.

A training makes the same calls in every step. Finding out what a function does to parts (`rules`) takes longer
than many a function itself; the answer depends on the function, its sizes and the cuts of its operands alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paraplan.runtime.shards.split_tensor import SplitSpec, SplitTensor

RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"})
"""Functions whose answer is a reshaped part, whatever sizes they were given for the whole."""

_KEPT_CALLS = 4096
_PLAIN = frozenset(
    {int, str, bool, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout}
)
_NESTS = frozenset({tuple, list, torch.Size})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to: the spec of every result, which are one tensor or a `nest` of them.

    `keeps` says that the result is the operand itself where the function returns its part. `local_shape` is what the
    part is reshaped to, None for other functions, which run on the parts; `aligned` says how whole operands meet the
    parts.
    """

    results: tuple[SplitSpec, ...]
    nest: type | None
    keeps: bool
    aligned: bool
    local_shape: torch.Size | None = None

    def wrap(self, result: Any, first: SplitTensor) -> Any:
        """Return what the parts came to as split tensors; `first` is the operand that they are of."""
        if self.nest is None:
            return first if self.keeps and result is first.local else SplitTensor.of(result, self.results[0])
        return self.nest([SplitTensor.of(local, spec) for local, spec in zip(result, self.results, strict=True)])


@dataclass(slots=True)
class Call:
    """A call, remembered by `key`. `first` is its first split operand; `has_plain` says that others are whole."""

    key: Any
    first: SplitTensor
    has_plain: bool

    @property
    def outcome(self) -> Outcome | None:
        """What the same call came to before, None at the first time."""
        known: Outcome | None = self.first.spec.group.calls.get(self.key)
        return known

    def remember(self, result: Any, *, keeps: bool = False, aligned: bool = False, reshapes: bool = False) -> None:
        """Keep what the call came to; a result that is no split tensor, or no flat nest of them, is found anew."""
        nest = type(result) if type(result) in (tuple, list) else None
        leaves = [result] if nest is None else result
        group = self.first.group
        if not leaves or any(type(leaf) is not SplitTensor or leaf.group is not group for leaf in leaves):
            return
        if len(group.calls) >= _KEPT_CALLS:  # sequences of ever other lengths
            group.calls.clear()
        group.calls[self.key] = Outcome(
            results=tuple(leaf.spec for leaf in leaves),
            nest=nest,
            keeps=keeps,
            aligned=aligned,
            local_shape=result.local.shape if reshapes else None,
        )


def described(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return a call as it is remembered; None for one whose answer may depend on more than sizes and specs."""
    split: list[SplitTensor] = []
    plain: list[torch.Tensor] = []
    try:
        key = [value if type(value) in _PLAIN else _description(value, split, plain) for value in args]
        for name, value in kwargs.items():
            key += (name, value if type(value) in _PLAIN else _description(value, split, plain))
    except _UnknownError:
        return None
    return Call((func, *key), split[0], bool(plain)) if split else None


class _UnknownError(Exception):
    """An argument of which more counts than can be remembered."""


def _description(value: Any, split: list[SplitTensor], plain: list[torch.Tensor]) -> Any:
    kind = type(value)
    if kind is SplitTensor:
        split.append(value)
        return value.spec
    if kind in _PLAIN:
        return value
    if kind is float:
        return float  # a factor that changes with the step
    if kind in _NESTS:
        return tuple([_description(entry, split, plain) for entry in value])
    if kind is slice:
        return (slice, *[_description(bound, split, plain) for bound in (value.start, value.stop, value.step)])
    if kind is torch.Tensor or kind is nn.Parameter:
        plain.append(value)
        return value.shape
    raise _UnknownError
