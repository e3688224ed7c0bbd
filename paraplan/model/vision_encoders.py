"""Encoders of pictures: SigLIP, CLIP, Pixtral's, InternVL's, Llama 4's, Gemma 4's, and those of Qwen-VL and GLM-V.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from paraplan.errors import ModelError
from paraplan.model.attention import AttentionStyle, Heads
from paraplan.model.config_file import ModelConfig
from paraplan.model.families import FOUR_NORMS
from paraplan.model.feed_forward import MlpStyle, mlp
from paraplan.model.norm import NormKind, norm
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.spec import Matmul, SavedTensor
from paraplan.model.towers import TowerShape

_FUSED = ("attn.qkv", "attn.proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SIGLIP = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
_LLAMA = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj"))


def pair(config: ModelConfig, name: str, default: int) -> tuple[int, int]:
    """Return a size each way, of a field that holds one number or two."""
    value = config.fields.get(name)
    if not isinstance(value, list):
        size = config.count(name, default=default)
        return size, size
    if len(value) != 2 or not all(isinstance(item, int) and not isinstance(item, bool) and item > 0 for item in value):
        raise ModelError(
            f"{config.source}: {name}={value!r}, expected a whole number or two of them", hint=f"correct {name!r}"
        )
    return value[0], value[1]


def per_token(part: Part, patches: float) -> Part:
    """Return what a part that runs once for so many patches does of each."""

    def scaled(tensors: tuple[SavedTensor, ...]) -> tuple[SavedTensor, ...]:
        return tuple(one.replace(elements_per_token=one.elements_per_token / patches) for one in tensors)

    matmuls = tuple(one.replace(rows_per_token=one.rows_per_token / patches) for one in part.matmuls)
    return Part(part.parameters, matmuls, scaled(part.saved), scaled(part.saved_fused))


def two_layers(names: tuple[str, str], widths: tuple[int, int, int], *, bias: bool, activation: str = "gelu") -> Part:
    """Return two linear layers with an activation between."""
    entry, inner, output = widths
    part = kept("projector_input", entry, num_readers=1, weights_of=names[:1])
    part += linear(names[0], entry, inner, bias=bias)
    part += kept("activation_input", inner)
    part += kept("projector_inner_output", inner, weights_of=names[1:])
    return part + linear(names[1], inner, output, bias=bias)


def _patches(name: str, hidden: int, shape: tuple[int, ...], *, bias: bool) -> Part:
    """Return the convolution that makes features of patches, each pixel of which it reads once."""
    part = weight(f"{name}.weight", hidden, *shape)
    if bias:
        part += weight(f"{name}.bias", hidden)
    product = Part(matmuls=(Matmul(name=name, k=prod(shape), n=hidden),))
    return part + kept("pixels", prod(shape), weights_of=(name,)) + product


def _heads(config: ModelConfig, hidden: int, *names: str) -> Heads:
    count = config.count(*(names or ("num_attention_heads",)), default=16)
    return Heads(hidden, count, count, config.divide("hidden_size", hidden, "num_attention_heads", count))


def _grid(config: ModelConfig, image: int, patch: int) -> tuple[int, tuple[int, int]]:
    height, width = pair(config, "image_size", image)
    patch_height, patch_width = pair(config, "patch_size", patch)
    return (height // patch_height) * (width // patch_width), (patch_height, patch_width)


def siglip(config: ModelConfig) -> TowerShape:
    """SigLIP, and SmolVLM's: learned positions, norms with biases, a last norm; a head that pools where it is used."""
    hidden, inner = config.count("hidden_size", default=768), config.count("intermediate_size", default=3072)
    is_smolvlm = config.model_type != "siglip_vision_model"
    count, patch = _grid(config, 224, 32 if is_smolvlm else 16)
    patches = _patches("patch_embedding", hidden, (config.count("num_channels", default=3), *patch), bias=True)
    after = norm("post_layernorm", "layer", hidden)
    if not is_smolvlm and config.flag("vision_use_head", default=True):
        pooling = weight("head.probe", 1, 1, hidden) + weight("head.attention.in_proj_weight", 3 * hidden, hidden)
        pooling += weight("head.attention.in_proj_bias", 3 * hidden)
        pooling += linear("head.attention.out_proj", hidden, hidden, bias=True) + norm("head.norm", "layer", hidden)
        pooling += linear("head.mlp.fc1", hidden, inner, bias=True) + linear("head.mlp.fc2", inner, hidden, bias=True)
        after += Part(parameters=pooling.parameters)
    style = MlpStyle(("mlp.fc1", "mlp.fc2"), config.text("hidden_act", default="gelu_pytorch_tanh"), bias=True)
    return TowerShape(
        heads=_heads(config, hidden),
        depth=config.layers("num_hidden_layers", default=12),
        attention=AttentionStyle(_SIGLIP, qkv_bias=True, output_bias=True, rotary=False),
        norm_kind="layer",
        norms=("layer_norm1", "layer_norm2"),
        mlp=mlp(hidden, inner, style),
        patches=patches + weight("position_embedding.weight", count, hidden, layer="embedding"),
        after=after,
        projector=Part(),
        patches_per_token=1.0,
        picture=count,
    )


