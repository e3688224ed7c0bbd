"""Functions of autograd that are handed parts of tensors, and hide from the rules what they do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paraplan.runtime.shards.split_tensor import VOCABULARY, SplitError, hidden_loss, split_operands
from paraplan.runtime.torch_private import watching_functions

_CALLS_WATCHED = 64


@contextmanager
def custom_functions_refused() -> Iterator[None]:
    """Have an autograd.Function that is handed logits of some classes raise `UnsupportedPlanError`.

    It runs on the parts, and autograd does not see that.
    """

    def watch(cls: Any, args: Any, kwargs: Any) -> None:
        if any(one.source == VOCABULARY for one in split_operands(args, kwargs)):
            raise hidden_loss()

    with watching_functions(watch):
        yield


@contextmanager
def custom_functions_kept_whole() -> Iterator[None]:
    """Have an autograd.Function that is handed a part of what a layer returns raise `SplitError` for that layer."""

    def watch(cls: Any, args: Any, kwargs: Any) -> None:
        for one in split_operands(args, kwargs):
            message = f"{cls.__name__}, an autograd.Function, hides what it does with it"
            raise SplitError(message, source=one.source, is_mixed=True)

    with watching_functions(watch):
        yield


def without_custom_functions(loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return `loss_fn`, refused where it hands an autograd.Function outputs that are split.

    Its first calls are watched, for which torch is changed: those of the checks and of the first steps.
    """
    watched = 0

    def loss(outputs: Any, targets: Any) -> Any:
        nonlocal watched
        if watched == _CALLS_WATCHED:
            return loss_fn(outputs, targets)
        watched += 1
        with custom_functions_refused():
            return loss_fn(outputs, targets)

    return loss
