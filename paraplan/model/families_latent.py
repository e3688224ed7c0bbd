"""Families with multi-head latent attention: DeepSeek's and those that took it over.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
Layers for multi-token prediction that checkpoints bring are no part of the classes that transformers builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from paraplan.errors import ModelError
from paraplan.model.attention import AttentionStyle
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import DecoderShape, EmbeddingStyle, LayerKind, Mixer
from paraplan.model.families import GATED, QKV, TWO_NORMS, Choice, Flag, choose, rotary_positions
from paraplan.model.families_experts import Mixture, are_sparse, mixture
from paraplan.model.feed_forward import MlpStyle, mlp
from paraplan.model.heads import HeadStyle
from paraplan.model.kimi_delta import KimiDelta, kimi_delta, read_kimi_delta, read_ling_delta
from paraplan.model.latent_attention import Indexer, LatentHeads
from paraplan.model.part import Part


class LatentFamily(NamedTuple):
    """A family with latent attention, by its differences from DeepSeek-V3.

    `ranks` and `head_dims` are what absent fields mean: q_lora_rank, kv_lora_rank; qk_nope_head_dim, qk_rope_head_dim,
    v_head_dim. `mixture` is None where every layer is dense. `index_heads` is the default number of an indexer's heads,
    None where the model has none.
    """

    mixture: Mixture | None
    ranks: tuple[int | None, int] = (1536, 512)
    head_dims: tuple[int, int, int] = (128, 64, 128)
    mlp_bias: Choice = False
    tied: bool = False
    index_heads: int | None = None
    delta: Callable[[ModelConfig, int], KimiDelta] | None = None
    """The shapes of Kimi Delta Attention, which most layers then have."""
    rotary: bool = True
    has_head_gates: bool = False
    """The output of each head is scaled by a gate of its own."""
    names: Mapping[str, str] = MappingProxyType({})
    """Names of fields in checkpoints, and in transformers' classes."""


def latent_shape(config: ModelConfig, family: LatentFamily) -> DecoderShape:
    """Return the description of a model with latent attention, its first layers dense."""
    config = replace(config, fields={family.names.get(name, name): value for name, value in config.fields.items()})
    hidden = config.count("hidden_size")
    query_rank, kv_rank = family.ranks
    nope, rope, value = family.head_dims
    heads = LatentHeads(
        hidden=hidden,
        num_heads=config.count("num_attention_heads"),
        query_rank=config.optional_count("q_lora_rank") if "q_lora_rank" in config.fields else query_rank,
        kv_rank=config.count("kv_lora_rank", default=kv_rank),
        nope_head_dim=config.count("qk_nope_head_dim", default=nope),
        rope_head_dim=config.count("qk_rope_head_dim", default=rope),
        v_head_dim=config.count("v_head_dim", default=value),
    )
    return DecoderShape(
        hidden=hidden,
        vocab_size=config.count("vocab_size"),
        max_seq_length=rotary_positions(config),
        heads=heads,
        attention=AttentionStyle(
            projections=QKV,
            rotary=family.rotary,
            has_head_gates=family.has_head_gates,
            output_bias=config.flag("attention_bias", default=False),
            dropout=config.fraction("attention_dropout"),
            masks_each_layer=family.index_heads is not None,
        ),
        layers=_layers(config, family, hidden),
        norm_kind="rms",
        norms=TWO_NORMS,
        embedding=EmbeddingStyle("model.embed_tokens", hidden),
        head=HeadStyle(width=hidden, tied_by_default=family.tied, norm=("model.norm", "rms", hidden)),
    )


def _layers(config: ModelConfig, family: LatentFamily, hidden: int) -> tuple[LayerKind, ...]:
    bias = choose(config, family.mlp_bias)
    activation = config.text("hidden_act", default="silu")
    dense = mlp(hidden, config.count("intermediate_size"), MlpStyle(GATED, activation, is_gated=True, bias=bias))
    indexers = _indexers(config, family)
    mixer = None
    if family.delta is not None:
        shape = family.delta(config, hidden)
        mixer = Mixer(kimi_delta(shape), shape.heads)
    mixers = [mixer if is_linear else None for is_linear in _are_linear(config, family)]
    part = mixture(config, hidden, family.mixture) if family.mixture is not None else Part()
    sparse = are_sparse(config, family.mixture) if family.mixture is not None else (False,) * len(mixers)
    return tuple(
        LayerKind(
            part if has_experts else dense, name="moe" if has_experts else "transformer", indexer=indexer, mixer=mixer
        )
        for has_experts, indexer, mixer in zip(sparse, indexers, mixers, strict=True)
    )


