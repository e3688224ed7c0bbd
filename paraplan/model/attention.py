"""Attention over shared pieces: projections and the attention core by kernel."""

from __future__ import annotations

from typing import Literal, NamedTuple

from paraplan.model.norm import NormKind, norm
from paraplan.model.part import KeptBy, Part, kept, linear
from paraplan.model.saved_role import SavedRole
from paraplan.model.spec import Attention, AttentionKernel, ElementType

FUSED_KERNELS: tuple[AttentionKernel, ...] = ("flash", "sdpa")
EAGER: tuple[AttentionKernel, ...] = ("eager",)
LARGEST_FLASH_HEAD = 256  # torch's own rule (ATen/native/transformers/cuda/sdp_utils.cpp)

QkNorm = Literal["none", "per_head", "all_heads", "weight_per_head"]
"""per_head: one weight of head_dim features for all heads; all_heads: a norm over all heads' features together;
weight_per_head: each head normalised alone and scaled by its own weights."""


Shares = Literal["nothing", "values", "keys_and_values"]
"""The projections that an attention takes from another one."""


class Heads(NamedTuple):
    """Shapes of one attention. `hidden` is the width of its input and output."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_width(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all key heads, as many as of all value heads."""
        return self.num_kv_heads * self.head_dim

    def attention(self, *, is_causal: bool = True, window: int | None = None) -> Attention:
        """Return the record of the attention core."""
        return Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            qk_head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            is_causal=is_causal,
            window=window,
        )


class AttentionStyle(NamedTuple):
    """How a family writes its attention down.

    `projections` names query, key, value and output, or the one fused projection and the output.
    `rotary` says that rotary positions make new query and key tensors.
    How transformers runs it, under eager attention: `softmax_in_fp32`, probabilities computed in fp32 and cast back;
    `has_sinks`, scores joined with a parameter, whose type probabilities then have (gpt-oss);
    `products_in_fp32`, query and key cast to fp32; `is_capped`, scores squeezed by tanh (Gemma 2). Under fused kernels:
    `copies_output`, the output laid out anew for its projection because the query was made by a concatenation;
    `position_bias`, a bias for each head and pair of tokens (T5); `masks_each_layer`, a mask made anew by every layer
    (Falcon); `is_gated`, an output scaled by a gate that the queries' projection makes beside them (Qwen3-Next);
    `splits_by_copy`, keys and values copied out of a fused projection, repeated for every query head where
    `repeats_kv` says so; `is_windowed`, a window shorter than the sequence, which torch's attention takes as a mask.
    `shares` says what has no projection of its own: values, which the keys' projection makes too, or both, which are
    those of a layer before. `has_head_gates` scales each head's output by a gate of its own (Ling 3). `key_bias` is
    False where keys alone have no bias. `norms_values` puts a norm without weights behind values.
    `joins_outputs` attends picture by picture, and joins what torch's own attention returns for each.
    """

    projections: tuple[str, ...]
    qkv_bias: bool = False
    key_bias: bool = True
    output_bias: bool = False
    input_first: bool = False
    rotary: bool = True
    qk_norm: QkNorm = "none"
    qk_norm_kind: NormKind = "rms"
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    softmax_in_fp32: bool = True
    has_sinks: bool = False
    products_in_fp32: bool = False
    is_capped: bool = False
    copies_output: bool = False
    position_bias: bool = False
    masks_each_layer: bool = False
    splits_by_copy: bool = False
    repeats_kv: bool = False
    is_windowed: bool = False
    is_gated: bool = False
    has_head_gates: bool = False
    shares: Shares = "nothing"
    norms_values: bool = False
    joins_outputs: bool = False
    dropout: float = 0.0

    @property
    def readers(self) -> tuple[str, ...]:
        """The projections that read the attention's input."""
        own = {"nothing": 3, "values": 2, "keys_and_values": 1}[self.shares]
        return self.projections[:-1][:own]

    @property
    def is_fused(self) -> bool:
        """Whether one projection makes query, key and value."""
        return len(self.projections) == 2


