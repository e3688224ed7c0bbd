"""Multi-head latent attention (MLA), its indexer, and gates of its heads."""

from __future__ import annotations

from typing import NamedTuple

from paraplan.model.attention import FUSED_KERNELS, LARGEST_FLASH_HEAD, AttentionStyle, attention_core
from paraplan.model.norm import norm
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.spec import Attention


class Indexer(NamedTuple):
    """The chooser of the `top_k` tokens that a query attends to (DeepSeek-AI 2025, DeepSeek-V3.2, section 2.1).

    Where `is_shared`, a layer takes the choice of the layer before it and has none of its own.
    """

    num_heads: int
    head_dim: int
    top_k: int
    is_shared: bool = False

    def scores(self) -> Attention:
        """Return the record of its scores: one key head for all, and a sum over heads in place of values."""
        return Attention(num_heads=self.num_heads, num_kv_heads=1, qk_head_dim=self.head_dim, v_head_dim=1)


class LatentHeads(NamedTuple):
    """Shapes of multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    `query_rank` is None where queries are projected in one step.
    """

    hidden: int
    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Features of one query or key head: the part without and the part with rotary positions."""
        return self.nope_head_dim + self.rope_head_dim

    def attention(self) -> Attention:
        """Return the record of the attention core: keys and values are expanded to all heads."""
        return Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            qk_head_dim=self.qk_head_dim,
            v_head_dim=self.v_head_dim,
        )


def latent_attention(heads: LatentHeads, style: AttentionStyle) -> Part:
    """Return projections through low ranks and the core. Tensor parallelism leaves the low-rank projections whole."""
    first = "self_attn.q_proj" if heads.query_rank is None else "self_attn.q_a_proj"
    readers = (first, "self_attn.kv_a_proj_with_mqa", *(("self_attn.g_proj",) if style.has_head_gates else ()))
    part = kept("attention_input", heads.hidden, split="sequence", num_readers=len(readers), weights_of=readers)
    query_width = heads.num_heads * heads.qk_head_dim
    if heads.query_rank is None:
        part += linear("self_attn.q_proj", heads.hidden, query_width, bias=False, split="column")
    else:
        part += linear("self_attn.q_a_proj", heads.hidden, heads.query_rank, bias=style.output_bias)
        part += norm("self_attn.q_a_layernorm", "rms", heads.query_rank, is_residual=False)
        part += kept("query_latent", heads.query_rank, split="sequence", weights_of=("self_attn.q_b_proj",))
        part += linear("self_attn.q_b_proj", heads.query_rank, query_width, bias=False, split="column")
    part += linear(
        "self_attn.kv_a_proj_with_mqa", heads.hidden, heads.kv_rank + heads.rope_head_dim, bias=style.output_bias
    )
    part += norm("self_attn.kv_a_layernorm", "rms", heads.kv_rank, is_residual=False)
    part += kept("key_value_latent", heads.kv_rank, split="sequence", weights_of=("self_attn.kv_b_proj",))
    expanded = heads.num_heads * (heads.nope_head_dim + heads.v_head_dim)
    part += linear("self_attn.kv_b_proj", heads.kv_rank, expanded, bias=False, split="column")
    part += attention_core(heads.attention(), style)
    # The values are a view of the expansion, so that the keys' part of it stays too.
    nope_width = heads.num_heads * heads.nope_head_dim
    part += kept("before_rotation", nope_width, split="tensor", kernels=FUSED_KERNELS, by="modules")
    if style.has_head_gates:
        part += _head_gates(heads)
    elif heads.qk_head_dim == heads.v_head_dim <= LARGEST_FLASH_HEAD and not style.masks_each_layer:
        # Flash attention gives its output the order of the queries, which were put together head by head: the output
        # projection reads a copy in the order of tokens. The other kernel, for unequal sizes and masks, has that order.
        width = heads.num_heads * heads.v_head_dim
        part += kept(
            "output_by_token",
            width,
            split="tensor",
            kernels=FUSED_KERNELS,
            weights_of=("self_attn.o_proj",),
            by="modules",
        )
    return part + linear(
        "self_attn.o_proj", heads.num_heads * heads.v_head_dim, heads.hidden, bias=style.output_bias, split="row"
    )


def _head_gates(heads: LatentHeads) -> Part:
    """Return the gate of each head: its projection, a sigmoid in fp32, and the output that it scales."""
    part = linear("self_attn.g_proj", heads.hidden, heads.num_heads, bias=False, split="column")
    part += kept("output_gate", heads.num_heads, element_type="fp32", split="tensor", by="modules")
    part += kept("output_gate", heads.num_heads, split="tensor")
    width = heads.num_heads * heads.v_head_dim
    return part + kept("gated_output", width, split="tensor", weights_of=("self_attn.o_proj",))


def index_projections(heads: LatentHeads, indexer: Indexer) -> Part:
    """Return the projections of an indexer. transformers runs it without gradients, so that nothing is kept.

    Tensor parallelism leaves it whole.
    """
    assert heads.query_rank is not None  # it reads the queries' latent
    part = linear("self_attn.indexer.wq_b", heads.query_rank, indexer.num_heads * indexer.head_dim, bias=False)
    part += linear("self_attn.indexer.wk", heads.hidden, indexer.head_dim, bias=False)
    part += weight("self_attn.indexer.k_norm.weight", indexer.head_dim)
    part += weight("self_attn.indexer.k_norm.bias", indexer.head_dim)
    return part + linear("self_attn.indexer.weights_proj", heads.hidden, indexer.num_heads, bias=False)
