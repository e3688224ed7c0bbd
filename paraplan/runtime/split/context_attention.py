"""Attention under context parallelism: the one place where the ranks of a `cp` group exchange what they hold.

Ranks hand out tokens for heads and back (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3.1). Where the heads do not
divide, keys and values are gathered, and each rank attends with its own queries (Llama 3, Grattafiori et al. 2024,
section 3.3.2). While a block runs, `torch.nn.functional.scaled_dot_product_attention` and the attention functions of
transformers are the ones made here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.shards.group import TensorGroup, all_gather
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.torch_private import attention_replaced

SDPA = F.scaled_dot_product_attention
"""torch's own attention, whatever stands in its place while a block runs."""
_HEADS = 1  # their dimension, in [batch, heads, tokens, size]
_IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


class ContextAttention:
    """The attention of one rank of `group`, which has `num_own` tokens of each sequence while a block runs."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.num_own = 0
        self.positions: torch.Tensor | None = None
        """The positions of all tokens, where blocks are given them."""
        self._interfaces = {name: partial(self._by_interface, name) for name in _IMPLEMENTATIONS}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have attention exchange tokens in this context."""
        interface = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
        local = getattr(interface, "_local_mapping", None)
        if interface is not None and local is not None:
            interface._local_mapping = {**local, **self._interfaces}
        try:
            with attention_replaced(self._sdpa):
                yield
        finally:
            if interface is not None:
                interface._local_mapping = local

    def _sdpa(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        options = dict(zip(names, args, strict=False)) | kwargs
        if not self._are_own(query, key):
            return SDPA(query, key, value, **options)
        mask, is_causal = options.pop("attn_mask", None), options.pop("is_causal", False)

        def attend(query: Any, key: Any, value: Any, mask: Any, *, is_causal: bool) -> torch.Tensor:
            return SDPA(query, key, value, attn_mask=mask, is_causal=is_causal, **options)

        if self._exchanges(query, key):
            query, key, value = self._to_heads(query, key, value)
            return self._to_tokens(attend(query, key, value, self._mask_of_heads(mask), is_causal=is_causal))
        key, value = (self._gathered(one) for one in (key, value))
        return attend(query, key, value, self._mask_of_rows(mask, query, is_causal=is_causal), is_causal=False)

    def _by_interface(
        self, name: str, module: nn.Module, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Do what transformers' attention function `name` does for whole sequences."""
        functions = sys.modules["transformers.modeling_utils"].AttentionInterface._global_mapping
        base = functions[name] if name != "eager" else _written_out(module)
        if not self._are_own(query, key):
            return base(module, query, key, value, mask, *args, **kwargs)
        if kwargs.get("position_ids") is not None and self.positions is not None:
            kwargs["position_ids"] = self.positions
        given = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if given is None else given
        if self._exchanges(query, key):
            own = {
                key: self._own_heads(one, 0)
                for key, one in kwargs.items()
                if isinstance(one, torch.Tensor) and one.ndim == 1 and one.shape[0] == query.shape[_HEADS]
            }
            operands = self._to_heads(query, key, value)
            output, *_ = base(module, *operands, self._mask_of_heads(mask), *args, **(kwargs | own))
            return _exchange(output, 1, 2, self.group), None
        if name not in ("sdpa", "eager"):
            raise UnsupportedPlanError(
                f"cp={self.group.size} does not divide the {query.shape[_HEADS]} heads of queries and "
                f"{key.shape[_HEADS]} of keys, which {name} needs",
                hint="use attn_implementation='sdpa', or degrees of tp and cp whose product divides the heads",
            )
        rows = self._mask_of_rows(mask, query, is_causal=is_causal, added=name == "eager")
        key, value = (self._gathered(one) for one in (key, value))
        return base(module, query, key, value, rows, *args, **(kwargs | {"is_causal": False}))

    def _are_own(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        return query.shape[-2] == key.shape[-2] == self.num_own

    def _exchanges(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        size = self.group.size
        return query.ndim == 4 and not query.shape[_HEADS] % size and not key.shape[_HEADS] % size

    def _to_heads(self, *own: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the tokens of all ranks of some heads of each of `own`, which travel together where they can."""
        if len({one.shape[-1] for one in own}) > 1:
            return [_exchange(one, _HEADS, 2, self.group) for one in own]
        size = self.group.size
        parts = zip(*(one.chunk(size, _HEADS) for one in own), strict=True)  # of each rank those of all
        joined = torch.cat([one for part in parts for one in part], _HEADS)
        return torch.split(_exchange(joined, _HEADS, 2, self.group), [one.shape[_HEADS] // size for one in own], _HEADS)

    def _to_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        return _exchange(attended, 2, _HEADS, self.group)

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        dim = own.ndim - 2
        return all_gather(own, Sharding(dim, (own.shape[dim] * self.group.size,), self.group.size), self.group)

    def _own_heads(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        return whole.chunk(self.group.size, dim)[self.group.index]

    def _mask_of_heads(self, mask: Any) -> Any:
        if isinstance(mask, torch.Tensor) and mask.ndim == 4 and mask.shape[_HEADS] > 1:
            return self._own_heads(mask, _HEADS)
        return mask

    def _mask_of_rows(self, mask: Any, query: torch.Tensor, *, is_causal: bool, added: bool = False) -> Any:
        """Return what this rank's queries may attend to among the keys of all tokens."""
        first, total = self.group.index * self.num_own, self.group.size * self.num_own
        if mask is not None:
            return mask.narrow(-2, first, self.num_own) if mask.shape[-2] == total else mask
        if not is_causal:
            return None
        places = torch.arange(total, device=query.device)
        allowed = places[first : first + self.num_own, None] >= places
        if not added:
            return allowed
        return torch.zeros(allowed.shape, dtype=query.dtype, device=query.device).masked_fill(
            ~allowed, torch.finfo(query.dtype).min
        )[None, None]


def _written_out(module: nn.Module) -> Callable[..., Any]:
    """Return the eager attention of the file that `module` is from."""
    found: Callable[..., Any] = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return found


def _exchange(local: torch.Tensor, scatter: int, gather: int, group: TensorGroup) -> torch.Tensor:
    result: torch.Tensor = _Exchange.apply(local, scatter, gather, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """All-to-all: a rank hands out its parts along one dimension, and gets what the others have along another."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, scatter: int, gather: int, group: TensorGroup) -> torch.Tensor:
        ctx.scatter, ctx.gather, ctx.group = scatter, gather, group
        return _exchanged(local, scatter, gather, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _exchanged(gradients[0], ctx.gather, ctx.scatter, ctx.group), None, None, None


def _exchanged(local: torch.Tensor, scatter: int, gather: int, group: TensorGroup) -> torch.Tensor:
    parts = torch.stack(local.chunk(group.size, dim=scatter))
    received = torch.empty_like(parts)
    if group.handle is not None:
        dist.all_to_all_single(received, parts, group=group.handle)
    return torch.cat(received.unbind(0), dim=gather)
