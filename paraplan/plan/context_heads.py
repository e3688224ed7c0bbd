"""How context parallelism exchanges tokens for attention heads: one rule for runtime, estimate and search."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

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


def _attentions(model: ModelSpec) -> Iterator[tuple[Attention | None, int | None]]:
    for run in model.runs:
        yield run.block.attention, run.block.tp_limit
        if run.block.cross_attention is not None:
            yield run.block.cross_attention, run.block.tp_limit
