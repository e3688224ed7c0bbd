"""Families whose blocks hold mixtures of experts, and DeepSeek's latent attention.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.23.
"""

from __future__ import annotations

from paraplan.model.attention import AttentionStyle, LatentHeads
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import DecoderShape, EmbeddingStyle, LayerKind
from paraplan.model.families import (
    GATED,
    QKV,
    TWO_NORMS,
    Flag,
    ModernFamily,
    dense_mlp,
    rotary_positions,
    windows,
)
from paraplan.model.feed_forward import ExpertsStyle, MlpStyle, experts, mlp, shared_expert_gate
from paraplan.model.heads import HeadStyle
from paraplan.model.part import Part, kept, weight


def _activation(config: ModelConfig) -> str:
    return config.text("hidden_act", default="silu")


def mixtral_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """Mixtral: experts of width intermediate_size in every layer."""
    part = experts(
        hidden,
        ExpertsStyle(
            num_experts=config.count("num_local_experts", "num_experts", default=8),
            experts_per_token=config.count("num_experts_per_tok", default=2),
            inner=config.count("intermediate_size"),
            activation=_activation(config),
        ),
    )
    return tuple(LayerKind(part, window, "moe") for window in windows(config))


def gpt_oss_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """gpt-oss: experts with biases, weights stored input first, and one learned sink for each head in the softmax."""
    part = experts(
        hidden,
        ExpertsStyle(
            num_experts=config.count("num_local_experts", "num_experts", default=128),
            experts_per_token=config.count("num_experts_per_tok", default=4),
            inner=config.count("intermediate_size"),
            activation="gpt_oss",
            bias=True,
            input_first=True,
            router_name="mlp.router",
            router="softmax_of_chosen",
        ),
    )
    part += weight("self_attn.sinks", config.count("num_attention_heads"), tp_dim=0)
    return tuple(LayerKind(part, window, "moe") for window in windows(config))


def qwen2_moe_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """Qwen2-MoE: routed experts beside one shared expert with a gate of its own, some layers dense."""
    shared = MlpStyle(
        tuple(f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
        _activation(config),
        is_gated=True,
    )
    part = _routed(config, hidden, default_experts=60, default_per_token=4, num_readers=4)
    inner = config.count("shared_expert_intermediate_size", default=5632)
    part += mlp(hidden, inner, shared, keeps_input=False) + shared_expert_gate(hidden)
    part += kept("shared expert output", hidden + 1)
    return _sparse_layers(config, family, hidden, part)


def qwen3_moe_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """Qwen3-MoE: routed experts only, some layers dense."""
    part = _routed(config, hidden, default_experts=128, default_per_token=8)
    return _sparse_layers(config, family, hidden, part)


def _routed(
    config: ModelConfig, hidden: int, *, default_experts: int, default_per_token: int, num_readers: int = 1
) -> Part:
    return experts(
        hidden,
        ExpertsStyle(
            num_experts=config.count("num_experts", "num_local_experts", default=default_experts),
            experts_per_token=config.count("num_experts_per_tok", default=default_per_token),
            inner=config.count("moe_intermediate_size"),
            activation=_activation(config),
            num_readers=num_readers,
        ),
    )


def _sparse_layers(config: ModelConfig, family: ModernFamily, hidden: int, sparse: Part) -> tuple[LayerKind, ...]:
    dense_only = config.indices("mlp_only_layers")
    step = config.count("decoder_sparse_step", default=1)
    dense = dense_mlp(config, family, hidden)
    return tuple(
        LayerKind(sparse, window, "moe")
        if index not in dense_only and (index + 1) % step == 0
        else LayerKind(dense, window)
        for index, window in enumerate(windows(config))
    )


def deepseek(config: ModelConfig) -> DecoderShape:
    """DeepSeek-V2 and V3: latent attention, first layers dense, then shared beside routed experts.

    The multi-token-prediction layers of a V3 checkpoint are no part of the class that transformers builds.
    """
    is_v3 = config.model_type == "deepseek_v3"
    hidden = config.count("hidden_size")
    num_heads = config.count("num_attention_heads")
    heads = LatentHeads(
        hidden=hidden,
        num_heads=num_heads,
        query_rank=config.optional_count("q_lora_rank") if "q_lora_rank" in config.fields else 1536,
        kv_rank=config.count("kv_lora_rank", default=512),
        nope_head_dim=config.count("qk_nope_head_dim", default=128),
        rope_head_dim=config.count("qk_rope_head_dim", default=64),
        v_head_dim=config.count("v_head_dim", default=128),
    )
    return DecoderShape(
        hidden=hidden,
        vocab_size=config.count("vocab_size"),
        max_seq_length=rotary_positions(config),
        heads=heads,
        attention=AttentionStyle(
            projections=QKV,
            output_bias=config.flag("attention_bias", default=False),
            dropout=config.fraction("attention_dropout"),
        ),
        layers=_deepseek_layers(config, hidden, is_v3=is_v3),
        norm_kind="rms",
        norms=TWO_NORMS,
        embedding=EmbeddingStyle("model.embed_tokens", hidden),
        head=HeadStyle(width=hidden, tied_by_default=False, norm=("model.norm", "rms", hidden)),
    )


def _deepseek_layers(config: ModelConfig, hidden: int, *, is_v3: bool) -> tuple[LayerKind, ...]:
    activation = _activation(config)
    bias = False if is_v3 else config.flag("mlp_bias", default=False)
    dense = mlp(hidden, config.count("intermediate_size"), MlpStyle(GATED, activation, is_gated=True, bias=bias))
    inner = config.count("moe_intermediate_size")
    shared = config.size("n_shared_experts", default=1 if is_v3 else 2)
    groups = config.size("n_group", default=8 if is_v3 else 1)
    chosen = config.size("topk_group", default=4 if is_v3 else 1)
    routed = ExpertsStyle(
        num_experts=config.count("n_routed_experts", "num_local_experts", default=256 if is_v3 else 64),
        experts_per_token=config.count("num_experts_per_tok", default=8 if is_v3 else None),
        inner=inner,
        activation=activation,
        router="fp32",
        num_readers=2 if shared else 0,
        group_share=chosen / groups if 0 < chosen < groups else 1.0,
    )
    names = tuple(f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    sparse = experts(hidden, routed)
    if shared:
        style = MlpStyle(names, activation, is_gated=True, bias=bias)
        sparse += mlp(hidden, shared * inner, style, keeps_input=False)
    first = config.size("first_k_dense_replace", default=3 if is_v3 else 0)
    count = config.layers("num_hidden_layers")
    return tuple(LayerKind(dense) if index < first else LayerKind(sparse, None, "moe") for index in range(count))


_BIAS_ALL = Flag("attention_bias", default=True)

EXPERTS: dict[str, ModernFamily] = {
    "mixtral": ModernFamily(kv_heads=8, layers=mixtral_layers),
    "qwen2_moe": ModernFamily(qkv_bias=Flag("qkv_bias", default=True), kv_heads=16, layers=qwen2_moe_layers),
    "gpt_oss": ModernFamily(
        norm="rms_in_fp32",
        softmax_in_fp32=False,
        has_sinks=True,
        qkv_bias=_BIAS_ALL,
        output_bias=_BIAS_ALL,
        head_dim=64,
        kv_heads=8,
        layers=gpt_oss_layers,
    ),
}
"""Mixtures of experts with Llama's attention; Qwen3's comes with its dense sibling's norms in `family_table`."""
