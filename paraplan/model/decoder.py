"""Decoder-only transformers: one description for every family, and the `ModelSpec` built from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from math import gcd
from typing import Literal, NamedTuple

from paraplan.model.attention import AttentionStyle, Heads, attention
from paraplan.model.config_file import ModelConfig
from paraplan.model.heads import HeadStyle, read_head
from paraplan.model.latent_attention import Indexer, LatentHeads, index_projections, latent_attention
from paraplan.model.norm import NormKind, norm, norm_output
from paraplan.model.part import Part, dropout, kept, linear, weight
from paraplan.model.spec import Attention, BlockRun, BlockSpec, ModelSpec

ResidualLayout = Literal["sequential", "parallel", "parallel_two_norms"]
"""sequential: attention, then MLP. parallel: both read one norm's output. parallel_two_norms: both read the block's
input, each through a norm of its own."""


class Mixer(NamedTuple):
    """A mixer of tokens without attention, and the part of it that tensor parallelism divides."""

    part: Part
    tp_limit: int


class LayerKind(NamedTuple):
    """A kind of layer: its attention window, its feed-forward part, rotary positions.

    `indexer` chooses the tokens that a layer attends to. `mixer` stands in the place of attention, `heads` in that of
    the model's. `attention` is how the layer writes its attention down where that is not how all do.
    """

    feed_forward: Part
    window: int | None = None
    name: str = "transformer"
    is_rotary: bool = True
    indexer: Indexer | None = None
    mixer: Mixer | None = None
    heads: Heads | None = None
    attention: AttentionStyle | None = None


class EmbeddingStyle(NamedTuple):
    """Token embedding of `width` features, learned positions if any, and what follows before the first block."""

    name: str
    width: int
    positions: tuple[str, int] | None = None
    norm: tuple[str, NormKind] | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class DecoderShape:
    """One decoder-only model, every choice resolved from its config.

    `norms` names the norms of a block in the order of its forward pass. `residual_dropouts` are the rates after
    attention and after the feed-forward part. `shared` is kept once for all blocks; it stands with the embedding, and
    under pipeline parallelism every stage makes its own.
    """

    hidden: int
    vocab_size: int
    max_seq_length: int | None
    heads: Heads | LatentHeads
    attention: AttentionStyle
    layers: tuple[LayerKind, ...]
    norm_kind: NormKind
    norms: tuple[str, ...]
    embedding: EmbeddingStyle
    head: HeadStyle
    residual: ResidualLayout = "sequential"
    residual_dropouts: tuple[float, float] = (0.0, 0.0)
    shared: Part = field(default_factory=Part)
    residual_streams: int = 1


def build_decoder(config: ModelConfig, shape: DecoderShape) -> ModelSpec:
    """Return the model that `shape` describes. Equal layers in a row share one block."""
    runs = []
    for kind, group in groupby(shape.layers):
        runs.append(BlockRun(block=_layer(shape, kind, config.seq_length), count=len(list(group))))
    head, tied = read_head(config, shape.head, shape.vocab_size)
    return ModelSpec(
        name=config.name,
        model_type=config.model_type,
        source=config.source,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab_size,
        max_seq_length=shape.max_seq_length,
        tied_embeddings=tied,
        embedding=_embedding(shape),
        runs=tuple(runs),
        head=head,
        residual_streams=shape.residual_streams,
    )


def block_from_part(kind: str, part: Part, **values: Attention | int | str | None) -> BlockSpec:
    """Return the block of `kind` that holds what `part` sums."""
    return BlockSpec.model_validate(
        {
            "kind": kind,
            "parameters": part.parameters,
            "matmuls": part.matmuls,
            "saved": part.saved,
            "saved_fused": part.saved_fused,
            **values,
        }
    )


def _embedding(shape: DecoderShape) -> BlockSpec:
    style = shape.embedding
    part = weight(f"{style.name}.weight", shape.vocab_size, style.width, tp_dim=0, layer="embedding")
    if style.positions is not None:
        name, count = style.positions
        part += weight(f"{name}.weight", count, shape.hidden, layer="embedding")
    if style.width != shape.hidden:
        part += kept("embeddings", style.width, split="sequence")
        part += linear("project_in", style.width, shape.hidden, bias=False)
    if style.norm is not None:
        name, kind = style.norm
        part += norm(name, kind, shape.hidden)
    part += dropout("dropout_mask", style.dropout, shape.hidden) + shape.shared
    if shape.attention.rotary:
        heads = shape.heads
        rotated = heads.rope_head_dim if isinstance(heads, LatentHeads) else heads.head_dim
        part += kept("rotary_tables", 2 * rotated, element_type="residual", is_shared_by_batch=True)
    return block_from_part("embedding", part)


def _layer(shape: DecoderShape, kind: LayerKind, seq_length: int | None) -> BlockSpec:
    part = Part()
    style = kind.attention or shape.attention
    if kind.window is not None and seq_length is not None and seq_length >= kind.window:
        style = style._replace(is_windowed=True)
    style = style._replace(rotary=style.rotary and kind.is_rotary)
    for index, name in enumerate(shape.norms):
        keeps_input = index == 0 or shape.residual != "parallel_two_norms"  # both norms read the same input
        part += norm(name, shape.norm_kind, shape.hidden, keeps_input=keeps_input)
    core: Attention | None
    heads = kind.heads or shape.heads
    if kind.mixer is not None:
        part += kind.mixer.part.inside("linear_attn")
        core, limit = None, kind.mixer.tp_limit
    elif isinstance(heads, LatentHeads):
        part += latent_attention(heads, style).inside("self_attn")
        core, limit = heads.attention(), heads.num_heads
        if kind.indexer is not None and not kind.indexer.is_shared:
            part += index_projections(heads, kind.indexer)
    else:
        part += attention(heads, style, keeps_input=shape.residual != "parallel").inside("self_attn")
        core = heads.attention(window=kind.window)
        limit = gcd(heads.num_heads, heads.num_kv_heads)
    part += kind.feed_forward.inside("mlp")
    if shape.residual == "parallel":  # attention reads the MLP's input
        part = part.read_by("mlp_input", style.projections[:-1])
    after_attention, after_mlp = shape.residual_dropouts
    part += dropout("dropout_mask", after_attention, shape.hidden) + dropout("mlp_output_mask", after_mlp, shape.hidden)
    output = norm_output(shape.norm_kind)
    scores = kind.indexer.scores() if kind.indexer is not None and not kind.indexer.is_shared else None
    return block_from_part(kind.name, part, attention=core, index_scores=scores, tp_limit=limit, norm_output=output)
