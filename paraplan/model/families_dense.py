"""Dense families of 2024 to 2026: what each one's blocks differ in from Llama's.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
"""

from __future__ import annotations

from paraplan.errors import ModelError
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import LayerKind
from paraplan.model.families import (
    ATTENTION_BIAS,
    MODERN,
    Flag,
    Layers,
    ModernFamily,
    dense_layers,
    dense_mlp,
    qk_norms,
    windows,
)

_USE_BIAS = Flag("use_bias", default=False)
_FUSED_GATED = ("mlp.gate_up_proj", "mlp.down_proj")


def smollm3_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """SmolLM3: every fourth layer without rotary positions; it has the sliding window where one is used."""
    count = config.layers("num_hidden_layers")
    rotary = config.switches("no_rope_layers")  # 1 for a layer with rotary positions
    if not rotary:
        interval = config.count("no_rope_layer_interval", default=4)
        rotary = tuple((index + 1) % interval != 0 for index in range(count))
    if len(rotary) < count:
        raise ModelError(
            f"{config.source}: no_rope_layers names {len(rotary)} layers, num_hidden_layers is {count}",
            hint="name each layer, 1 with rotary positions and 0 without",
        )
    uses, has_types = config.flag("use_sliding_window", default=False), bool(config.names("layer_types"))
    part = dense_mlp(config, family, hidden)
    return tuple(
        LayerKind(part, window if uses and (has_types or not turns) else None, is_rotary=turns)
        for window, turns in zip(windows(config), rotary, strict=False)
    )


def rotary_in_windows(
    config: ModelConfig, family: ModernFamily, hidden: int, *, layers: Layers = dense_layers
) -> tuple[LayerKind, ...]:
    """EXAONE 4 and Command A: rotary positions in layers with a window alone.

    EXAONE without windows has them in all layers.
    """
    kinds = layers(config, family, hidden)
    if config.model_type.startswith("exaone") and config.optional_count("sliding_window") is None:
        return kinds
    return tuple(one._replace(is_rotary=one.window is not None) for one in kinds)


EXAONE4 = ModernFamily(
    kv_heads=32,
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    qk_norm=(True, qk_norms("per_head", "rms")),
    layers=rotary_in_windows,
)

DENSE: dict[str, ModernFamily] = {
    "smollm3": MODERN["llama"]._replace(kv_heads=4, tied=True, layers=smollm3_layers),
    "glm": ModernFamily(
        kv_heads=2,
        head_dim=128,
        qkv_bias=Flag("attention_bias", default=True),
        mlp=_FUSED_GATED,
        copies_output=True,
    ),
    "glm4": ModernFamily(
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        kv_heads=2,
        head_dim=128,
        qkv_bias=Flag("attention_bias", default=True),
        mlp=_FUSED_GATED,
        copies_output=True,
    ),
    "ernie4_5": ModernFamily(
        kv_heads=2,
        head_dim=128,
        qkv_bias=_USE_BIAS,
        output_bias=_USE_BIAS,
        mlp_bias=_USE_BIAS,
        tied=True,
        drops_attention=False,
    ),
    "seed_oss": ModernFamily(
        kv_heads=8,
        head_dim=128,
        qkv_bias=Flag("attention_bias", default=True),
        output_bias=Flag("attention_out_bias", default=False),
        mlp_bias=Flag("mlp_bias", default=False),
        dropouts={"residual": ("residual_dropout",)},
        default_dropout=0.1,
    ),
    "hunyuan_v1_dense": ModernFamily(
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        qk_norm=(True, qk_norms("per_head", "rms", ("self_attn.query_layernorm", "self_attn.key_layernorm"))),
    ),
    "ministral": ModernFamily(kv_heads=8),
    "ministral3": ModernFamily(kv_heads=8, head_dim=128),
    "arcee": ModernFamily(
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        mlp_bias=Flag("mlp_bias", default=False),
        mlp=("mlp.up_proj", "mlp.down_proj"),
        is_gated=False,
        activation=(("hidden_act",), "relu2"),
    ),
    "granite": MODERN["llama"],  # scaled by numbers alone, for which nothing is kept
    "olmo3": MODERN["olmo2"],
    "exaone4": EXAONE4,
    "cohere2": MODERN["cohere"]._replace(qk_norm=None, layers=rotary_in_windows),
}
