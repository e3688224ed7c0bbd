"""Losses over the tokens of all ranks of a `cp` group, of which each rank computes those of its own tokens.

In the context of `SumsOverRanks` a sum that comes to one number is that of all ranks, and so are means: sums by the
number of entries, or of targets that are not ignored. Every rank then has the loss of whole sequences, and its
gradient with respect to its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch.overrides import TorchFunctionMode

from paraplan.runtime.shards.group import TensorGroup, reduce_from_region

_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_BY_CLASS = frozenset({F.cross_entropy, F.nll_loss})
_BY_ENTRY = frozenset(
    {F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.soft_margin_loss}
)
_BY_ENTRY |= frozenset({F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.gaussian_nll_loss})
_SUMS = frozenset({"sum", "nansum", "count_nonzero"})
_MEANS = frozenset({"mean", "nanmean"})
_RESHAPES = frozenset({"view", "reshape"})
_COUNTS = frozenset({"numel", "nelement"})


class SumsOverRanks(TorchFunctionMode):
    """A context in which, while it `is_active`, sums and means that come to one number go over all ranks of `group`.

    Where it `counts`, in a loss, numbers of entries are those of all ranks too; elsewhere FSDP asks for those of
    parameters. Code that gives what it makes the shape of its inputs, sequences of `num_tokens`, has them as a rank has
    them.
    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self.is_active = False
        self.counts = False
        self.num_tokens = 0
        self._group = group

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_active:
            return func(*args, **kwargs)
        if func in _BY_CLASS:
            return self._cross_entropy(func, args, kwargs)
        if func in _BY_ENTRY:
            return self._loss(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in _RESHAPES and args[0].ndim > 2:  # of [batch, tokens, ...]: no parameter that FSDP lays out
            return func(args[0], *self._own_sizes(args[0], args[1:]), **kwargs)
        if name in _COUNTS and self.counts:
            return func(*args, **kwargs) * (self._group.size if args[0].ndim else 1)
        if name in _SUMS and _comes_to_one_number(args, kwargs):
            return self._sum(func(*args, **kwargs))
        if name in _MEANS and _comes_to_one_number(args, kwargs):
            return self._mean(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _own_sizes(self, operand: torch.Tensor, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `sizes` that code has noted of whole sequences as they are of this rank's tokens."""
        numbers = tuple(sizes[0]) if sizes and isinstance(sizes[0], (tuple, list)) else sizes
        is_of_own = self.num_tokens // self._group.size in operand.shape and self.num_tokens not in operand.shape
        # Several sequences may have as many own tokens as a whole one has, and sizes that fit are those of these.
        if not is_of_own or not all(isinstance(one, int) for one in numbers) or prod(numbers) == operand.numel():
            return sizes
        return tuple(one // self._group.size if one == self.num_tokens else one for one in numbers)

    def _sum(self, own: torch.Tensor) -> torch.Tensor:
        return reduce_from_region(own, self._group)

    def _mean(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = args[0] if args else kwargs["input"]
        if not isinstance(values, torch.Tensor) or not values.ndim:
            return func(*args, **kwargs)
        if name == "nanmean":
            return self._sum(values.nansum()) / self._sum((~values.isnan()).sum())
        return self._sum(values.sum(**({"dtype": kwargs["dtype"]} if "dtype" in kwargs else {}))) / (
            values.numel() * self._group.size
        )

    def _cross_entropy(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(_CROSS_ENTROPY, args, strict=False)) | kwargs
        reduction = given.get("reduction", "mean")
        if reduction == "none" or given.get("size_average") is not None or given.get("reduce") is not None:
            return func(*args, **kwargs)
        target, weight = given["target"], given.get("weight")
        total = self._sum(func(**(given | {"reduction": "sum"})))
        if reduction == "sum":
            return total
        if target.is_floating_point():
            return total / (target.numel() // target.shape[min(1, target.ndim - 1)] * self._group.size)
        counts = target != given.get("ignore_index", -100)
        counted = counts.sum() if weight is None else (weight[target * counts] * counts).sum()
        return total / self._sum(counted)

    def _loss(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reduction = kwargs.get("reduction", "mean")
        if reduction not in ("mean", "sum") or len(args) > 2:
            return func(*args, **kwargs)
        losses = func(*args, **(kwargs | {"reduction": "none"}))
        total = self._sum(losses.sum())
        return total if reduction == "sum" else total / (losses.numel() * self._group.size)


def _comes_to_one_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = args[0] if args else kwargs.get("input")
    dims = [*args[1:], *(value for name, value in kwargs.items() if name in ("dim", "axis"))]
    return isinstance(values, torch.Tensor) and values.ndim > 0 and all(dim is None for dim in dims)