def attention(heads: Heads, style: AttentionStyle, *, keeps_input: bool = True) -> Part:
    """Return projections, query and key norms and the core of a self-attention.

    `keeps_input` is False where another piece of the block keeps the same input (parallel residual).
    """
    part, readers = Part(), style.readers
    if keeps_input:
        part += kept("attention_input", heads.hidden, split="sequence", num_readers=len(readers), weights_of=readers)
    part += _projections(heads, style)
    part += _qk_norms(heads, style)
    part += attention_core(heads.attention(), style)
    if style.is_gated:
        part += _output_gate(heads.query_width, style.projections[-1])
    if style.is_fused and style.rotary and not style.splits_by_copy:
        rest = heads.query_width + heads.kv_width
        # The values are a view of the fused projection, except where they are repeated.
        repeats = style.is_windowed and 1 < heads.num_kv_heads < heads.num_heads
        views: tuple[AttentionKernel, ...] = ("flash",) if repeats else FUSED_KERNELS
        views += EAGER if style.joins_outputs else ()
        part += kept("before_rotation", rest, split="tensor", kernels=views, by="modules")
    return part + linear(
        style.projections[-1],
        heads.query_width,
        heads.hidden,
        bias=style.output_bias,
        split="row",
        input_first=style.input_first,
    )


def attention_core(core: Attention, style: AttentionStyle) -> Part:
    """Return what softmax(QK^T)V keeps under each kernel, its output included (the output projection's input).

    Flash attention keeps query, key, value, output and one fp32 number a head and token (Dao et al. 2022, section 3.1).
    Eager attention keeps key and value repeated for every query head, the probabilities and, with dropout, its mask and
    the dropped probabilities: `5as^2b` in half precision (Korthikanti et al. 2022, section 4.1).
    """
    heads, query_width = core.num_heads, core.num_heads * core.qk_head_dim
    output_width = heads * core.v_head_dim
    part = Part()
    for kernels, count in _kv_heads_by_kernel(core, style):
        fp32 = style.products_in_fp32 and kernels == EAGER
        is_kept_before = style.shares == "keys_and_values" and count == core.num_kv_heads
        rotated: tuple[tuple[SavedRole, int], ...] = ("query", query_width), ("key", count * core.qk_head_dim)
        for role, width in rotated[: 1 if is_kept_before else 2]:
            if fp32:
                part += kept(
                    role,
                    width,
                    element_type="fp32",
                    split="tensor",
                    kernels=kernels,
                    is_turned=style.rotary,
                    by="modules",
                )
            by: KeptBy = "fused" if fp32 else "both"
            part += kept(role, width, split="tensor", kernels=kernels, is_turned=style.rotary, by=by)
        if not is_kept_before:
            part += kept("value", count * core.v_head_dim, split="tensor", kernels=kernels)
    reader = style.projections[-1:]  # fused kernels read their own output too
    part += kept("attention_output", output_width, split="tensor", kernels=FUSED_KERNELS)
    if not style.is_gated:
        reads_it = None if style.has_head_gates else reader
        part += kept("attention_output", output_width, split="tensor", kernels=EAGER, weights_of=reads_it)
    if style.copies_output or style.joins_outputs:
        copying: tuple[AttentionKernel, ...] = ("flash",) if style.is_windowed else FUSED_KERNELS
        copying = copying if style.copies_output else ("sdpa",)
        part += kept("projection_input", output_width, split="tensor", kernels=copying, weights_of=reader, by="modules")
    part += kept(
        "softmax_statistics",
        heads,
        element_type="fp32",
        split="tensor",
        kernels=FUSED_KERNELS,
        in_attention_core=True,
    )
    if style.position_bias:
        part += kept(
            "position_bias",
            pairs=heads,
            split="tensor",
            kernels=("sdpa",),
            in_attention_core=True,
            is_shared_by_batch=True,
        )
    if style.masks_each_layer or style.is_windowed:
        part += kept("attention_mask", pairs=1, kernels=("sdpa",), in_attention_core=True, by="modules")
    return part + _probabilities(heads, style)


