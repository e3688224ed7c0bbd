"""Families of which most layers have linear attention: Qwen3-Next, Qwen3.5 and 3.6.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
Layers for multi-token prediction that checkpoints bring are no part of the classes that transformers builds.
"""

from __future__ import annotations

from functools import partial

from paraplan.errors import ModelError
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import LayerKind, Mixer
from paraplan.model.delta_rule import delta_rule, read_delta_rule
from paraplan.model.families import ATTENTION_BIAS, ModernFamily, dense_mlp, modern_heads, qk_norms
from paraplan.model.families_experts import NUM_EXPERTS, QWEN2_MOE, Mixture, gated_mixture, mixture, sparse_by_step
from paraplan.model.lightning import lightning, read_lightning
from paraplan.model.part import Part

_LAYER_TYPES = ("linear_attention", "full_attention")


def linear_layers(
    config: ModelConfig, family: ModernFamily, hidden: int, *, mixture: Mixture | None, is_next: bool = False
) -> tuple[LayerKind, ...]:
    """Return layers with linear attention, in all but every fourth by default, and experts or an MLP."""
    shape = read_delta_rule(config, hidden, has_fused_projections=is_next)
    mixer = Mixer(delta_rule(shape), shape.tp_limit)
    types = _types(config)
    sparse = sparse_by_step(config) if is_next else (mixture is not None,) * len(types)
    experts = gated_mixture(config, hidden, mixture) if mixture is not None and any(sparse) else Part()
    dense = Part() if all(sparse) else dense_mlp(config, family, hidden)
    return tuple(
        LayerKind(
            experts if is_sparse else dense,
            name="moe" if is_sparse else "transformer",
            mixer=mixer if kind == "linear_attention" else None,
        )
        for kind, is_sparse in zip(types, sparse, strict=True)
    )


def _types(config: ModelConfig, *, interval: int = 4, first: str = "linear_attention") -> tuple[str, ...]:
    count, types = config.layers("num_hidden_layers"), config.names("layer_types")
    if not types:
        interval = config.count("full_attention_interval", default=interval)
        shift = 1 if first == "linear_attention" else interval
        return tuple(_LAYER_TYPES[(index + shift) % interval == 0] for index in range(count))
    strange = sorted(set(types) - set(_LAYER_TYPES))
    if strange or len(types) != count:
        raise ModelError(
            f"{config.source}: layer_types names {strange[0] if strange else f'{len(types)} layers'}, expected "
            f"{' or '.join(_LAYER_TYPES)} for each of {count} layers",
            hint="correct 'layer_types' or leave it out: every fourth layer has full attention then",
        )
    return types


_QWEN = ModernFamily(
    kv_heads=2,
    head_dim=256,
    norm="rms_in_fp32",
    qkv_bias=ATTENTION_BIAS,
    output_bias=ATTENTION_BIAS,
    qk_norm=(True, qk_norms("per_head", "rms_in_fp32")),
    is_gated_attention=True,
)

_QWEN3_5_MOE = QWEN2_MOE._replace(
    num_experts=(NUM_EXPERTS, 256),
    per_token=(("num_experts_per_tok",), 8),
    shared_width=("shared_expert_intermediate_size", 512),
)
_QWEN3_NEXT = _QWEN3_5_MOE._replace(num_experts=(NUM_EXPERTS, 512), per_token=(("num_experts_per_tok",), 10))

_MINIMAX = Mixture((("num_local_experts",), 8), (("num_experts_per_tok",), 2), "intermediate_size")


def lightning_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """Return MiniMax-Text-01's layers: lightning attention, in every second by default, and experts."""
    heads = modern_heads(config, family, hidden)
    shape = read_lightning(config, hidden, heads=heads.num_heads, dim=heads.head_dim)
    mixer, part = Mixer(lightning(shape), shape.heads), mixture(config, hidden, _MINIMAX)
    types = _types(config, interval=2, first="full_attention")
    return tuple(LayerKind(part, name="moe", mixer=mixer if kind == "linear_attention" else None) for kind in types)


LINEAR: dict[str, ModernFamily] = {
    "qwen3_next": _QWEN._replace(layers=partial(linear_layers, mixture=_QWEN3_NEXT, is_next=True)),
    "qwen3_5_text": _QWEN._replace(kv_heads=4, layers=partial(linear_layers, mixture=None)),
    "minimax": ModernFamily(kv_heads=8, layers=lightning_layers),
    "qwen3_5_moe_text": _QWEN._replace(layers=partial(linear_layers, mixture=_QWEN3_5_MOE)),
}
