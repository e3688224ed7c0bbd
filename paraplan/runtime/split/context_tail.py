"""Whether what follows the blocks works token by token, seen in a run without values on some of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.torch_private import tensors_in

_MIXES = (
    *("attention", "conv", "pool", "fft", "lstm", "gru", "rnn", "interpolate", "unfold"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "roll", "flip"),
)
_PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum"})
_ALONG = frozenset({"sum", "mean", "max", "min", "amax", "amin", "argmax", "argmin", "softmax", "log_softmax", "sort"})
_ALONG |= frozenset({"argsort", "topk", "logsumexp", "norm", "std", "var", "all", "any", "prod", "median", "gather"})
_ALONG |= frozenset({"nansum", "nanmean", "select", "narrow", "index_select", "diff", "cat", "unbind"})


class TokensApart(TorchFunctionMode):
    """Refuses functions that bring tokens together, where `has_own` says that a rank has `num_own` of each sequence."""

    def __init__(self, size: int, has_own: Callable[[], int | None]) -> None:
        super().__init__()
        self._size = size
        self._has_own = has_own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, num_own, name = kwargs or {}, self._has_own(), getattr(func, "__name__", "")
        if num_own is not None and self._mixes(name, args, kwargs, num_own):
            raise UnsupportedPlanError(
                f"cp={self._size}: what follows the blocks brings tokens together ({name}), and ranks have some",
                hint="return what is computed token by token, and bring tokens together nowhere but in attention; or "
                "use cp=1",
            )
        return func(*args, **kwargs)

    def _mixes(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], num_own: int) -> bool:
        found = [(one, _token_dim(one, num_own)) for one in tensors_in((args, kwargs))]
        of_tokens = [(one, dim) for one, dim in found if dim is not None]
        if not of_tokens:
            return False
        first, dim = of_tokens[0]
        if any(part in name for part in _MIXES):
            return True
        if name in _PRODUCTS:
            return len(of_tokens) > 1
        if name == "pad":
            sides = list(args[1] if len(args) > 1 else kwargs.get("pad", ()))
            place = 2 * (first.ndim - 1 - dim)
            return any(sides[place : place + 2])
        if name == "__getitem__":
            return _takes_some(args[1], first, dim)
        return name in _ALONG and dim in _dims(name, args, kwargs, first.ndim)


def _token_dim(tensor: torch.Tensor, num_own: int) -> int | None:
    """Return the dimension of tokens: of [batch, tokens, ...], or the last but one."""
    dims = [1, tensor.ndim - 2] if tensor.ndim > 2 else [1]
    return next((dim for dim in dims if tensor.ndim > dim and tensor.shape[dim] == num_own), None)


def _dims(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> list[int]:
    place = 2 if name == "topk" else 1
    given = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else ()))
    dims = given if isinstance(given, (tuple, list)) else (given,)
    return [dim % ndim for dim in dims if isinstance(dim, int) and not isinstance(dim, bool)]


def _takes_some(index: Any, tensor: torch.Tensor, token_dim: int) -> bool:
    """Whether an index takes some of the tokens."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [entry for entry in entries if not isinstance(entry, torch.Tensor)]:
        place = next(place for place, entry in enumerate(entries) if entry is Ellipsis)
        num_known = sum(entry is not None for entry in entries) - 1
        entries[place : place + 1] = [slice(None)] * (tensor.ndim - num_known)
    entries = [entry for entry in entries if entry is not None]
    if any(isinstance(entry, torch.Tensor) for entry in entries):
        return len(entries) > token_dim or entries[0].dtype == torch.bool if entries else False
    if len(entries) <= token_dim:
        return False
    entry = entries[token_dim]
    return not (
        isinstance(entry, slice)
        and entry.indices(tensor.shape[token_dim])[1:] == (tensor.shape[token_dim], 1)
        and entry.indices(tensor.shape[token_dim])[0] == 0
    )
