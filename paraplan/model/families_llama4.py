"""Llama 4: attention to chunks with rotary positions, to all tokens without, and experts that scale their inputs.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
"""

from __future__ import annotations

from paraplan.errors import ModelError
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import LayerKind
from paraplan.model.dense_experts import dense_experts
from paraplan.model.families import ModernFamily, modern_attention
from paraplan.model.feed_forward import ExpertsStyle, MlpStyle, mlp
from paraplan.model.part import Part

_OWNER = "feed_forward"
_GATED = ("gate_proj", "up_proj", "down_proj")


def llama4_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """Return layers with experts or an MLP; those with rotary positions norm queries and keys and attend to chunks."""
    count, activation = config.layers("num_hidden_layers", default=48), config.text("hidden_act", default="silu")
    rotary = _rotary(config, count)
    sparse = _are_sparse(config, count)
    style = MlpStyle(tuple(f"{_OWNER}.{name}" for name in _GATED), activation, is_gated=True)
    dense = mlp(hidden, config.count("intermediate_size_mlp", default=16_384), style)
    part = _experts(config, hidden, activation)
    plain = modern_attention(config, family)
    normed = plain
    if config.flag("use_qk_norm", default=True):
        normed = plain._replace(qk_norm="per_head", qk_norm_kind="rms_without_weights")
    return tuple(
        LayerKind(
            part if has_experts else dense,
            window=chunk,
            name="moe" if has_experts else "transformer",
            is_rotary=turns,
            attention=normed if turns else plain,
        )
        for has_experts, turns, chunk in zip(sparse, rotary, _chunks(config, rotary), strict=True)
    )


def _rotary(config: ModelConfig, count: int) -> tuple[bool, ...]:
    rotary = config.switches("no_rope_layers")  # 1 for a layer with rotary positions
    if not rotary:
        interval = config.count("no_rope_layer_interval", default=4)
        return tuple((index + 1) % interval != 0 for index in range(count))
    if len(rotary) < count:
        raise ModelError(
            f"{config.source}: no_rope_layers names {len(rotary)} layers, num_hidden_layers is {count}",
            hint="name each layer, 1 with rotary positions and 0 without",
        )
    return rotary[:count]


def _are_sparse(config: ModelConfig, count: int) -> tuple[bool, ...]:
    if config.has("moe_layers"):
        places = config.indices("moe_layers")
        return tuple(index in places for index in range(count))
    step = config.count("interleave_moe_layer_step", default=1)
    return tuple((index + 1) % step == 0 for index in range(count))


def _chunks(config: ModelConfig, rotary: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the tokens of the chunk that each layer attends within: half of it on average, as of a causal window."""
    is_whole = "attention_chunk_size" in config.fields and not config.has("attention_chunk_size")
    size = None if is_whole else config.count("attention_chunk_size", default=8192)
    types = config.names("layer_types")
    if not types:
        return tuple(size if turns else None for turns in rotary)
    if len(types) != len(rotary):
        raise ModelError(
            f"{config.source}: layer_types names {len(types)} layers, num_hidden_layers is {len(rotary)}",
            hint="make both name the same number of layers",
        )
    return tuple(size if kind == "chunked_attention" else None for kind in types)


def _experts(config: ModelConfig, hidden: int, activation: str) -> Part:
    """Return routed experts beside a shared one."""
    shared = tuple(f"{_OWNER}.shared_expert.{name}" for name in _GATED)
    inner = config.count("intermediate_size", default=8192)
    style = ExpertsStyle(
        num_experts=config.count("num_local_experts", default=16),
        experts_per_token=config.count("num_experts_per_tok", default=1),
        inner=inner,
        activation=activation,
        input_first=True,
        owner=_OWNER,
        router_name=f"{_OWNER}.router",
        has_linear_router=True,
        readers=shared[:2],
    )
    part = dense_experts(hidden, style)
    return part + mlp(hidden, inner, MlpStyle(shared, activation, is_gated=True), keeps_input=False)
