"""Attention under context parallelism: the one place where the ranks of a `cp` group exchange what they hold.

Ranks hand out tokens for heads and back (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3.1). Where they are more than
the heads divide over, several have the same heads: keys and values of these are gathered, and each attends with the
queries of its share of the tokens (Llama 3, Grattafiori et al. 2024, section 3.3.2). While a block runs,
`torch.nn.functional.scaled_dot_product_attention` and the attention functions of transformers are the ones made here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.context_heads import ContextShares, context_shares, divides_heads, key_copies
from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.split.sites import RunOnParts
from paraplan.runtime.torch_private import FLASH_ATTENTION, attention_replaced, function_modes

SDPA = F.scaled_dot_product_attention
"""torch's own attention, whatever stands in its place while a block runs."""
_HEADS = 1  # their dimension, in [batch, heads, tokens, size]
_TOKENS = -2
_IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
_GROUPS = "num_key_value_groups"  # in transformers' modules: heads of queries to one of keys


@dataclass(frozen=True)
class _Share:
    """The share of one rank in an attention: `part` of `num_parts` of the heads, and queries of `rows` of the tokens.

    `of_tokens` has for each rank what part of the heads it has of the same tokens, None where it has others, and
    `of_heads` what part it has. Each head of keys stands for `copies` of them.
    """

    num_parts: int
    part: int
    rows: tuple[tuple[int, int], ...]
    of_tokens: tuple[int | None, ...]
    of_heads: tuple[int, ...]
    has_all_tokens: bool
    copies: int


