"""Models without values: made without weights, run on the meta device, and given storage again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
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


class QuickShapes(TorchFunctionMode):
    """Computes what a block is made of, for tensors without values, by other operations of the same shape and operands.

    torch has the shapes of norms, layers, attention and arithmetic from Python, which takes longer than all else that
    a block does on meta.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _QUICK and args and type(args[0]) is torch.Tensor and args[0].is_meta:
            result = _QUICK[func](*args, **(kwargs or {}))
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


def _quick_norm(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    # Operands are named where nn.LayerNorm and nn.RMSNorm call, or not; the norm's shape, the first one, is none.
    operands = [one for one in (*args[1:3], *kwargs.values()) if isinstance(one, torch.Tensor)]
    if any(one.dtype != tensor.dtype for one in operands):
        return None
    result = tensor.clone(memory_format=torch.contiguous_format)
    for one in operands:
        result = result.add_(one)
    return result


def _quick_arithmetic(tensor: torch.Tensor, *others: Any, **kwargs: Any) -> torch.Tensor | None:
    if len(others) != 1 or kwargs or not tensor.is_floating_point():
        return None
    other = others[0]
    if isinstance(other, int | float):
        return tensor.clone()
    if not _is_plain(other) or other.dtype != tensor.dtype or other.ndim > tensor.ndim:
        return None
    sizes = zip(other.shape, tensor.shape[tensor.ndim - other.ndim :], strict=True)
    # In place: every type and shape is the first operand's.
    return tensor.clone().add_(other) if all(size in (1, whole) for size, whole in sizes) else None


def _quick_power(tensor: torch.Tensor, exponent: object, **kwargs: Any) -> torch.Tensor | None:
    is_alike = not kwargs and isinstance(exponent, int | float) and tensor.is_floating_point()
    return tensor.clone() if is_alike else None


def _quick_cumulative(tensor: torch.Tensor, dim: int, **kwargs: Any) -> torch.Tensor | None:
    is_alike = not kwargs and tensor.is_floating_point() and -tensor.ndim <= dim < tensor.ndim
    return tensor.clone(memory_format=torch.contiguous_format) if is_alike else None


def _quick_activation(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return F.silu(tensor)


def _quick_linear(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if bias is None or not _is_plain(weight, bias) or tensor.dtype != weight.dtype or bias.dtype != weight.dtype:
        return None
    rows = tensor.reshape(1, -1, tensor.shape[-1])
    sums = torch.baddbmm(bias.expand(1, rows.shape[1], -1), rows, weight.t()[None])
    return sums.view(*tensor.shape[:-1], weight.shape[0])


def _quick_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *_: Any,
    **__: Any,
) -> torch.Tensor | None:
    is_alike = query.dtype == key.dtype == value.dtype and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    # A mask is an operand too, and dropout takes random numbers.
    if not is_alike or not _is_plain(key, value) or attn_mask is not None or dropout_p:
        return None
    return (query @ key.transpose(-2, -1)).softmax(-1) @ value


def _is_plain(*tensors: torch.Tensor) -> bool:
    return all(type(one) in (torch.Tensor, nn.Parameter) and one.is_meta for one in tensors)


_QUICK: dict[Callable[..., Any], Callable[..., torch.Tensor | None]] = {
    F.layer_norm: _quick_norm,
    F.rms_norm: _quick_norm,
    F.linear: _quick_linear,
    F.scaled_dot_product_attention: _quick_attention,
    F.gelu: _quick_activation,
    torch.Tensor.cumsum: _quick_cumulative,
    **dict.fromkeys((torch.Tensor.pow, torch.Tensor.__pow__), _quick_power),
    **dict.fromkeys((torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul, torch.Tensor.div), _quick_arithmetic),
}


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
