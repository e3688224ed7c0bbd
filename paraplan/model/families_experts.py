"""Families whose blocks hold mixtures of experts beside Llama's attention.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from paraplan.errors import ModelError
from paraplan.model.config_file import ModelConfig
from paraplan.model.decoder import LayerKind
from paraplan.model.families import ATTENTION_BIAS, MODERN, Choice, Flag, ModernFamily, choose, dense_mlp, qk_norms
from paraplan.model.families import windows as windows_of
from paraplan.model.families_dense import EXAONE4, rotary_in_windows
from paraplan.model.families_llama4 import llama4_layers
from paraplan.model.feed_forward import ExpertsStyle, MlpStyle, Router, experts, mlp, shared_expert_gate
from paraplan.model.part import Part, kept, weight

GATED = ("gate_proj", "up_proj", "down_proj")


class Mixture(NamedTuple):
    """How a family's config names its experts, and what stands beside them.

    Fields come with what an absent one means, None where it is required. `num_shared` counts shared experts of the
    routed ones' width, None where there is none; `shared_width` is the field of the width of one. `dense_layers` is
    what an absent `first_k_dense_replace` means, None where every layer has experts. `groups` are the groups of
    experts, and of those the ones that a token may go to. `has_statistics` says that the router's correction is a
    parameter, `has_linear_router` that the router is an nn.Linear. `activation` is that of a code of its own.
    """

    num_experts: tuple[tuple[str, ...], int | None] = (("n_routed_experts", "num_local_experts"), None)
    per_token: tuple[tuple[str, ...], int | None] = (("num_experts_per_tok",), None)
    width: str = "moe_intermediate_size"
    num_shared: tuple[str, int] | None = None
    shared_width: tuple[str, int | None] | None = None
    shared_name: str = "mlp.shared_experts"
    router: Router = "softmax"
    router_name: str = "mlp.gate"
    has_linear_router: bool = False
    groups: tuple[int, int] = (1, 1)
    dense_layers: int | None = None
    reads_dense_layers: bool = True
    bias: Choice = False
    has_statistics: bool = False
    activation: str | None = None


def mixture(config: ModelConfig, hidden: int, fields: Mixture, *, readers: tuple[str, ...] = ()) -> Part:
    """Return router, routed and shared experts. `readers` are other layers that read the same input."""
    activation = fields.activation or config.text("hidden_act", default="silu")
    inner = config.count(fields.width)
    shared = 0
    if fields.num_shared is not None:
        name, default = fields.num_shared
        shared = inner * config.size(name, default=default)
    elif fields.shared_width is not None:
        name, usual = fields.shared_width
        shared = config.size(name, default=usual)
    groups, chosen = (
        config.size(name, default=usual) for name, usual in zip(("n_group", "topk_group"), fields.groups, strict=True)
    )
    names = tuple(f"{fields.shared_name}.{name}" for name in GATED)
    style = ExpertsStyle(
        num_experts=config.count(*fields.num_experts[0], default=fields.num_experts[1]),
        experts_per_token=config.count(*fields.per_token[0], default=fields.per_token[1]),
        inner=inner,
        activation=activation,
        router=fields.router,
        router_name=fields.router_name,
        has_linear_router=fields.has_linear_router,
        readers=(names[:2] if shared else ()) + readers,
        group_share=chosen / groups if 0 < chosen < groups else 1.0,
    )
    part = experts(hidden, style)
    if fields.has_statistics:
        part += weight("mlp.gate.moe_statics.e_score_correction_bias", 1, style.num_experts)
    if shared:
        bias = choose(config, fields.bias)
        part += mlp(hidden, shared, MlpStyle(names, activation, is_gated=True, bias=bias), keeps_input=False)
    return part


def are_sparse(config: ModelConfig, fields: Mixture) -> tuple[bool, ...]:
    """Return which layers have experts: by `mlp_layer_types`, else all behind `first_k_dense_replace`."""
    count, first = config.layers("num_hidden_layers"), fields.dense_layers
    if first is None:
        return (True,) * count
    types = config.names("mlp_layer_types")
    if not types:
        first = config.size("first_k_dense_replace", default=first) if fields.reads_dense_layers else first
        return tuple(index >= first for index in range(count))
    if len(types) != count:
        raise ModelError(
            f"{config.source}: mlp_layer_types names {len(types)} layers, num_hidden_layers is {count}",
            hint="make both name the same number of layers",
        )
    return tuple(kind == "sparse" for kind in types)


def mixture_layers(config: ModelConfig, family: ModernFamily, hidden: int, *, fields: Mixture) -> tuple[LayerKind, ...]:
    """Return layers with experts, the first of them dense where the family has such."""
    sparse = are_sparse(config, fields)
    return layers_by_kind(config, family, hidden, sparse=sparse, part=mixture(config, hidden, fields))


def layers_by_kind(
    config: ModelConfig, family: ModernFamily, hidden: int, *, sparse: tuple[bool, ...], part: Part
) -> tuple[LayerKind, ...]:
    """Return layers with `part` where they are sparse, dense ones elsewhere."""
    dense = Part() if all(sparse) else dense_mlp(config, family, hidden)
    return tuple(
        LayerKind(part, window, "moe") if has_experts else LayerKind(dense, window)
        for has_experts, window in zip(sparse, windows_of(config), strict=True)
    )


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
    return tuple(LayerKind(part, window, "moe") for window in windows_of(config))


def sparse_by_step(config: ModelConfig) -> tuple[bool, ...]:
    """Return which layers have experts: every `decoder_sparse_step`-th without those of `mlp_only_layers`."""
    dense_only, step = config.indices("mlp_only_layers"), config.count("decoder_sparse_step", default=1)
    count = config.layers("num_hidden_layers")
    return tuple(index not in dense_only and (index + 1) % step == 0 for index in range(count))


def qwen2_moe_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """Qwen2-MoE: routed experts beside one shared expert with a gate of its own, some layers dense."""
    part = gated_mixture(config, hidden, QWEN2_MOE)
    return layers_by_kind(config, family, hidden, sparse=sparse_by_step(config), part=part)


def gated_mixture(config: ModelConfig, hidden: int, fields: Mixture) -> Part:
    """Return experts beside one shared expert that a gate of its own scales."""
    part = mixture(config, hidden, fields, readers=("mlp.shared_expert_gate",)) + shared_expert_gate(hidden)
    return part + kept("shared_expert_output", hidden + 1)


def qwen3_moe_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """Qwen3-MoE: routed experts only, some layers dense."""
    return every_mixture_layers(config, family, hidden, fields=QWEN3_MOE)


def every_mixture_layers(
    config: ModelConfig, family: ModernFamily, hidden: int, *, fields: Mixture
) -> tuple[LayerKind, ...]:
    """Return layers with experts in every so manieth, the others dense."""
    return layers_by_kind(config, family, hidden, sparse=sparse_by_step(config), part=mixture(config, hidden, fields))


def ernie_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """ERNIE 4.5: experts in every so manieth layer from one index to another."""
    count = config.layers("num_hidden_layers")
    first, step = config.size("moe_layer_start_index", default=1), config.count("moe_layer_interval", default=1)
    last = config.fields.get("moe_layer_end_index")
    last = count - 1 if last in (None, -1) else config.size("moe_layer_end_index")
    sparse = tuple(first <= index <= last and (index + 1) % step == 0 for index in range(count))
    return layers_by_kind(config, family, hidden, sparse=sparse, part=mixture(config, hidden, _ERNIE))


def hunyuan_layers(config: ModelConfig, family: ModernFamily, hidden: int) -> tuple[LayerKind, ...]:
    """Hunyuan: experts in every layer beside a shared one, with a linear layer as router.

    Its files name the experts for each token layer by layer; the class builds all layers with the first number.
    """
    chosen = config.fields.get("moe_topk")
    if isinstance(chosen, list) and len(set(map(str, chosen))) == 1:
        config = replace(config, fields={**config.fields, "moe_topk": chosen[0]})
    part = mixture(config, hidden, _HUNYUAN)
    return layers_by_kind(config, family, hidden, sparse=are_sparse(config, _HUNYUAN), part=part)


NUM_EXPERTS = ("num_experts", "num_local_experts")
QWEN2_MOE = Mixture(
    num_experts=(NUM_EXPERTS, 60),
    per_token=(("num_experts_per_tok",), 4),
    shared_width=("shared_expert_intermediate_size", 5632),
    shared_name="mlp.shared_expert",
)
QWEN3_MOE = Mixture(num_experts=(NUM_EXPERTS, 128), per_token=(("num_experts_per_tok",), 8))
_ERNIE = Mixture(
    num_experts=(("moe_num_experts", "num_experts"), 64),
    per_token=(("moe_k", "num_experts_per_tok"), 6),
    num_shared=("moe_num_shared_experts", 2),
    router="fp32",
    bias=Flag("use_bias", default=False),
    has_statistics=True,
)
_HUNYUAN = Mixture(
    num_experts=(("num_experts",), 1),
    per_token=(("moe_topk",), 1),
    width="intermediate_size",
    shared_width=("intermediate_size", None),
    shared_name="mlp.shared_mlp",
    router_name="mlp.gate.wg",
    has_linear_router=True,
)
_FP32_SHARED = Mixture(num_shared=("n_shared_experts", 1), router="fp32", dense_layers=1)
_USE_BIAS = Flag("use_bias", default=False)
_BIAS_ALL = Flag("attention_bias", default=True)
_PER_HEAD = qk_norms("per_head", "rms")
_HUNYUAN_NORMS = qk_norms("per_head", "rms", ("self_attn.query_layernorm", "self_attn.key_layernorm"))

_LING_NORMS = qk_norms("per_head", "rms", ("attention.query_layernorm", "attention.key_layernorm"))


def _layers(fields: Mixture) -> partial[tuple[LayerKind, ...]]:
    return partial(mixture_layers, fields=fields)


EXPERTS: dict[str, ModernFamily] = {
    "mixtral": ModernFamily(
        kv_heads=8,
        layers=_layers(
            Mixture((("num_local_experts", "num_experts"), 8), (("num_experts_per_tok",), 2), "intermediate_size")
        ),
    ),
    "qwen2_moe": ModernFamily(qkv_bias=Flag("qkv_bias", default=True), kv_heads=16, layers=qwen2_moe_layers),
    "qwen3_moe": MODERN["qwen3"]._replace(head_dim=None, kv_heads=4, layers=qwen3_moe_layers),
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
    "glm4_moe": ModernFamily(
        kv_heads=8,
        rounds_head_dim=True,
        qkv_bias=ATTENTION_BIAS,
        qk_norm=(Flag("use_qk_norm", default=False), _PER_HEAD),
        copies_output=True,
        layers=_layers(_FP32_SHARED),
    ),
    "solar_open": ModernFamily(
        kv_heads=8,
        head_dim=128,
        qkv_bias=ATTENTION_BIAS,
        layers=_layers(_FP32_SHARED._replace(dense_layers=None)),
    ),
    "minimax_m2": ModernFamily(
        kv_heads=8,
        head_dim=128,
        qk_norm=(True, qk_norms("all_heads", "rms")),
        copies_output=True,
        layers=_layers(
            Mixture((("num_local_experts", "num_experts"), 256), (("num_experts_per_tok",), 8), "intermediate_size")
        ),
    ),
    "dots1": ModernFamily(
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        qk_norm=(True, _PER_HEAD),
        layers=_layers(_FP32_SHARED._replace(num_shared=("n_shared_experts", 0), dense_layers=0)),
    ),
    "ernie4_5_moe": ModernFamily(
        kv_heads=4,
        qkv_bias=_USE_BIAS,
        output_bias=_USE_BIAS,
        mlp_bias=_USE_BIAS,
        head_bias=_USE_BIAS,
        tied=True,
        drops_attention=False,
        layers=ernie_layers,
    ),
    "hunyuan_v1_moe": ModernFamily(
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        qk_norm=(True, _HUNYUAN_NORMS),
        layers=hunyuan_layers,
    ),
    "hy_v3": ModernFamily(
        kv_heads=8,
        head_dim=128,
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        qk_norm=(True, _PER_HEAD),
        layers=_layers(
            _FP32_SHARED._replace(
                num_experts=(NUM_EXPERTS, 192),
                per_token=(("num_experts_per_tok",), 8),
                num_shared=("num_shared_experts", 1),
                reads_dense_layers=False,
            )
        ),
    ),
    "bailing_moe_v2": ModernFamily(
        projections=("attention.query_key_value", "attention.dense"),
        qkv_bias=Flag("use_qkv_bias", default=False),
        output_bias=_USE_BIAS,
        qk_norm=(Flag("use_qk_norm", default=False), _LING_NORMS),
        copies_output=True,
        embedding="model.word_embeddings",
        layers=_layers(
            _FP32_SHARED._replace(
                num_experts=(NUM_EXPERTS, None),
                num_shared=("num_shared_experts", 0),
                groups=(8, 4),
                dense_layers=0,
            )
        ),
    ),
    "olmoe": ModernFamily(
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        qk_norm=(True, qk_norms("all_heads", "rms")),
        layers=_layers(Mixture((NUM_EXPERTS, 64), (("num_experts_per_tok",), 8), "intermediate_size")),
    ),
    "flex_olmo": MODERN["olmo2"]._replace(
        layers=_layers(Mixture((NUM_EXPERTS, 7), (("num_experts_per_tok",), 5), "intermediate_size"))
    ),
    "llama4_text": ModernFamily(
        kv_heads=8,
        head_dim=128,
        softmax_in_fp32=False,
        qkv_bias=ATTENTION_BIAS,
        output_bias=ATTENTION_BIAS,
        layers=llama4_layers,
    ),
    "exaone_moe": EXAONE4._replace(
        norms=("input_layernorm", "post_attention_layernorm"),
        layers=partial(
            rotary_in_windows,
            layers=_layers(
                _FP32_SHARED._replace(
                    num_experts=(NUM_EXPERTS, 64),
                    per_token=(("num_experts_per_tok",), 8),
                    num_shared=("num_shared_experts", 1),
                )
            ),
        ),
    ),
}
"""Mixtures of experts with Llama's attention. Ling and Ring 2.0 (bailing_moe_v2) are read from their own code
(modeling_bailing_moe_v2.py), with experts in grouped products as Megatron-Bridge trains them."""
