"""On a CPU, the operators and types that a GPU would use: attention and dropout kernels, and autocast's lists."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch.distributed.tensor import DTensor

from paraplan.model.trace_on_gpu import CHECKS, SDPA, AsOnGpu
from paraplan.runtime.split.context_attention import EarlierKeys
from paraplan.runtime.step.chunked_loss import ChunkedLogits
from paraplan.runtime.torch_private import (
    GROUPED_MM,
    FakeTensor,
    TorchDispatchMode,
    pytree,
)

# Functions that autocast runs in fp32 on CUDA and in whatever type comes on the CPU (ATen/autocast_mode.h, the lists
# AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE, in torch 2.13); those without a use in transformers are left out.
_IN_FP32 = frozenset(
    {
        F.layer_norm,
        F.rms_norm,
        F.group_norm,
        F.softmax,
        F.log_softmax,
        F.softplus,
        *(
            getattr(where, name)
            for where in (torch, torch.Tensor)
            for name in (
                *("pow", "exp", "log", "rsqrt", "reciprocal", "softmax", "log_softmax", "logsumexp"),
                *("sum", "prod", "cumsum", "cumprod"),
            )
        ),
        torch.layer_norm,
        torch.rms_norm,
        torch.Tensor.__pow__,
        torch.Tensor.__rpow__,
    }
)

_BINS = 100
"""Bins of torch.histc where none are told."""

_REPLACED = _IN_FP32 | {SDPA, F.dropout, F.cross_entropy}


class GpuOperators(AsOnGpu):
    """`AsOnGpu` for tensors on the CPU under autocast, which has other lists for the CPU than for CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("attn_mask"), EarlierKeys):
            kwargs = kwargs | {"attn_mask": None, "is_causal": True}
        if torch.is_autocast_enabled("cpu"):
            if func in _IN_FP32 and kwargs.get("dtype") is None:
                args, kwargs = pytree.tree_map(_to_fp32, (args, kwargs))
            elif func is SDPA:
                args, kwargs = pytree.tree_map(_to_half, (args, kwargs))
            elif func is F.cross_entropy and type(args[0]) is not ChunkedLogits and _is_plain_loss(args, kwargs):
                return _cross_entropy(*args, **kwargs)
        if func in CHECKS and len(args) == 1 and not kwargs and isinstance(args[0], FakeTensor):
            return torch.tensor(CHECKS[func])
        return super().__torch_function__(func, types, args, kwargs)


class GpuKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Answers what GPUs compute and the CPU or torch's shape functions refuse.

    That is grouped products in fp32, and histograms of whole numbers, by which transformers counts the rows of experts.
    Autocast does not know them, so experts whose weights are in fp32 are run in fp32 (ATen/native/GroupedMMUtils.h
    takes fp32; the autocast lists of ATen/autocast_mode.h do not name the operator, in torch 2.13).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is GROUPED_MM.default and args[0].dtype is not torch.bfloat16:
            return _grouped_product(args[0], args[1], groups=args[2] if len(args) > 2 else (kwargs or {}).get("offs"))
        if func is torch.ops.aten.histc.default and isinstance(args[0], FakeTensor):
            return args[0].new_empty(args[1] if len(args) > 1 else (kwargs or {}).get("bins", _BINS))
        return func(*args, **(kwargs or {}))


def _grouped_product(left: torch.Tensor, right: torch.Tensor, groups: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor of the product's shape; rows or columns of a matrix, or its inner dimension, are in groups."""
    if left.dim() == right.dim():
        first = left.shape[0] if groups is None else groups.shape[0]
        return left.new_empty(first, left.shape[-2], right.shape[-1])
    return left.new_empty(left.shape[-2], right.shape[-1])


def _is_plain_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 2 and args[0].dtype is torch.bfloat16 and not kwargs.get("label_smoothing")


def _cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, label_smoothing: float = 0.0, **options: Any
) -> torch.Tensor:
    """Return the loss as on CUDA, where log-probabilities are in the type of the logits, under autocast too.

    The loss of them is then computed in fp32, from a copy (ATen/native/LossNLL.cpp; autocast's fp32_set_opt_dtype).
    """
    with torch.autocast("cpu", enabled=False):
        log_probabilities = F.log_softmax(logits, dim=min(1, logits.dim() - 1))
        return F.nll_loss(log_probabilities.float(), targets, **options)


def _to_fp32(leaf: Any) -> Any:
    is_half = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
    return leaf.float() if is_half else leaf


def _to_half(leaf: Any) -> Any:
    is_single = isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32
    return leaf.to(torch.get_autocast_dtype("cpu")) if is_single else leaf