def clip(config: ModelConfig) -> TowerShape:
    """CLIP: a token of a class, learned positions, norms before the first and behind the last layer."""
    hidden, inner = config.count("hidden_size", default=768), config.count("intermediate_size", default=3072)
    count, patch = _grid(config, 224, 32)
    patches = _patches("patch_embedding", hidden, (config.count("num_channels", default=3), *patch), bias=False)
    patches += weight("class_embedding", hidden) + norm("pre_layrnorm", "layer", hidden)
    patches += weight("position_embedding.weight", count + 1, hidden, layer="embedding")
    style = MlpStyle(("mlp.fc1", "mlp.fc2"), config.text("hidden_act", default="quick_gelu"), bias=True)
    return TowerShape(
        heads=_heads(config, hidden),
        depth=config.layers("num_hidden_layers", default=12),
        attention=AttentionStyle(_SIGLIP, qkv_bias=True, output_bias=True, rotary=False),
        norm_kind="layer",
        norms=("layer_norm1", "layer_norm2"),
        mlp=mlp(hidden, inner, style),
        patches=patches,
        after=Part(parameters=norm("post_layernorm", "layer", hidden).parameters),
        projector=Part(),
        patches_per_token=1.0,
        picture=count,
    )


def pixtral(config: ModelConfig) -> TowerShape:
    """Pixtral's: rotary positions, gated MLPs, no biases; pictures of any size."""
    hidden, inner = config.count("hidden_size", default=1024), config.count("intermediate_size", default=4096)
    _, patch = _grid(config, 1024, 16)
    patches = _patches("patch_conv", hidden, (config.count("num_channels", default=3), *patch), bias=False)
    style = MlpStyle(
        tuple(f"feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
        config.text("hidden_act", default="gelu"),
        is_gated=True,
    )
    # Pictures of a batch are one sequence behind a mask that all layers read.
    mask = kept("attention_mask", pairs=1, kernels=("sdpa",), in_attention_core=True, by="modules")
    return TowerShape(
        heads=_heads(config, hidden),
        depth=config.layers("num_hidden_layers", default=24),
        attention=AttentionStyle(tuple(name.replace("self_attn", "attention") for name in _LLAMA)),
        norm_kind="rms",
        norms=("attention_norm", "ffn_norm"),
        mlp=mlp(hidden, inner, style),
        patches=patches + norm("ln_pre", "rms", hidden) + mask,
        projector=Part(),
        patches_per_token=1.0,
    )


def internvl(config: ModelConfig) -> TowerShape:
    """InternViT: a token of a class, learned positions, each layer's two sums scaled by weights."""
    hidden, inner = config.count("hidden_size", default=1024), config.count("intermediate_size", default=4096)
    count, patch = _grid(config, 448, 14)
    patches = _patches(
        "patch_embeddings.projection", hidden, (config.count("num_channels", default=3), *patch), bias=True
    )
    patches += weight("cls_token", 1, 1, hidden)
    if config.flag("use_mask_token", default=False):
        patches += weight("mask_token", 1, 1, hidden)
    if config.flag("use_absolute_position_embeddings", default=True):
        patches += weight("position_embeddings", 1, count + 1, hidden)
    is_rms = config.text("norm_type", default="layer_norm") == "rms_norm"
    kind: NormKind = "rms" if is_rms else "layer"
    style = MlpStyle(("mlp.fc1", "mlp.fc2"), config.text("hidden_act", default="gelu"), bias=True)
    scales = weight("lambda_1", hidden) + weight("lambda_2", hidden)
    scales += kept("layer_outputs", 2 * hidden, by="modules")
    names = tuple(f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "projection_layer"))
    return TowerShape(
        heads=_heads(config, hidden),
        depth=config.layers("num_hidden_layers", default=24),
        attention=AttentionStyle(
            names,
            qkv_bias=config.flag("attention_bias", default=False),
            output_bias=True,
            rotary=False,
            softmax_in_fp32=False,
            qk_norm="all_heads" if config.flag("use_qk_norm", default=False) else "none",
        ),
        norm_kind=kind,
        norms=("layernorm_before", "layernorm_after"),
        mlp=mlp(hidden, inner, style) + scales,
        patches=patches,
        after=Part() if config.flag("use_mean_pooling", default=True) else norm("layernorm", "layer", hidden),
        projector=Part(),
        patches_per_token=1.0,
        picture=count,
    )


