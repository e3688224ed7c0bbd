"""Running a model without values where its code asks for some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.torch_private import in_place_of_reentrant

Context = Callable[[], AbstractContextManager[Any]]


class _YesToQuestions(TorchFunctionMode):
    """Answers True where code asks whether something holds for tensors that have no values.

    Models ask whether a mask leaves anything out or positions follow each other, and do more where they do not.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__bool__" or (name == "item" and args[0].dtype == torch.bool):
            return True
        if name == "__contains__":  # tokens of padding, which are warned of
            return False
        return func(*args, **(kwargs or {}))


@contextmanager
def reentrant_refused() -> Iterator[None]:
    """Raise `UnsupportedPlanError` where a model recomputes in a way that shows neither shapes nor gradients within."""

    def apply(*_: Any, **__: Any) -> Any:
        raise UnsupportedPlanError(
            "the model recomputes by torch.utils.checkpoint with use_reentrant=True, which hides how it computes",
            hint="use_reentrant=False (transformers: gradient_checkpointing_kwargs), or recompute=full in the plan",
        )

    with in_place_of_reentrant(apply):
        yield


@contextmanager
def _all_on_meta() -> Iterator[None]:
    with torch.device("meta"), _YesToQuestions():
        yield


# As the model is; with its questions answered; and with what it makes on the CPU, whatever its inputs are on, on meta.
WAYS_TO_RUN: tuple[Context, ...] = (nullcontext, _YesToQuestions, _all_on_meta)
