"""Encoders of sound: those of Qwen2.5-Omni and Qwen3-Omni, made after Whisper, and Gemma 4's conformer.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
What counts is a frame behind the convolutions; those run over more of them before.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from paraplan.model.attention import AttentionStyle, Heads
from paraplan.model.config_file import ModelConfig
from paraplan.model.feed_forward import MlpStyle, mlp
from paraplan.model.norm import norm
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.spec import Matmul
from paraplan.model.towers import TowerShape
from paraplan.model.vision_encoders import per_token, two_layers

_WHISPER = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj"))


def _convolution(
    name: str, shape: tuple[int, ...], places: tuple[float, float], *, bias: bool = True, groups: int = 1
) -> Part:
    """Return a convolution from so many places of a frame to so many; `shape` is [out, in, kernel...]."""
    outputs, inputs, *kernel = shape
    before, after = places
    part = weight(f"{name}.weight", *shape) + (weight(f"{name}.bias", outputs) if bias else Part())
    part += kept("convolution_input", inputs * groups * before, weights_of=(name,))
    product = Matmul(name=name, k=inputs * prod(kernel), n=outputs // groups, rows_per_token=after * groups)
    return part + Part(matmuls=(product,)) + kept("convolution_output", outputs * after)


def _whisper(
    config: ModelConfig, *, entry: Part, projector: Part, window: int, per_token: float, key_bias: bool
) -> TowerShape:
    """Return layers of Whisper's kind, all of which attend within windows."""
    hidden, inner = config.count("d_model", default=1280), config.count("encoder_ffn_dim", default=5120)
    heads = config.count("encoder_attention_heads", default=20)
    depth = config.layers("encoder_layers", default=32)
    style = MlpStyle(("fc1", "fc2"), config.text("activation_function", default="gelu"), bias=True)
    return TowerShape(
        heads=Heads(hidden, heads, heads, config.divide("d_model", hidden, "encoder_attention_heads", heads)),
        depth=depth,
        attention=AttentionStyle(_WHISPER, qkv_bias=True, key_bias=key_bias, output_bias=True, rotary=False),
        norm_kind="layer",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        mlp=mlp(hidden, inner, style),
        patches=entry,
        after=norm("ln_post", "layer", hidden),
        projector=projector,
        patches_per_token=per_token,
        windows=(window, depth),
        kind="audio",
    )


def qwen2_5_omni(config: ModelConfig) -> TowerShape:
    """Qwen2.5-Omni's: two convolutions, the second of every other frame; two frames are averaged to a token."""
    hidden, output = config.count("d_model", default=1280), config.count("output_dim", default=3584)
    entry = _convolution("conv1", (hidden, config.count("num_mel_bins", default=128), 3), (2.0, 2.0))
    entry += _convolution("conv2", (hidden, hidden, 3), (2.0, 1.0))
    entry += weight("audio_bos_eos_token.weight", 2, output, layer="embedding")
    projection = kept("projector_input", hidden, weights_of=("proj",)) + linear("proj", hidden, output, bias=True)
    return _whisper(
        config,
        entry=entry,
        projector=per_token(projection, 2),
        window=config.count("n_window", default=100),
        per_token=2.0,
        key_bias=False,
    )


