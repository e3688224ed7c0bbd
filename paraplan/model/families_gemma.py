"""Gemma 4: layers of two kinds of heads, keys and values of layers before, and an embedding for each layer.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
"""

from __future__ import annotations

from dataclasses import replace

from paraplan.errors import ModelError
from paraplan.model.attention import Heads, Shares
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import LayerKind, build_decoder
from paraplan.model.families import MODERN, ModernFamily, modern_attention, modern_heads, modern_shape
from paraplan.model.feed_forward import ExpertsStyle, MlpStyle, experts, kept_by_activation, mlp
from paraplan.model.norm import NormKind, norm
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.spec import ModelSpec

_NORM: NormKind = "rms_in_fp32"
_LAYER_TYPES = ("sliding_attention", "full_attention")
_TEXT = MODERN["gemma3_text"]._replace(kv_heads=4)


def gemma4(config: ModelConfig) -> ModelSpec:
    """Return Gemma 4's language model."""
    family = _TEXT._replace(layers=_layers)
    shape = modern_shape(config, family)
    width = config.size("hidden_size_per_layer_input", default=256)
    if not width:
        return build_decoder(config, shape)
    return build_decoder(config, replace(shape, shared=inputs_of_layers(config, shape.hidden, width)))


def inputs_of_layers(config: ModelConfig, hidden: int, width: int) -> Part:
    """Return the embedding that has a part for each layer, and the projection of the tokens' own to the same width."""
    layers = config.layers("num_hidden_layers")
    total, words = layers * width, config.count("vocab_size_per_layer_input", default=262_144)
    part = weight("embed_tokens_per_layer.weight", words, total, layer="embedding")
    name = "per_layer_model_projection"
    part += kept("embeddings", hidden, weights_of=(name,)) + linear(name, hidden, total, bias=False)
    part += norm("per_layer_projection_norm", _NORM, width, groups=layers, is_residual=False)
    return part + kept("layer_gate_inputs", total)


def _layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    types, window = layer_types(config, every=6), config.count("sliding_window", default=512)
    types = (*types[:-1], "full_attention")  # the last one always does
    own = layers_with_keys(config, types, default=0)
    general = modern_heads(config, family, hidden)
    style = modern_attention(config, family)._replace(norms_values=True)
    kinds = []
    for index, kind in enumerate(types):
        is_full, reuses = kind == "full_attention", index >= own
        kinds.append(
            LayerKind(
                _feed_forward(config, hidden, is_wide=reuses and config.flag("use_double_wide_mlp", default=False)),
                window=None if is_full else window,
                heads=_heads(config, general, index) if is_full else general,
                attention=style._replace(shares=_shares(config, is_full=is_full, reuses=reuses)),
            )
        )
    return tuple(kinds)


def layers_with_keys(config: ModelConfig, types: tuple[str, ...], *, default: int) -> int:
    """Return the first layer that attends to the keys and values of one before it; raises where there is none."""
    own = len(types) - config.size("num_kv_shared_layers", default=default)
    if own < len(types) and set(types[: max(own, 0)]) != set(types):
        raise ModelError(
            f"{config.source}: num_kv_shared_layers={len(types) - own} leaves no layer of each kind of its own keys",
            hint=f"use a number below {len(types)} that leaves a layer of each kind of layer_types",
        )
    return own


def layer_types(config: ModelConfig, *, every: int) -> tuple[str, ...]:
    """Return what each layer attends to: a window, or in every so manieth layer all tokens."""
    count, types = config.layers("num_hidden_layers"), config.names("layer_types")
    if not types:
        types = tuple(_LAYER_TYPES[(index + 1) % every == 0] for index in range(count))
    strange = sorted(set(types) - set(_LAYER_TYPES))
    if strange or len(types) != count:
        raise ModelError(
            f"{config.source}: layer_types names {strange[0] if strange else f'{len(types)} layers'}, expected "
            f"{' or '.join(_LAYER_TYPES)} for each of {count} layers",
            hint=f"correct 'layer_types' or leave it out: one of {every} layers attends to all tokens then",
        )
    return types


def _shares(config: ModelConfig, *, is_full: bool, reuses: bool) -> Shares:
    if reuses:
        return "keys_and_values"
    return "values" if is_full and config.flag("attention_k_eq_v", default=False) else "nothing"


def _heads(config: ModelConfig, general: Heads, index: int) -> Heads:
    """Return the heads of a layer that attends to all tokens."""
    if config.has("per_layer_config"):
        layers = config.section("per_layer_config")
        own = layers.section(str(index)) if layers.has(str(index)) else layers
        return general._replace(
            head_dim=own.count("head_dim", default=general.head_dim),
            num_kv_heads=own.count("num_key_value_heads", default=general.num_kv_heads),
        )
    are_own = config.flag("attention_k_eq_v", default=False)
    shared = config.optional_count("num_global_key_value_heads") if are_own else None
    return general._replace(
        head_dim=config.count("global_head_dim", default=512), num_kv_heads=shared or general.num_kv_heads
    )


def _feed_forward(config: ModelConfig, hidden: int, *, is_wide: bool) -> Part:
    activation = config.text("hidden_activation", default="gelu_pytorch_tanh")
    inner = config.count("intermediate_size", default=9216) * (2 if is_wide else 1)
    style = MlpStyle(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), activation, is_gated=True)
    part = mlp(hidden, inner, style)
    if config.flag("enable_moe_block", default=False):
        part += _experts(config, hidden, activation)
    width = config.size("hidden_size_per_layer_input", default=256)
    return part + own_input(hidden, width, activation) if width else part


def _experts(config: ModelConfig, hidden: int, activation: str) -> Part:
    """Return experts beside the MLP: both read the same residual stream through norms of their own."""
    count = config.count("num_experts")
    part = norm("post_feedforward_layernorm_1", _NORM, hidden) + norm("post_feedforward_layernorm_2", _NORM, hidden)
    part += norm("pre_feedforward_layernorm_2", _NORM, hidden)
    part += norm("router.norm", "rms_without_weights", hidden) + weight("router.scale", hidden)
    part += kept("router_input", hidden, split="sequence")
    part += weight("router.per_expert_scale", count)
    style = ExpertsStyle(
        num_experts=count,
        experts_per_token=config.count("top_k_experts"),
        inner=config.count("moe_intermediate_size"),
        activation=activation,
        router_name="router.proj",
        has_linear_router=True,
    )
    return part + experts(hidden, style)


def own_input(hidden: int, width: int, activation: str) -> Part:
    """Return what scales the layer's own part of the embedding by a gate and adds it to the residual stream."""
    gate, projection = "per_layer_input_gate", "per_layer_projection"
    part = kept("layer_gate_inputs", hidden, split="sequence", weights_of=(gate,))
    part += linear(gate, hidden, width, bias=False)
    part += kept("layer_gate", kept_by_activation(activation) * width, by="modules")
    part += kept("layer_gate", width, by="fused") + kept("layer_gate", width, by="modules")
    part += kept("projection_input", width, weights_of=(projection,)) + linear(projection, width, hidden, bias=False)
    return part + norm("post_per_layer_input_norm", _NORM, hidden)
