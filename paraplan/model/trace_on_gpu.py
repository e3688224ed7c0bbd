"""Operators as a GPU runs them, in a run without values: the CPU's own dropout and attention keep other tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paraplan.model.trace_torch_private import EFFICIENT_ATTENTION, FLASH_ATTENTION

SDPA = functional.scaled_dot_product_attention
"""torch's own attention, whatever stands in its place while a block runs under context parallelism."""
_QUESTIONS: dict[Any, bool] = {Tensor.__bool__: True, Tensor.item: True, Tensor.__contains__: False}
CHECKS = {Tensor.all: True, torch.all: True, Tensor.any: False, torch.any: False}


class AsOnGpu(TorchFunctionMode):
    """Sends dropout and attention to the operators that torch picks on a GPU, and answers checks of values.

    A model that asks whether all values of a mask are set, or any are, gets the answer of a plain batch without
    padding: all are, none is; whether something holds: it does; whether a layer is dropped: none is.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            return _attention_on_gpu(*args, **kwargs)
        if func is functional.dropout:
            return _dropout_on_gpu(*args, **kwargs)
        if func in CHECKS and len(args) == 1 and not kwargs and args[0].is_meta:
            return torch.tensor(CHECKS[func], device="cpu")
        if func in _QUESTIONS and args[0].is_meta and (func is not Tensor.item or args[0].dtype is torch.bool):
            return _QUESTIONS[func]
        if func is torch.rand and args in (([],), ((),)):  # whether a layer is dropped in this step: none is
            return torch.ones((), device="cpu")
        return func(*args, **kwargs)


def _dropout_on_gpu(value: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(value, p, True)[0] if training and p > 0 else value


def _attention_on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention where torch's own rules allow it (no mask, equal head sizes of at most 256, half precision)."""
    sizes = {query.shape[-1], value.shape[-1]}
    if attn_mask is None and len(sizes) == 1 and max(sizes) <= 256 and query.dtype is not torch.float32:
        flash = FLASH_ATTENTION(query, key, value, dropout_p, is_causal, False, scale=scale)
        return flash[0]  # type: ignore[no-any-return]
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    efficient = EFFICIENT_ATTENTION(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)
    return efficient[0]  # type: ignore[no-any-return]


_IN_16_BITS = (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.addmm)


class AsUnderAutocast(TorchFunctionMode):
    """Casts fp32 operands of matrix products, as autocast does, which knows no meta device."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_16_BITS:
            args = tuple(
                one.to(self._dtype) if isinstance(one, Tensor) and one.dtype is torch.float32 else one for one in args
            )
        return func(*args, **(kwargs or {}))
