"""Families of decoder-only models: how each one's config names its fields, and which parts its blocks are made of.

Shapes and defaults are those of the transformers library's configuration classes, read in version 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from paraplan.errors import ModelError
from paraplan.model.attention import AttentionStyle, Heads
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import DecoderShape, EmbeddingStyle, LayerKind, build_decoder
from paraplan.model.feed_forward import MlpStyle, mlp
from paraplan.model.heads import HeadStyle
from paraplan.model.norm import NormKind
from paraplan.model.part import Part
from paraplan.model.spec import ModelSpec

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Flag(NamedTuple):
    """A choice that a field of the config makes."""

    name: str
    default: bool


Choice = bool | Flag


def choose(config: ModelConfig, choice: Choice) -> bool:
    """Return a family's fixed choice, or the value of the field that makes it."""
    return config.flag(choice.name, default=choice.default) if isinstance(choice, Flag) else choice


class ModernFamily(NamedTuple):
    """A family whose config uses the field names of Llama's; what differs stands here.

    `head_dim` is the default of that field, None for hidden_size / num_attention_heads, which may leave a rest where it
    `rounds_head_dim`; `reads_head_dim` is False where transformers' class does not look at it.
    `kv_heads` is what an absent num_key_value_heads means, None for num_attention_heads.
    `default_dropout` is what absent rates of dropout mean; `drops_attention` is False where the class has none there.
    `parallel` says that attention and MLP read the same norm's output, the first of `norms`.
    """

    norm: NormKind = "rms"
    norms: tuple[str, ...] = TWO_NORMS
    qkv_bias: Choice = False
    output_bias: Choice = False
    mlp_bias: Choice = False
    projections: tuple[str, ...] = QKV
    mlp: tuple[str, ...] = GATED
    is_gated: bool = True
    activation: tuple[tuple[str, ...], str] = (("hidden_act",), "silu")
    head_dim: int | None = None
    kv_heads: int | None = None
    reads_head_dim: bool = True
    rounds_head_dim: bool = False
    qk_norm: tuple[Choice, AttentionStyle] | None = None
    parallel: Choice = False
    tied: bool = False
    head_bias: Choice = False
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    dropouts: Mapping[str, tuple[str, ...]] | None = None
    default_dropout: float = 0.0
    drops_attention: bool = True
    softmax_in_fp32: bool = True
    has_sinks: bool = False
    copies_output: bool = False
    is_gated_attention: bool = False
    layers: Layers | None = None


Layers = Callable[[ModelConfig, ModernFamily, int], tuple[LayerKind, ...]]
"""The layers of a model: from its config, its family, and its hidden size."""


def read_modern(config: ModelConfig, family: ModernFamily) -> ModelSpec:
    """Return the model of a config with Llama's field names."""
    return build_decoder(config, modern_shape(config, family))


def rotary_positions(config: ModelConfig) -> int | None:
    """Return the longest sequence of rotary positions: those named, or what a scaling factor makes of them.

    Configs name either the scaled length or, beside a `factor`, the one before (transformers, modeling_rope_utils.py).
    """
    named = config.optional_count("max_position_embeddings")
    if named is None:
        return None
    scaling = config.section("rope_scaling") if config.has("rope_scaling") else config.section("rope_parameters")
    factor = scaling.fields.get("factor")
    if not isinstance(factor, (int, float)) or factor <= 1:
        return named
    return max(named, round(factor * (scaling.optional_count("original_max_position_embeddings") or named)))


def modern_shape(config: ModelConfig, family: ModernFamily) -> DecoderShape:
    """Return the description of a config with Llama's field names."""
    hidden = config.count("hidden_size")
    vocab_size = config.count("vocab_size")
    layers = (family.layers or dense_layers)(config, family, hidden)
    parallel = choose(config, family.parallel)
    default = family.default_dropout
    rates = {name: config.fraction(*fields, default=default) for name, fields in (family.dropouts or {}).items()}
    residual_rate = rates.get("residual", 0.0)
    return DecoderShape(
        hidden=hidden,
        vocab_size=vocab_size,
        max_seq_length=rotary_positions(config),
        heads=modern_heads(config, family, hidden),
        attention=modern_attention(config, family),
        layers=layers,
        norm_kind=family.norm,
        norms=family.norms[:1] if parallel else family.norms,
        embedding=EmbeddingStyle(family.embedding, hidden, dropout=rates.get("embedding", 0.0)),
        head=HeadStyle(
            width=hidden,
            tied_by_default=family.tied,
            norm=(family.final_norm, family.norm, hidden),
            bias=choose(config, family.head_bias),
        ),
        residual="parallel" if parallel else "sequential",
        residual_dropouts=(residual_rate, rates.get("feed_forward", residual_rate)),
    )