def _output_gate(width: int, reader: str) -> Part:
    """Return what scaling the output by a gate keeps: the output by token, the gate's sigmoid, and the product.

    Fused kernels read the output as attention keeps it.
    """
    part = kept("output_by_token", width, split="tensor", by="modules") + kept("output_gate", width, split="tensor")
    return part + kept("gated_output", width, split="tensor", weights_of=(reader,))


def _kv_heads_by_kernel(core: Attention, style: AttentionStyle) -> list[tuple[tuple[AttentionKernel, ...], int]]:
    """Return how many heads of keys and values are kept under each kernel."""
    fused = core.num_heads if style.repeats_kv else core.num_kv_heads
    if style.is_windowed:  # with a mask transformers repeats the heads, a single one as a view that takes no memory
        repeated = 1 if core.num_kv_heads == 1 else core.num_heads
        return [(("flash",), fused), (("sdpa",), repeated), (EAGER, core.num_heads)]
    return [(FUSED_KERNELS, fused), (EAGER, core.num_heads)]


def _score(
    role: SavedRole,
    num_heads: int,
    *,
    by: KeptBy = "both",
    element_type: ElementType = "activation",
    is_copy: bool = False,
) -> Part:
    return kept(
        role,
        pairs=num_heads,
        element_type=element_type,
        split="tensor",
        kernels=EAGER,
        in_attention_core=True,
        absent_in_fp32=is_copy,
        by=by,
    )


def _probabilities(num_heads: int, style: AttentionStyle) -> Part:
    part = _score("scores", num_heads) if style.is_capped else Part()
    if not style.softmax_in_fp32:
        part += _score("probabilities", num_heads, element_type="weights" if style.has_sinks else "promoted")
        if style.dropout == 0:
            copy: ElementType = "weights_copy" if style.has_sinks else "promoted_copy"
            part += _score("probabilities_copy", num_heads, by="modules", element_type=copy)
    else:
        part += _score("probabilities", num_heads, by="modules", element_type="fp32")
        part += _score("probabilities", num_heads, by="fused")
        if style.dropout == 0:
            part += _score("probabilities_copy", num_heads, by="modules", is_copy=True)
    if style.dropout == 0:
        return part
    part += _score("attention_dropout_mask", num_heads, element_type="mask")
    return part + _score("probabilities_copy", num_heads)


def _projections(heads: Heads, style: AttentionStyle) -> Part:
    def column(name: str, width: int) -> Part:
        bias = style.qkv_bias and (style.key_bias or style.is_fused or name != style.projections[1])
        return linear(name, heads.hidden, width, bias=bias, split="column", input_first=style.input_first)

    if style.is_fused:
        return column(style.projections[0], heads.query_width + 2 * heads.kv_width)
    query, *others = style.readers
    part = column(query, (2 if style.is_gated else 1) * heads.query_width)
    for name in others:
        part += column(name, heads.kv_width)
    return part


def _qk_norms(heads: Heads, style: AttentionStyle) -> Part:
    part = Part()
    if style.qk_norm == "none":
        return part
    own = 1 if style.shares == "keys_and_values" else 2
    if style.norms_values and own == 2:
        kind: NormKind = "rms_without_weights"
        part += norm("v_norm", kind, heads.head_dim, groups=heads.num_kv_heads, is_residual=False, split="tensor")
    counts = (heads.num_heads, heads.num_kv_heads)
    for name, count in zip(style.qk_norm_names[:own], counts[:own], strict=True):
        if style.qk_norm == "all_heads":
            part += norm(name, style.qk_norm_kind, count * heads.head_dim, is_residual=False, split="tensor")
        elif style.qk_norm == "per_head":
            part += norm(name, style.qk_norm_kind, heads.head_dim, groups=count, is_residual=False, split="tensor")
        else:
            shape = (count, heads.head_dim)
            part += norm(
                name,
                style.qk_norm_kind,
                heads.head_dim,
                groups=count,
                shape=shape,
                is_residual=False,
                split="tensor",
            )
    return part