def _are_linear(config: ModelConfig, family: LatentFamily) -> list[bool]:
    """Return which layers have linear attention: by `layer_types`, by numbers from 1, else all but every so manieth.

    That is the last one of each `layer_group_size` of Ling 3, every fourth after the first of Kimi Linear.
    """
    count = config.layers("num_hidden_layers")
    if family.delta is None:
        return [False] * count
    types = config.names("layer_types")
    own = config.section("linear_attn_config")
    if types and len(types) != count:
        raise ModelError(
            f"{config.source}: layer_types names {len(types)} layers, num_hidden_layers is {count}",
            hint="make both name the same number of layers",
        )
    if types:
        return [kind == "linear_attention" for kind in types]
    if own.has("kda_layers"):
        places = own.indices("kda_layers")
        return [index + 1 in places for index in range(count)]
    if config.model_type == "bailing_hybrid":
        group = config.count("layer_group_size", default=6)
        return [(index + 1) % group != 0 for index in range(count)]
    return [not index or index % 4 != 0 for index in range(count)]


def _indexers(config: ModelConfig, family: LatentFamily) -> tuple[Indexer | None, ...]:
    """Return the indexer of each layer; of GLM's some take what the one before them chose."""
    count = config.layers("num_hidden_layers")
    if family.index_heads is None:
        return (None,) * count
    own = Indexer(
        num_heads=config.count("index_n_heads", default=family.index_heads),
        head_dim=config.count("index_head_dim", default=128),
        top_k=config.count("index_topk", default=2048),
    )
    if config.model_type != "glm_moe_dsa":
        return (own,) * count
    types = config.names("indexer_types")
    if not types:
        every = max(1, config.size("index_topk_freq", default=1))
        skipped = config.size("index_skip_topk_offset", default=2)
        pattern = config.text("index_topk_pattern", default="")
        places = (max(index - skipped + 1, 0) % every == 0 for index in range(count))
        types = tuple("full" if full else "shared" for full in ((one == "F" for one in pattern) if pattern else places))
    return tuple(own if one == "full" else own._replace(is_shared=True) for one in types)


_MLP_BIAS = Flag("mlp_bias", default=False)
_SHARED = Mixture(
    num_experts=(("n_routed_experts", "num_local_experts"), 256),
    per_token=(("num_experts_per_tok",), 8),
    num_shared=("n_shared_experts", 1),
    router="fp32",
    groups=(8, 4),
    dense_layers=3,
)
_V3 = LatentFamily(_SHARED)
_KIMI_NAMES = {
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}

LATENT: dict[str, LatentFamily] = {
    "deepseek_v2": LatentFamily(
        _SHARED._replace(
            num_experts=(("n_routed_experts", "num_local_experts"), 64),
            per_token=(("num_experts_per_tok",), None),
            num_shared=("n_shared_experts", 2),
            groups=(1, 1),
            dense_layers=0,
            bias=_MLP_BIAS,
        ),
        mlp_bias=_MLP_BIAS,
    ),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "deepseek_v32": _V3._replace(index_heads=64),
    "glm4_moe_lite": LatentFamily(
        _SHARED._replace(
            num_experts=(("n_routed_experts", "num_local_experts"), 64),
            per_token=(("num_experts_per_tok",), 4),
            groups=(1, 1),
            dense_layers=1,
            reads_dense_layers=False,
        ),
        ranks=(768, 512),
        head_dims=(192, 64, 256),
    ),
    "glm_moe_dsa": LatentFamily(
        _SHARED._replace(groups=(1, 1)), ranks=(2048, 512), head_dims=(192, 64, 256), index_heads=32
    ),
    "mistral4": LatentFamily(
        _SHARED._replace(
            num_experts=(("n_routed_experts", "num_local_experts"), 128),
            per_token=(("num_experts_per_tok",), 4),
            router="softmax_in_activations",
            groups=(1, 1),
            dense_layers=0,
        ),
        ranks=(1024, 256),
        head_dims=(64, 64, 128),
    ),
    "youtu": LatentFamily(None, tied=True),
    "kimi_linear": LatentFamily(
        _SHARED._replace(
            num_experts=(("num_local_experts", "n_routed_experts"), 256),
            groups=(1, 1),
            dense_layers=1,
        ),
        ranks=(None, 512),
        delta=read_kimi_delta,
        rotary=False,
        names=_KIMI_NAMES,
    ),
    "bailing_hybrid": LatentFamily(
        _SHARED._replace(num_experts=(("num_local_experts",), 512), dense_layers=2),
        ranks=(None, 512),
        delta=read_ling_delta,
        has_head_gates=True,
        names=_KIMI_NAMES,
    ),
}
"""Families by `model_type`; Kimi K2 is DeepSeek-V3 under a name of its own, bailing_hybrid is Ling 3."""
