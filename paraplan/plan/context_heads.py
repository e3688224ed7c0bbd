"""How context parallelism shares out attention, by heads and by tokens: one rule for runtime, estimate and search."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from paraplan.model.spec import Attention, ModelSpec


def key_copies(key_heads: int, num_ranks: int) -> int:
    """Return how many times heads of keys and values are repeated so that each of `num_ranks` gets as many.

    1 where the ranks divide them; else several ranks attend to the same keys.
    """
    return num_ranks // gcd(key_heads, num_ranks)


def divides_heads(query_heads: int, key_heads: int, num_ranks: int) -> bool:
    """Return whether `num_ranks` can exchange tokens for these heads, those of keys repeated where they must be."""
    shared = key_heads * key_copies(key_heads, num_ranks)
    return query_heads % num_ranks == 0 and query_heads % shared == 0


class ContextShares(NamedTuple):
    """How the ranks of `cp` share out an attention: `heads` parts of its heads, each of which `tokens` ranks have.

    A rank attends with the queries of its share of the tokens, and those of its part of the heads, to all keys of
    these heads: tokens are exchanged for heads, and keys and values gathered.
    """

    heads: int
    tokens: int

    def members(self, share: int) -> tuple[int, ...]:
        """Return the ranks whose tokens are those of `share`: early and late ones alike, and one of the middle.

        Under a causal mask the shares then have about as many pairs of queries and keys.
        """
        half, middle = divmod(self.heads, 2)
        end, between = self.heads * self.tokens, half * self.tokens
        early = range(share * half, (share + 1) * half)
        late = range(end - (share + 1) * half, end - share * half)
        return (*early, *range(between + share, between + share + middle), *late)

    @property
    def causal_load(self) -> float:
        """The pairs of queries and keys of the rank with the most of them under a causal mask, over the mean."""
        return 1.0 + (self.heads % 2) * (self.tokens - 1) / (self.heads**2 * self.tokens)


def context_shares(query_heads: int, key_heads: int, num_ranks: int) -> ContextShares:
    """Return the shares of an attention for `num_ranks`: as many parts of its heads as divide them and the ranks."""
    parts = (
        size
        for size in range(num_ranks, 0, -1)
        if num_ranks % size == 0 and divides_heads(query_heads, key_heads, size)
    )
    heads = next(parts)
    return ContextShares(heads, num_ranks // heads)


def context_reason(model: ModelSpec, *, tp: int, cp: int) -> str | None:
    """Return why the attention of `model`, its heads over `tp` already, cannot go over `cp` ranks; None where it can.

    A degree of tp that does not divide the heads is not looked at.
    """
    if cp == 1:
        return None
    for attention, limit in _attentions(model):
        if attention is None:
            if limit is not None and limit % cp:
                return f"cp={cp}: nothing is known of the heads of {model.name}"
        elif not divides_heads(attention.num_heads // tp, max(1, attention.num_kv_heads // tp), cp):
            kinds = f"{attention.num_heads} attention and {attention.num_kv_heads} key-value heads"
            beside = f" beside tp={tp}" if tp > 1 else ""
            return f"cp={cp}{beside}, which exchanges tokens for heads, does not divide the {kinds} of {model.name}"
    return None


def mask_reason(model: ModelSpec, seq_length: int) -> str | None:
    """Return how a block attends otherwise than to all tokens before its own, None where all do, as far as is known."""
    for run in model.runs:
        attention = run.block.attention
        if attention is None and not run.block.is_traced:
            return "has layers without softmax attention"
        if attention is not None and not attention.is_causal:
            return "attends to tokens behind too"
        if attention is not None and attention.window is not None and attention.window < seq_length:
            return f"attends in windows of {attention.window} tokens"
    return None


def _attentions(model: ModelSpec) -> Iterator[tuple[Attention | None, int | None]]:
    for run in model.runs:
        yield run.block.attention, run.block.tp_limit
        if run.block.cross_attention is not None:
            yield run.block.cross_attention, run.block.tp_limit