def qwen3_omni(config: ModelConfig) -> TowerShape:
    """Qwen3-Omni's: three convolutions over time and pitch, each of every other place both ways; a frame is a token."""
    hidden, output = config.count("d_model", default=1280), config.count("output_dim", default=3584)
    channels, pitches = config.count("downsample_hidden_size", default=480), config.count("num_mel_bins", default=128)
    entry, frames, inputs = Part(), 8.0, 1
    for index in range(1, 4):
        before, pitches, frames = frames * pitches, (pitches + 1) // 2, frames / 2
        entry += _convolution(f"conv2d{index}", (channels, inputs, 3, 3), (before, frames * pitches))
        inputs = channels
    entry += linear("conv_out", channels * pitches, hidden, bias=False)
    chunk = 2 * config.count("n_window", default=50)
    tokens = -(-chunk // 8)
    return _whisper(
        config,
        entry=entry,
        projector=two_layers(("proj1", "proj2"), (hidden, hidden, output), bias=True),
        window=max(1, tokens * (config.count("n_window_infer", default=800) // chunk)),
        per_token=1.0,
        key_bias=True,
    )


def gemma4(config: ModelConfig) -> TowerShape:
    """Gemma 4's conformer: two MLPs and a convolution over time in a layer, attention within chunks of frames."""
    hidden, heads = config.count("hidden_size", default=1024), config.count("num_attention_heads", default=8)
    head_dim = config.divide("hidden_size", hidden, "num_attention_heads", heads)
    first, second = config.counts("subsampling_conv_channels", default=(128, 32))
    pitches = first  # a quarter of them is left, which the width of the projection behind follows
    entry = _convolution("layer0.conv", (first, 1, 3, 3), (4.0 * pitches, 2.0 * pitches / 2), bias=False)
    entry += weight("layer0.norm.weight", first)
    entry += _convolution("layer1.conv", (second, first, 3, 3), (2.0 * pitches / 2, pitches / 4), bias=False)
    entry += weight("layer1.norm.weight", second) + linear("input_proj", first // 4 * second, hidden, bias=False)
    output = config.count("output_proj_dims", default=1536)
    after = kept("projection_input", hidden, weights_of=("output_proj",))
    after += linear("output_proj", hidden, output, bias=True)
    activation = config.text("hidden_act", default="silu")
    layer = Part()
    for name in ("feed_forward1", "feed_forward2"):
        style = MlpStyle((f"{name}.ffw_layer_1", f"{name}.ffw_layer_2"), activation)
        layer += mlp(hidden, 4 * hidden, style)
    kernel = config.count("conv_kernel_size", default=5)
    layer += kept("convolution_input", hidden, weights_of=("lconv1d.linear_start",))
    layer += linear("lconv1d.linear_start", hidden, 2 * hidden, bias=False) + kept("convolution_output", 2 * hidden)
    layer += _convolution("lconv1d.depthwise_conv1d", (hidden, 1, kernel), (1.0, 1.0), bias=False, groups=hidden)
    layer += kept("activation_input", hidden) + kept("convolution_output", hidden)
    layer += linear("lconv1d.linear_end", hidden, hidden, bias=False)
    layer += linear("self_attn.relative_k_proj", hidden, hidden, bias=False) + weight(
        "self_attn.per_dim_scale", head_dim
    )
    past = config.count("attention_context_left", default=13) + config.size("attention_context_right", default=0)
    depth = config.layers("num_hidden_layers", default=12)
    names: tuple[str, ...] = (
        "norm_pre_attn",
        "norm_post_attn",
        "norm_out",
        "lconv1d.pre_layer_norm",
        "lconv1d.conv_norm",
    )
    names += tuple(f"feed_forward{index}.{which}_layer_norm" for index in (1, 2) for which in ("pre", "post"))
    return TowerShape(
        heads=Heads(hidden, heads, heads, head_dim),
        depth=depth,
        attention=AttentionStyle((*_WHISPER[:3], "self_attn.post"), rotary=False),
        norm_kind="rms_in_fp32",
        norms=names,
        mlp=layer,
        patches=entry,
        after=after,
        projector=Part(),
        patches_per_token=1.0,
        windows=(config.count("attention_chunk_size", default=12) + past - 1, depth),
        kind="audio",
    )


ENCODERS_OF_SOUND: dict[str, Callable[[ModelConfig], TowerShape]] = {
    "qwen2_5_omni_audio_encoder": qwen2_5_omni,
    "qwen3_omni_moe_audio_encoder": qwen3_omni,
    "gemma4_audio": gemma4,
}
"""Encoder by the `model_type` of an `audio_config`."""