def modern_heads(config: ModelConfig, family: ModernFamily, hidden: int) -> Heads:
    """Return the shapes of the attention heads; raises ModelError for heads that do not divide."""
    num_heads = config.count("num_attention_heads")
    is_null = "num_key_value_heads" in config.fields  # null means one for each head, an absent field the family's own
    num_kv_heads = config.count("num_key_value_heads", default=num_heads if is_null else family.kv_heads or num_heads)
    head_dim = config.optional_count("head_dim") if family.reads_head_dim else None
    head_dim = head_dim or family.head_dim
    if head_dim is None and family.rounds_head_dim:
        head_dim = hidden // num_heads
    if head_dim is None:
        head_dim = config.divide("hidden_size", hidden, "num_attention_heads", num_heads)
    config.divide("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    return Heads(hidden, num_heads, num_kv_heads, head_dim)


def modern_attention(config: ModelConfig, family: ModernFamily) -> AttentionStyle:
    """Return how the family writes its attention down."""
    style = AttentionStyle(
        projections=family.projections,
        qkv_bias=choose(config, family.qkv_bias),
        output_bias=choose(config, family.output_bias),
        softmax_in_fp32=family.softmax_in_fp32,
        has_sinks=family.has_sinks,
        copies_output=family.copies_output,
        is_gated=family.is_gated_attention,
        is_capped=config.has("attn_logit_softcapping") and config.model_type != "gemma3_text",
        dropout=config.fraction("attention_dropout", default=family.default_dropout) if family.drops_attention else 0.0,
    )
    if family.qk_norm is None or not choose(config, family.qk_norm[0]):
        return style
    pattern = family.qk_norm[1]
    return style._replace(
        qk_norm=pattern.qk_norm, qk_norm_kind=pattern.qk_norm_kind, qk_norm_names=pattern.qk_norm_names
    )


def dense_mlp(config: ModelConfig, family: ModernFamily, hidden: int) -> Part:
    """Return the family's MLP of width intermediate_size."""
    fields, default = family.activation
    style = MlpStyle(
        projections=family.mlp,
        activation=config.text(*fields, default=default),
        is_gated=family.is_gated,
        bias=choose(config, family.mlp_bias),
    )
    return mlp(hidden, config.count("intermediate_size"), style)


def dense_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """Return layers with an MLP each, in which `layer_types` may set a sliding window."""
    part = dense_mlp(config, family, hidden)
    return tuple(LayerKind(part, window) for window in windows(config))


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    """Return each layer's attention window: `sliding_window` where `layer_types` says so, else the whole sequence.

    A config without `layer_types` follows its family: every layer of Mistral, Phi-3 and StarCoder2 has it, every
    second of Gemma 2 and gpt-oss, all but every fourth or sixth of others; Qwen's have none unless
    `use_sliding_window` is set.
    """
    count = config.layers("num_hidden_layers")
    window = config.optional_count("sliding_window") if config.fields.get("sliding_window") != 0 else None
    types = config.names("layer_types")
    if not types:
        return tuple(window if _has_window(config, index) else None for index in range(count))
    if len(types) != count:
        raise ModelError(
            f"{config.source}: layer_types names {len(types)} layers, num_hidden_layers is {count}",
            hint="make both name the same number of layers",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


_WHOLE_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "exaone4": 4, "olmo3": 4}
"""Families of whose layers every so manieth attends to the whole sequence, the others to a window."""


def _has_window(config: ModelConfig, index: int) -> bool:
    family = config.model_type
    if family in _WHOLE_EVERY:
        names = ("sliding_window_pattern", "_sliding_window_pattern")
        return (index + 1) % config.count(*names, default=_WHOLE_EVERY[family]) != 0
    if family == "dots1":
        return index >= config.size("max_window_layers", default=62)
    if not config.flag("use_sliding_window", default=not family.startswith(("qwen", "smollm"))):
        return False
    if family in ("qwen2", "qwen3"):
        return index >= config.size("max_window_layers", default=28)
    return family != "qwen2_moe" or (index % 2 == 0 and index < config.size("max_window_layers", default=28))


_Q_K = ("self_attn.q_norm", "self_attn.k_norm")


def qk_norms(kind: str, norm: NormKind, names: tuple[str, str] = _Q_K) -> AttentionStyle:
    """Return the pattern of an attention whose queries and keys have norms."""
    return AttentionStyle(projections=QKV, qk_norm=kind, qk_norm_kind=norm, qk_norm_names=names)  # type: ignore[arg-type]


_Q_K_LAYER = ("self_attn.q_layernorm", "self_attn.k_layernorm")
ATTENTION_BIAS = Flag("attention_bias", default=False)
_GELU_TANH = (("hidden_activation", "hidden_act"), "gelu_pytorch_tanh")

MODERN: dict[str, ModernFamily] = {
    "llama": ModernFamily(
        qkv_bias=ATTENTION_BIAS, output_bias=ATTENTION_BIAS, mlp_bias=Flag("mlp_bias", default=False)
    ),
    "mistral": ModernFamily(kv_heads=8),
    "qwen2": ModernFamily(qkv_bias=True, kv_heads=32),
    "qwen3": ModernFamily(
        kv_heads=32,
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        head_dim=128,
        qk_norm=(True, qk_norms("per_head", "rms")),
    ),
    "gemma": ModernFamily(
        kv_heads=16,
        norm="rms_in_fp32",
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        activation=_GELU_TANH,
        head_dim=256,
        tied=True,
    ),
    "gemma2": ModernFamily(
        kv_heads=4,
        norm="rms_in_fp32",
        norms=FOUR_NORMS,
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        activation=_GELU_TANH,
        head_dim=256,
        tied=True,
    ),
    "gemma3_text": ModernFamily(
        kv_heads=4,
        norm="rms_in_fp32",
        norms=FOUR_NORMS,
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        activation=_GELU_TANH,
        head_dim=256,
        qk_norm=(True, qk_norms("per_head", "rms_in_fp32")),
        tied=True,
    ),
    "phi": ModernFamily(
        norm="layer",
        norms=("input_layernorm",),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        projections=(*QKV[:3], "self_attn.dense"),
        mlp=("mlp.fc1", "mlp.fc2"),
        is_gated=False,
        activation=(("hidden_act",), "gelu_new"),
        qk_norm=(Flag("qk_layernorm", default=False), qk_norms("per_head", "layer", _Q_K_LAYER)),
        parallel=True,
        head_bias=True,
        final_norm="model.final_layernorm",
        dropouts={"residual": ("resid_pdrop",), "embedding": ("embd_pdrop",)},
        copies_output=True,
    ),
    "phi3": ModernFamily(
        projections=("self_attn.qkv_proj", "self_attn.o_proj"),
        mlp=("mlp.gate_up_proj", "mlp.down_proj"),
        dropouts={"residual": ("resid_pdrop",)},
        copies_output=True,
    ),
    "starcoder2": ModernFamily(
        kv_heads=2,
        norm="layer",
        qkv_bias=Flag("use_bias", default=True),
        output_bias=Flag("use_bias", default=True),
        mlp_bias=Flag("use_bias", default=True),
        mlp=("mlp.c_fc", "mlp.c_proj"),
        is_gated=False,
        activation=(("hidden_act",), "gelu_pytorch_tanh"),
        tied=True,
        dropouts={"residual": ("residual_dropout",), "embedding": ("embedding_dropout",)},
    ),
    "stablelm": ModernFamily(
        kv_heads=32,
        norm="layer",
        reads_head_dim=False,
        qkv_bias=Flag("use_qkv_bias", default=False),
        qk_norm=(Flag("qk_layernorm", default=False), qk_norms("weight_per_head", "layer_without_bias", _Q_K_LAYER)),
        parallel=Flag("use_parallel_residual", default=False),
        dropouts={"feed_forward": ("hidden_dropout",)},
        copies_output=True,
    ),
    "olmo2": ModernFamily(
        norm="rms_in_fp32",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        qk_norm=(True, qk_norms("all_heads", "rms_in_fp32")),
    ),
    "cohere": ModernFamily(
        norm="layer_in_fp32",
        norms=("input_layernorm",),
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        qk_norm=(Flag("use_qk_norm", default=False), qk_norms("weight_per_head", "layer_in_fp32")),
        parallel=True,
        tied=True,
    ),
}