class ContextAttention:
    """The attention of one rank of `group`, which has `num_own` tokens of each sequence while a block runs."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.num_own = 0
        self.positions: torch.Tensor | None = None
        """The positions of all tokens, where blocks are given them."""
        self._shares: dict[tuple[int, tuple[int, int] | None], _Share] = {}
        self._interfaces = {name: partial(self._by_interface, name) for name in _IMPLEMENTATIONS}
        self._causal_rows: Sequence[tuple[int, int]] = ()
        """The tokens of the queries with which a function of transformers attends causally, where these are not all."""

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
        for mode in _on_parts():
            query, key, value = mode.parts_for(SDPA, (query, key, value))
        if not query.shape[_TOKENS] == key.shape[_TOKENS] == self.num_own:
            return _attend(query, key, value, options, self._causal_rows)
        share = self._share(query, key)
        if options.get("attn_mask") is not None:
            options["attn_mask"] = self._own_mask(options["attn_mask"], share)
        rows = share.rows if options.get("is_causal") else ()
        query, key, value = self._to_heads(query, key, value, share)
        attended = _attend(query, key, value, options, rows)
        return _exchange(attended, share.of_tokens, attended.ndim + _TOKENS, _HEADS, self.group)

    def _by_interface(
        self,
        name: str,
        module: nn.Module,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Do what transformers' attention function `name` does for whole sequences."""
        functions = sys.modules["transformers.modeling_utils"].AttentionInterface._global_mapping
        mask = attention_mask  # the name that callers know
        base = functions[name] if name != "eager" else _written_out(module)
        is_own = query.shape[_TOKENS] == key.shape[_TOKENS] == self.num_own
        if not is_own or (name == "sdpa" and any(mode.cuts(SDPA) for mode in _on_parts())):
            return base(module, query, key, value, mask, *args, **kwargs)
        if kwargs.get("position_ids") is not None and self.positions is not None:
            kwargs["position_ids"] = self.positions
        share = self._share(query, key)
        rows = share.rows
        if rows and name not in ("sdpa", "eager"):
            raise UnsupportedPlanError(
                f"cp={self.group.size} does not divide the {query.shape[_HEADS]} heads of queries and "
                f"{key.shape[_HEADS]} of keys, which {name} needs",
                hint="use attn_implementation='sdpa', or degrees of tp and cp whose product divides the heads",
            )
        own = dict(kwargs)
        for option, one in kwargs.items():
            if isinstance(one, torch.Tensor) and one.ndim in (1, 4):
                own[option] = self._own_option(one, query.shape[_HEADS], share)
        if mask is not None:
            mask = self._own_mask(mask, share)
        given = kwargs.get("is_causal")
        is_causal = mask is None and (getattr(module, "is_causal", True) if given is None else given)
        if rows and name == "sdpa":
            own["is_causal"] = False  # it takes more keys than queries for room of a cache
        if rows and is_causal and (name == "eager" or len(range(*rows[0])) == 1 or "position_bias" in own):
            mask, is_causal = _causal_mask(rows, query, self.num_own * self.group.size), False
        operands = self._to_heads(query, key, value, share)
        self._causal_rows = rows if is_causal else ()
        groups, own_groups = getattr(module, _GROUPS, None), operands[0].shape[_HEADS] // operands[1].shape[_HEADS]
        has_others = groups not in (None, own_groups)
        if has_others:
            setattr(module, _GROUPS, own_groups)
        try:
            output, *_ = base(module, *operands, mask, *args, **own)
        finally:
            self._causal_rows = ()
            if has_others:
                setattr(module, _GROUPS, groups)
        return _exchange(output, share.of_tokens, 1, 2, self.group), None

    def _share(self, query: torch.Tensor, key: torch.Tensor) -> _Share:
        """Return this rank's share of an attention with these heads, or without heads."""
        heads = (query.shape[_HEADS], key.shape[_HEADS]) if query.ndim == 4 else None
        found = self._shares.get((self.num_own, heads))
        if found is None:
            found = self._share_of(heads)
            if not torch.compiler.is_compiling():  # or the next block is compiled anew, for what is kept then
                self._shares[self.num_own, heads] = found
        return found

    def _share_of(self, heads: tuple[int, int] | None) -> _Share:
        """Return this rank's share of attention with so many `heads` of queries and of keys."""
        size, index = self.group.size, self.group.index
        if heads is not None and divides_heads(*heads, size):
            ranks = tuple(range(size))
            return _Share(size, index, (), ranks, ranks, has_all_tokens=True, copies=key_copies(heads[1], size))
        shares = ContextShares(1, size) if heads is None else context_shares(*heads, size)
        members: tuple[int, ...] = ()
        of_heads = [0] * size
        for each in map(shares.members, range(shares.tokens)):
            members = each if index in each else members
            for part, rank in enumerate(each):
                of_heads[rank] = part
        rows: list[tuple[int, int]] = []
        for rank in members:
            start = rows.pop()[0] if rows and rows[-1][1] == rank * self.num_own else rank * self.num_own
            rows.append((start, (rank + 1) * self.num_own))
        of_tokens = tuple(of_heads[rank] if rank in members else None for rank in range(size))
        has_all = None not in of_tokens
        return _Share(
            shares.heads,
            of_heads[index],
            () if has_all else tuple(rows),
            of_tokens,
            tuple(of_heads),
            has_all_tokens=has_all,
            copies=1 if heads is None else key_copies(heads[1], shares.heads),
        )

    def _to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: _Share
    ) -> Sequence[torch.Tensor]:
        """Return queries of the share's tokens, and keys and values of all, of its heads; together where they can."""
        if share.copies > 1:
            key, value = (one.repeat_interleave(share.copies, _HEADS) for one in (key, value))
        travels: list[tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]] = [
            ((query, key, value), share.of_tokens)
        ]
        if not share.has_all_tokens:
            travels = [((query,), share.of_tokens), ((key, value), share.of_heads)]
        found: list[torch.Tensor] = []
        fit_together = query.ndim == 4 and key.shape[-1] == value.shape[-1]
        for own, parts in travels:
            if not fit_together:
                found += [_exchange(one, parts, _HEADS, one.ndim + _TOKENS, self.group) for one in own]
                continue
            chunks, sizes = [], []
            for one in own:
                chunks.append(one.chunk(share.num_parts, _HEADS))
                sizes.append(one.shape[_HEADS] // share.num_parts)
            joined = torch.cat([*chain.from_iterable(zip(*chunks, strict=True))], _HEADS)  # of each part those of all
            found += torch.split(_exchange(joined, parts, _HEADS, 2, self.group), sizes, _HEADS)
        return found

    def _own_option(self, option: torch.Tensor, num_heads: int, share: _Share) -> Any:
        """Return what else attention is given as this rank has it: of its heads, or for its pairs of tokens."""
        if option.ndim == 1:
            return option.chunk(share.num_parts)[share.part] if option.shape[0] == num_heads else option
        total = self.group.size * self.num_own
        return self._own_mask(option, share) if option.shape[_TOKENS:] == (total, total) else option

    def _own_mask(self, mask: Any, share: _Share) -> Any:
        """Return what this rank's queries may attend to among the keys of all tokens."""
        if not isinstance(mask, torch.Tensor):
            return mask
        if mask.ndim == 4 and mask.shape[_HEADS] > 1:
            mask = mask.chunk(share.num_parts, _HEADS)[share.part]
        if share.has_all_tokens or mask.shape[_TOKENS] != self.group.size * self.num_own:
            return mask
        return torch.cat([mask.narrow(_TOKENS, start, end - start) for start, end in share.rows], _TOKENS)


def _on_parts() -> list[RunOnParts]:
    """Return what rewrites calls of the code that runs for the parts that this rank of `tp` has."""
    if torch.compiler.is_compiling():  # code without such calls
        return []
    return [mode for mode in function_modes() if isinstance(mode, RunOnParts)]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any], rows: Sequence[Any]
) -> torch.Tensor:
    """Return torch's attention, a causal one where queries are of some `rows` of the tokens.

    Each run of rows attends to the keys before its end, which needs no mask in memory.
    """
    if not rows:
        return SDPA(query, key, value, **options)
    options = options | {"is_causal": False}
    lengths = [end - start for start, end in rows]
    attended = []
    for (_, end), length, part in zip(rows, lengths, torch.split(query, lengths, _TOKENS), strict=True):
        options["attn_mask"] = EarlierKeys(length, end)
        keys, values = key.narrow(_TOKENS, 0, end), value.narrow(_TOKENS, 0, end)
        attended.append(SDPA(part, keys, values, **options))
    return torch.cat(attended, _TOKENS)


