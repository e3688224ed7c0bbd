"""Forwards of modules in place of their class's: nothing else in the runtime puts a forward on an instance.

Who wraps one calls `module.forward` as it was; so the last wrapper of a block runs first: recompute around context
parallelism around tensor parallelism around the block's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

DOES_NOT_RUN = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""Errors of a model's code where it runs on parts, or without values."""


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have `module` compute what `forward` does."""
    module.forward = forward


@contextmanager
def trial_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Have modules compute what `forwards` do in this context, and what their classes do behind it."""
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]


@contextmanager
def trial_forward_of(kind: type[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Have all modules of one class, with its own `forward`, compute what another one does in this context."""
    own: Callable[..., Any] = kind.forward
    kind.forward = forward
    try:
        yield
    finally:
        kind.forward = own