def llama4(config: ModelConfig) -> TowerShape:
    """Llama 4's: a token of a class, learned and rotary positions; four patches become one token in its adapter."""
    hidden, inner = config.count("hidden_size", default=768), config.count("intermediate_size", default=5632)
    count, patch = _grid(config, 448, 14)
    pixels = config.count("num_channels", default=3) * patch[0] * patch[1]
    patches = kept("pixels", pixels) + linear("patch_embedding.linear", pixels, hidden, bias=False)
    patches += weight("class_embedding", hidden) + weight("positional_embedding_vlm", count + 1, hidden)
    patches += norm("layernorm_pre", "layer", hidden)
    merge = round(1 / config.fraction("pixel_shuffle_ratio", default=0.5) ** 2)
    entry, output = (config.count(f"projector_{name}_dim", default=4096) for name in ("input", "output"))
    adapter = kept("projector_input", inner, num_readers=1) + kept("projector_inner_output", 3 * entry)
    adapter += linear("vision_adapter.mlp.fc1", inner, entry, bias=False)
    adapter += linear("vision_adapter.mlp.fc2", output, output, bias=False)
    return TowerShape(
        heads=_heads(config, hidden),
        depth=config.layers("num_hidden_layers", default=34),
        attention=AttentionStyle(_LLAMA, qkv_bias=True, output_bias=True),
        norm_kind="layer",
        norms=("input_layernorm", "post_attention_layernorm"),
        mlp=mlp(hidden, inner, MlpStyle(("mlp.fc1", "mlp.fc2"), "gelu", bias=True)),
        patches=patches,
        after=norm("layernorm_post", "layer", hidden) + per_token(adapter, merge),
        projector=Part(),
        patches_per_token=float(merge),
        picture=count,
    )


def _volume(config: ModelConfig, hidden: int, patch: int, *, bias: bool) -> Part:
    frames = config.count("temporal_patch_size", default=2)
    shape = (config.count("in_channels", "in_chans", default=3), frames, *pair(config, "patch_size", patch))
    return _patches("patch_embed.proj", hidden, shape, bias=bias)


def qwen2_vl(config: ModelConfig) -> TowerShape:
    """Qwen2-VL's: LayerNorm, one projection of queries, keys and values; four patches become one token."""
    hidden = config.count("embed_dim", default=1280)
    inner = int(hidden * config.count("mlp_ratio", default=4))
    style = MlpStyle(("mlp.fc1", "mlp.fc2"), config.text("hidden_act", default="quick_gelu"), bias=True)
    shape = TowerShape(
        heads=_heads(config, hidden, "num_heads"),
        depth=config.layers("depth", default=32),
        attention=AttentionStyle(_FUSED, qkv_bias=True, output_bias=True, joins_outputs=True),
        norm_kind="layer",
        norms=("norm1", "norm2"),
        mlp=mlp(hidden, inner, style),
        patches=_volume(config, hidden, 14, bias=False),
        projector=Part(),
        patches_per_token=1.0,
    )
    return _with_merger(shape, config, config.count("hidden_size", default=3584), ("mlp.0", "mlp.2"), "ln_q")


