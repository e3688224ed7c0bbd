"""Models without values: made without weights, run on the meta device, and given storage again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.structure.snapshots import Snapshot
from paraplan.runtime.torch_private import FakeTensor, all_taken_for_nonzero, dtensor_like, in_place_of_reentrant


@contextmanager
def without_weights() -> Iterator[None]:
    """Build modules whose parameters have shapes and no values, in this context; `job.prepare` then needs `weights=`.

    Parameters are on the meta device, and buffers, which code computes, are where they are otherwise.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta or isinstance(parameter, FakeTensor):
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # torch's says None
    try:
        yield
    finally:
        handle.remove()


def give_storage(module: nn.Module, device: torch.device) -> None:
    """Give the parameters of `module` that have none storage on `device`, shards that of shards; values are arbitrary.

    The parameters stay the same objects, so that what is tied stays tied.
    """
    for parameter in module.parameters():
        if parameter.is_meta:
            _replace(parameter, _empty(parameter, device))


def _empty(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return torch.empty_like(parameter, device=device, requires_grad=False)
    local = torch.empty_like(parameter.to_local(), device=device, requires_grad=False)
    return dtensor_like(local, parameter)


def give_random_values(module: nn.Module) -> None:
    """Give parameters of `module` without values random ones, the same in every process: to compare computations."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.is_meta:
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.1
            _replace(parameter, values)


def _replace(parameter: nn.Parameter, values: torch.Tensor) -> None:
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]


@contextmanager
def attributes_kept(*models: nn.Module) -> Iterator[None]:
    """Put the attributes of modules, and what their functions keep, back at the end of this context, after a trial."""
    snapshot = Snapshot(*models)
    before = [(vars(module), dict(vars(module))) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for held, kept in before:
            held.clear()
            held.update(kept)
        snapshot.put_attributes_back()


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
def _questions_answered() -> Iterator[None]:
    with all_taken_for_nonzero(), _YesToQuestions():
        yield


@contextmanager
def _all_on_meta() -> Iterator[None]:
    with torch.device("meta"), _questions_answered():
        yield


# As the model is; with its questions answered (which entries are not 0, too); and with what it makes on the CPU,
# whatever its inputs are on, on meta.
WAYS_TO_RUN: tuple[Context, ...] = (all_taken_for_nonzero, _questions_answered, _all_on_meta)