class EarlierKeys:
    """A causal mask for queries of the last `num_queries` of `num_keys` tokens, which flash attention needs not hold.

    `torch.nn.attention.bias.causal_lower_right` is such a mask, and a tensor that cannot be made where a mode has
    tensors of its own.
    """

    def __init__(self, num_queries: int, num_keys: int) -> None:
        self.num_queries = num_queries
        self.num_keys = num_keys

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attend: this is what torch calls for a mask that is no tensor."""
        (query, key, value), options = args, dict(kwargs)
        mask, is_causal = options.pop("attn_mask"), options.pop("is_causal", False)
        assert func is SDPA
        assert not is_causal
        dropout, scale, groups = options.get("dropout_p", 0.0), options.get("scale"), options.get("enable_gqa", False)
        # The operator takes head sizes of whole 16 bytes, and its is_causal lets the last query attend to the last key.
        if not query.shape[-1] % 8 and can_use_flash_attention(
            SDPAParams(query, key, value, None, dropout, False, groups)
        ):
            return FLASH_ATTENTION(query, key, value, dropout, True, False, scale=scale)[0]
        rows = [(mask.num_keys - mask.num_queries, mask.num_keys)]
        return func(query, key, value, attn_mask=_seen(rows, mask.num_keys, query.device), **options)


def _seen(rows: Sequence[tuple[int, int]], num_keys: int, device: torch.device) -> torch.Tensor:
    """Return which of the keys each query of `rows` attends to."""
    places = torch.arange(num_keys, device=device)
    return torch.cat([places[start:end, None] >= places for start, end in rows])


def _causal_mask(rows: Sequence[tuple[int, int]], query: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return a mask to add to the scores of queries of `rows`."""
    hidden = ~_seen(rows, num_keys, query.device)
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
    return mask.masked_fill(hidden, torch.finfo(query.dtype).min)[None, None]


def _written_out(module: nn.Module) -> Callable[..., Any]:
    """Return the eager attention of the file that `module` is from."""
    found: Callable[..., Any] = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    return found


class _Exchange(torch.autograd.Function):
    """All-to-all: a rank hands out its parts along one dimension, and gets what the others have along another.

    A part may go to several ranks: its gradient is the sum of theirs.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, parts: tuple[int | None, ...], scatter: int, gather: int, group: TensorGroup
    ) -> torch.Tensor:
        ctx.parts, ctx.scatter, ctx.gather, ctx.group = parts, scatter, gather, group
        known: Sequence[Any] = parts if None not in parts else [part for part in parts if part is not None]
        chunks = local.chunk(max(known) + 1, dim=scatter)
        return torch.cat(_all_to_all(list(map(chunks.__getitem__, known)), parts, group), dim=gather)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        known: Sequence[Any] = ctx.parts if None not in ctx.parts else [one for one in ctx.parts if one is not None]
        received = _all_to_all(gradients[0].chunk(len(known), dim=ctx.gather), ctx.parts, ctx.group)
        if len(known) == len(set(known)):  # in the order of the ranks
            return torch.cat(received, dim=ctx.scatter), None, None, None, None
        sums: dict[int, torch.Tensor] = {}
        for part, one in zip(known, received, strict=True):
            sums[part] = sums[part].add_(one) if part in sums else one
        return torch.cat([sums[part] for part in sorted(sums)], dim=ctx.scatter), None, None, None, None


def _all_to_all(
    sent: Sequence[torch.Tensor], parts: tuple[int | None, ...], group: TensorGroup
) -> tuple[torch.Tensor, ...]:
    """Return what the ranks that have one of `parts` sent to this one, each of which gets one of `sent`."""
    if len(sent) == 1:
        return tuple(sent)
    packed = torch.stack(tuple(sent))
    received = torch.empty_like(packed)
    if group.handle is not None:
        sizes = None if None not in parts else [int(part is not None) for part in parts]
        dist.all_to_all_single(received, packed, sizes, sizes, group=group.handle)
    return received.unbind(0)


_exchange: Callable[..., torch.Tensor] = _Exchange.apply
"""Returns what the ranks that have one of `parts` send, along `gather`; each is sent its part along `scatter`."""