def qwen2_5_vl(config: ModelConfig) -> TowerShape:
    """Qwen2.5-VL's: RMS norms, gated MLPs; all but a few layers attend within windows of pixels."""
    hidden, depth = config.count("hidden_size", default=3584), config.layers("depth", default=32)
    style = MlpStyle(_GATED, config.text("hidden_act", default="silu"), is_gated=True, bias=True)
    whole = config.indices("fullatt_block_indexes") or frozenset({7, 15, 23, 31})
    merge = config.count("spatial_merge_size", default=2)
    window = config.count("window_size", default=112) // merge // pair(config, "patch_size", 14)[0] * merge
    shape = TowerShape(
        heads=_heads(config, hidden, "num_heads"),
        depth=depth,
        attention=AttentionStyle(_FUSED, qkv_bias=True, output_bias=True, joins_outputs=True),
        norm_kind="rms",
        norms=("norm1", "norm2"),
        mlp=mlp(hidden, config.count("intermediate_size", default=3420), style),
        patches=_volume(config, hidden, 14, bias=False),
        windows=(window * window, depth - sum(index < depth for index in whole)),
        projector=Part(),
        patches_per_token=1.0,
    )
    return _with_merger(shape, config, config.count("out_hidden_size", default=3584), ("mlp.0", "mlp.2"), "ln_q")


def qwen3_vl(config: ModelConfig) -> TowerShape:
    """Qwen3-VL's and Qwen3.5's: learned positions too; features of some layers (deepstack) have their own mergers."""
    hidden, inner = config.count("hidden_size", default=1152), config.count("intermediate_size", default=4304)
    output = config.count("out_hidden_size", default=3584)
    style = MlpStyle(
        ("mlp.linear_fc1", "mlp.linear_fc2"), config.text("hidden_act", default="gelu_pytorch_tanh"), bias=True
    )
    positions = config.count("num_position_embeddings", default=2304)
    mergers, merge = Part(), config.count("spatial_merge_size", default=2) ** 2
    layers = config.fields.get("deepstack_visual_indexes", [8, 16, 24])
    for index in range(0 if config.model_type.startswith("qwen3_5") else len(layers)):
        name, width = f"deepstack_merger_list.{index}", merge * hidden
        part = norm(f"{name}.norm", "layer", width)
        part += two_layers((f"{name}.linear_fc1", f"{name}.linear_fc2"), (width, width, output), bias=True)
        mergers += per_token(part, merge)
    patches = _volume(config, hidden, 16, bias=True) + weight("pos_embed.weight", positions, hidden, layer="embedding")
    shape = TowerShape(
        heads=_heads(config, hidden, "num_heads"),
        depth=config.layers("depth", default=27),
        attention=AttentionStyle(_FUSED, qkv_bias=True, output_bias=True, joins_outputs=True),
        norm_kind="layer",
        norms=("norm1", "norm2"),
        mlp=mlp(hidden, inner, style),
        patches=patches,
        projector=mergers,
        patches_per_token=1.0,
    )
    return _with_merger(shape, config, output, ("linear_fc1", "linear_fc2"), "norm")


