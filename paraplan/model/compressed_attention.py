"""Attention over a window and over compressed keys (DeepSeek-AI 2026, DeepSeek-V4, section 2.3).

One head of keys, which are the values too, for all queries. A compressor makes one more of every so many tokens, by
weights of each feature; where these are few, an indexer chooses among them. transformers' class has eager attention
alone, which computes all scores and masks what is outside.
"""

from __future__ import annotations

from typing import NamedTuple

from paraplan.model.attention import EAGER, FUSED_KERNELS
from paraplan.model.norm import NormKind, norm
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.spec import Attention

_NORM: NormKind = "rms_in_fp32"
_TABLES = 6
"""Tables of cosines and sines: of queries, keys and outputs."""


class CompressedHeads(NamedTuple):
    """Shapes of the attention of all layers. `groups` of heads have an output projection of rank `output_rank` each."""

    hidden: int
    num_heads: int
    head_dim: int
    query_rank: int
    rotary_dim: int
    groups: int
    output_rank: int
    window: int

    @property
    def width(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim


class Compression(NamedTuple):
    """The compression of a kind of layer: a compressed key for each `rate` tokens, None for layers without.

    `indexer` are its heads, and their features. Where there is one, windows overlap: a key is made of two.
    """

    rate: int | None = None
    indexer: tuple[int, int] | None = None

    @property
    def series(self) -> int:
        """Features that a token gives for one of a compressed key."""
        return 1 if self.indexer is None else 2

    @property
    def share(self) -> float:
        """Compressed keys for each token."""
        return 0.0 if self.rate is None else 1 / self.rate


def attention_cores(heads: CompressedHeads, kind: Compression) -> dict[str, Attention | None]:
    """Return the records of attention over the window, over compressed keys, and of the indexer's scores."""

    def core(size: int, count: int, *, values: int, window: int | None, rate: int = 1) -> Attention:
        return Attention(
            num_heads=count, num_kv_heads=1, qk_head_dim=size, v_head_dim=values, window=window, tokens_per_key=rate
        )

    size, rate = heads.head_dim, kind.rate
    return {
        "attention": core(size, heads.num_heads, values=size, window=heads.window),
        "cross_attention": core(size, heads.num_heads, values=size, window=None, rate=rate) if rate else None,
        "index_scores": core(kind.indexer[1], kind.indexer[0], values=0, window=None, rate=rate)
        if rate and kind.indexer
        else None,
    }


def compressed_attention(heads: CompressedHeads, kind: Compression) -> Part:
    """Return projections, norms, compressor and core."""
    width, size, owner = heads.width, heads.head_dim, "self_attn"
    compressor = ("compressor.kv_proj", "compressor.gate_proj") if kind.rate else ()
    scorer = ("compressor.indexer.scorer.weights_proj",) if kind.indexer else ()
    readers = tuple(f"{owner}.{name}" for name in ("q_a_proj", "kv_proj", *compressor, *scorer))
    part = kept("attention_input", heads.hidden, split="sequence", num_readers=len(readers), weights_of=readers)
    part += linear(f"{owner}.q_a_proj", heads.hidden, heads.query_rank, bias=False)
    part += norm(f"{owner}.q_a_norm", _NORM, heads.query_rank, is_residual=False)
    part += kept("query_latent", heads.query_rank, split="sequence", weights_of=(f"{owner}.q_b_proj",))
    part += linear(f"{owner}.q_b_proj", heads.query_rank, width, bias=False, split="column")
    part += _unweighted_norm(heads)
    part += linear(f"{owner}.kv_proj", heads.hidden, size, bias=False)
    part += norm(f"{owner}.kv_norm", _NORM, size, is_residual=False)
    part += _compressor(heads, kind) + _core(heads, kind)
    part += kept("rotary_tables", _TABLES * heads.rotary_dim, is_shared_by_batch=True, by="modules")
    part += weight(f"{owner}.sinks", heads.num_heads, tp_dim=0)
    ranks = heads.groups * heads.output_rank
    part += kept("projection_input", width, split="tensor", weights_of=(f"{owner}.o_a_proj",))
    part += linear(f"{owner}.o_a_proj", width // heads.groups, ranks, bias=False, split="column")
    part += kept("gate_inner", ranks, split="tensor", weights_of=(f"{owner}.o_b_proj",))
    return part + linear(f"{owner}.o_b_proj", ranks, heads.hidden, bias=False, split="row")


def _unweighted_norm(heads: CompressedHeads) -> Part:
    """Return the norm of queries, head by head, without weights: their root is cast before they are scaled."""
    part = kept("norm_input", heads.width, split="tensor")
    part += kept("norm_input_in_fp32", heads.width, element_type="fp32", split="tensor", is_powered=True, by="modules")
    part += kept("norm_statistics", heads.num_heads, split="tensor", by="modules")
    return part + kept("norm_statistics", heads.num_heads, element_type="fp32", split="tensor")


def _compressor(heads: CompressedHeads, kind: Compression) -> Part:
    if kind.rate is None:
        return Part()
    part = _compressed("self_attn.compressor", heads.hidden, heads.head_dim, kind)
    width = kind.series * heads.head_dim
    part += kept("key_value_latent", width) + kept("key_value_latent", width, by="modules")  # and the weights, cast
    part += kept("stream_weights", width, element_type="fp32", by="modules")
    part += kept("norm_input_in_fp32", 2 * heads.head_dim * kind.share, element_type="fp32", by="modules")
    if kind.indexer is None:
        return part
    count, size = kind.indexer
    name = "self_attn.compressor.indexer"
    part += _compressed(name, heads.hidden, size, kind)
    part += linear(f"{name}.q_b_proj", heads.query_rank, count * size, bias=False)
    return part + linear(f"{name}.scorer.weights_proj", heads.hidden, count, bias=False)


def _compressed(name: str, hidden: int, size: int, kind: Compression) -> Part:
    width = kind.series * size
    part = linear(f"{name}.kv_proj", hidden, width, bias=False) + linear(f"{name}.gate_proj", hidden, width, bias=False)
    return part + weight(f"{name}.position_bias", kind.rate or 1, width) + weight(f"{name}.kv_norm.weight", size)


def _core(heads: CompressedHeads, kind: Compression) -> Part:
    """Return what attention keeps: under eager kernels every head's own keys and values, and all probabilities.

    Sinks stay in fp32 whatever the weights have, and so do probabilities that are joined with them. Fused kernels keep
    the one head, their output, and a number for each head.
    """
    keys, count = heads.head_dim * (1 + kind.share), heads.num_heads
    part = kept("query", heads.width, split="tensor", is_turned=True)
    part += kept("key", keys, kernels=FUSED_KERNELS, is_turned=True)
    part += kept("attention_output", heads.width, split="tensor", kernels=FUSED_KERNELS)
    part += kept(
        "softmax_statistics", count, element_type="fp32", split="tensor", kernels=FUSED_KERNELS, in_attention_core=True
    )
    part += kept("key", count * keys, split="tensor", kernels=EAGER, is_turned=True)
    part += kept("value", count * keys, split="tensor", kernels=EAGER)
    part += kept(  # which score was the largest, in 64 bits
        "softmax_statistics", 2 * count, element_type="fp32", split="tensor", kernels=EAGER, in_attention_core=True
    )
    pairs = count * (1 + kind.share)
    part += kept(
        "probabilities", count, pairs=pairs, element_type="fp32", split="tensor", kernels=EAGER, in_attention_core=True
    )
    return part + kept(
        "probabilities_copy", pairs=pairs, split="tensor", kernels=EAGER, in_attention_core=True, absent_in_fp32=True
    )