def glm4v(config: ModelConfig) -> TowerShape:
    """GLM-4V's: learned positions, gated MLPs without biases; a convolution and a gated merger make tokens."""
    hidden = config.count("hidden_size", default=1536)
    inner, output = config.count("intermediate_size", default=13696), config.count("out_hidden_size", default=4096)
    count, _ = _grid(config, 336, 14)
    bias, merge = config.flag("attention_bias", default=False), config.count("spatial_merge_size", default=2)
    activation = config.text("hidden_act", default="silu")
    patches = _volume(config, hidden, 14, bias=True) + norm("post_conv_layernorm", "rms", hidden)
    patches += weight("embeddings.position_embedding.weight", count, hidden, layer="embedding")
    merger = _patches("downsample", output, (hidden, merge, merge), bias=True)
    merger += kept("projector_input", output, num_readers=1) + linear("merger.proj", output, output, bias=False)
    merger += norm("merger.post_projection_norm", "layer", output) + kept("activation_input", output)
    names = tuple(f"merger.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
    merger += mlp(output, inner, MlpStyle(names, activation, is_gated=True))
    style = MlpStyle(_GATED, activation, is_gated=True)
    return TowerShape(
        heads=_heads(config, hidden, "num_heads"),
        depth=config.layers("depth", default=24),
        attention=AttentionStyle(_FUSED, qkv_bias=bias, joins_outputs=True),
        norm_kind="rms",
        norms=("norm1", "norm2"),
        mlp=mlp(hidden, output, style),
        patches=patches,
        after=norm("post_layernorm", "rms", hidden),
        projector=per_token(merger, merge * merge),
        patches_per_token=float(merge * merge),
    )


def gemma4(config: ModelConfig) -> TowerShape:
    """Gemma 4's: a table of positions each way, norms before and behind attention and MLPs; squares are averaged."""
    hidden, inner = config.count("hidden_size", default=768), config.count("intermediate_size", default=3072)
    pixels = 3 * config.count("patch_size", default=16) ** 2
    patches = kept("pixels", pixels, weights_of=("input_proj",)) + linear("input_proj", pixels, hidden, bias=False)
    patches += weight("position_embedding_table", 2, config.count("position_embedding_size", default=10240), hidden)
    heads, kv_heads = (config.count(name, default=12) for name in ("num_attention_heads", "num_key_value_heads"))
    merge = config.count("pooling_kernel_size", default=3) ** 2
    style = MlpStyle(_GATED, config.text("hidden_activation", default="gelu_pytorch_tanh"), is_gated=True)
    return TowerShape(
        heads=Heads(hidden, heads, kv_heads, config.count("head_dim", default=64)),
        depth=config.layers("num_hidden_layers", default=16),
        attention=AttentionStyle(_LLAMA, qk_norm="per_head", qk_norm_kind="rms_in_fp32", norms_values=True),
        norm_kind="rms_in_fp32",
        norms=FOUR_NORMS,
        mlp=mlp(hidden, inner, style),
        patches=patches,
        projector=Part(),
        patches_per_token=float(merge),
    )


def _with_merger(
    shape: TowerShape, config: ModelConfig, output: int, names: tuple[str, str], norm_name: str
) -> TowerShape:
    """Return the shape with what merges neighbouring patches to one token: a norm of each, two layers of all."""
    merge, hidden = config.count("spatial_merge_size", default=2) ** 2, shape.heads.hidden
    width = merge * hidden
    layers = (f"merger.{names[0]}", f"merger.{names[1]}")
    part = norm(f"merger.{norm_name}", shape.norm_kind, hidden)
    part += per_token(two_layers(layers, (width, width, output), bias=True), merge)
    return replace(shape, projector=part + shape.projector, patches_per_token=float(merge))


ENCODERS_OF_PICTURES: dict[str, Callable[[ModelConfig], TowerShape]] = {
    "siglip_vision_model": siglip,
    "smolvlm_vision": siglip,
    "idefics3_vision": siglip,
    "clip_vision_model": clip,
    "pixtral": pixtral,
    "internvl_vision": internvl,
    "llama4_vision_model": llama4,
    "qwen2_vl_vision": qwen2_vl,
    "qwen2_5_vl_vision": qwen2_5_vl,
    "qwen2_5_omni_vision_encoder": qwen2_5_vl,
    "qwen3_omni_moe_vision_encoder": qwen3_vl,
    **dict.fromkeys(("qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_5_vision", "qwen3_5_moe_vision"), qwen3_vl),
    "gemma4_vision": gemma4,
    **dict.fromkeys(("glm4v_vision", "glm4v_moe_vision"), glm4v),
}
"""Encoder by the `model_type` of a `vision_config`."""
