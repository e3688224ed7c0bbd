"""Language models with a tower for pictures: what each family's config says of both parts and of what joins them.

Shapes and defaults are those of the transformers library's configuration and model classes, read in version 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from paraplan.errors import ModelError
from paraplan.model.config_file import ModelConfig
from paraplan.model.families import MODERN, Flag, ModernFamily
from paraplan.model.families_dense import DENSE
from paraplan.model.families_experts import EXPERTS, NUM_EXPERTS, QWEN3_MOE, every_mixture_layers
from paraplan.model.norm import norm
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.sound_encoders import ENCODERS_OF_SOUND
from paraplan.model.spec import Matmul, ModelSpec
from paraplan.model.towers import TowerShape, with_tower
from paraplan.model.vision_encoders import ENCODERS_OF_PICTURES, per_token, two_layers

Reader = Callable[[ModelConfig], ModelSpec]
Joined = Callable[[ModelConfig, TowerShape, int], TowerShape]


class MultimodalFamily(NamedTuple):
    """`text` and `vision` are the model types of configs that do not name theirs.

    `join` puts the projector behind the tower, None where that has its own, and `join_sound` that of the tower for
    sound, which families with an `audio` have where their config describes it. `tied` is what an absent
    `tie_word_embeddings` means, None for what the text model's means.
    """

    text: str
    vision: str
    join: Joined | None = None
    tied: bool | None = False
    audio: str | None = None
    join_sound: Joined | None = None


def read_multimodal(config: ModelConfig, family: MultimodalFamily, readers: Mapping[str, Reader]) -> ModelSpec:
    """Return the language model of a config's `text_config` with the towers of its `vision_config` and `audio_config`.

    Older files name the fields of the text model beside `vision_config`. A tower whose section is null is not there.
    """
    text = _text(config, family)
    if text.model_type not in readers:
        raise ModelError(
            f"{config.source}: text_config has model_type={text.model_type!r}, which no reader describes",
            hint="give a factory as file.py:factory",
        )
    model = readers[text.model_type](text)
    for name, section, join in _towers(config, family):
        if section.model_type not in _ENCODERS[name]:
            raise ModelError(
                f"{config.source}: {name} has model_type={section.model_type!r}, which no reader describes",
                hint="give a factory as file.py:factory",
            )
        shape = _ENCODERS[name][section.model_type](section)
        model = with_tower(model, shape if join is None else join(config, shape, model.hidden_size))
    return model.replace(model_type=config.model_type)


_ENCODERS = {"vision_config": ENCODERS_OF_PICTURES, "audio_config": ENCODERS_OF_SOUND}


def _towers(config: ModelConfig, family: MultimodalFamily) -> Iterator[tuple[str, ModelConfig, Joined | None]]:
    if config.fields.get("vision_config", {}) is not None:
        yield "vision_config", _section(config, "vision_config", family.vision), family.join
    if family.audio is not None and config.fields.get("audio_config", {}) is not None:
        yield "audio_config", _section(config, "audio_config", family.audio), family.join_sound


def is_described(config: ModelConfig, readers: Mapping[str, Reader]) -> bool:
    """Return whether both parts of a config are of kinds that have readers."""
    family = MULTIMODAL.get(config.model_type)
    if family is None:
        return False
    towers = _towers(config, family)
    return _text(config, family).model_type in readers and all(
        section.model_type in _ENCODERS[name] for name, section, _ in towers
    )


def _text(config: ModelConfig, family: MultimodalFamily) -> ModelConfig:
    own = {name: value for name, value in config.fields.items() if not name.endswith("_config")}
    inner = config.section("text_config").fields
    tied = own.get("tie_word_embeddings", inner.get("tie_word_embeddings") if family.tied is None else family.tied)
    fields = {"model_type": family.text, **(inner or own)}
    fields |= {"architectures": own.get("architectures"), "tie_word_embeddings": tied}
    fields = {name: value for name, value in fields.items() if value is not None}
    if fields["model_type"] == config.model_type:
        fields["model_type"] = family.text
    return replace(config, source=f"{config.source}: text_config" if inner else config.source, fields=fields)


def _section(config: ModelConfig, name: str, model_type: str) -> ModelConfig:
    section = config.section(name)
    named = section.fields.get("model_type")
    fields = {**section.fields, "model_type": model_type if named in (None, config.model_type) else named}
    return replace(section, fields=fields)


def _two_linear(config: ModelConfig, shape: TowerShape, hidden: int) -> TowerShape:
    """LLaVA's projector: two layers for each patch, of the last layer but one without its class token."""
    layers = config.fields.get("vision_feature_layer")
    width = shape.heads.hidden * (len(layers) if isinstance(layers, list) else 1)
    bias = config.flag("multimodal_projector_bias", default=True)
    return replace(shape, projector=two_layers(("linear_1", "linear_2"), (width, hidden, hidden), bias=bias))


def _mistral3(config: ModelConfig, shape: TowerShape, hidden: int) -> TowerShape:
    """Mistral 3's: a norm, the patches of a square merged by one layer, two layers for each token."""
    merge, width = config.count("spatial_merge_size", default=2) ** 2, shape.heads.hidden
    bias = config.flag("multimodal_projector_bias", default=False)
    layer = "patch_merger.merging_layer"
    part = kept("projector_input", merge * width, weights_of=(layer,)) + linear(layer, merge * width, width, bias=False)
    part += two_layers(("linear_1", "linear_2"), (width, hidden, hidden), bias=bias)
    projector = norm("norm", "rms", width) + per_token(part, merge)
    return replace(shape, projector=projector, patches_per_token=float(merge))


def _gemma3(config: ModelConfig, shape: TowerShape, hidden: int) -> TowerShape:
    """Gemma 3's: patches are averaged to 256 tokens of a picture, then a norm and one product."""
    width, tokens = shape.heads.hidden, config.count("mm_tokens_per_image", default=256)
    assert shape.picture is not None
    each = shape.picture / tokens
    part = weight("mm_input_projection_weight", width, hidden) + norm("mm_soft_emb_norm", "rms_in_fp32", width)
    part += kept("projector_input", width, num_readers=1)
    part += Part(matmuls=(Matmul(name="mm_input_projection", k=width, n=hidden),))
    return replace(shape, projector=per_token(part, each), patches_per_token=each)


def _internvl(config: ModelConfig, shape: TowerShape, hidden: int) -> TowerShape:
    """InternVL's: four patches side by side, a norm, two layers."""
    merge = int(1 / config.fraction("downsample_ratio", default=0.5)) ** 2
    width = merge * shape.heads.hidden
    part = norm("layer_norm", "layer", width)
    part += two_layers(("linear_1", "linear_2"), (width, hidden, hidden), bias=True)
    return replace(shape, projector=per_token(part, merge), patches_per_token=float(merge))


def _smolvlm(config: ModelConfig, shape: TowerShape, hidden: int) -> TowerShape:
    """SmolVLM's: the patches of a square side by side, one layer."""
    merge = config.count("scale_factor", default=2) ** 2
    name, width = "modality_projection.proj", merge * shape.heads.hidden
    part = kept("projector_input", width, weights_of=(name,)) + linear(name, width, hidden, bias=False)
    return replace(shape, projector=per_token(part, merge), patches_per_token=float(merge))


def _llama4(config: ModelConfig, shape: TowerShape, hidden: int) -> TowerShape:
    """Llama 4's: one layer for each token."""
    width = config.section("vision_config").count("vision_output_dim", default=7680)
    part = kept("projector_input", width, weights_of=("linear_1",)) + linear("linear_1", width, hidden, bias=False)
    return replace(shape, projector=per_token(part, shape.patches_per_token))


def _gemma4(config: ModelConfig, shape: TowerShape, hidden: int) -> TowerShape:
    """Gemma 4's: squares of patches are averaged, then a norm and one product; frames of sound are as they are."""
    is_sound, name = shape.kind == "audio", "embedding_projection"
    own = config.section("audio_config" if is_sound else "vision_config")
    width = own.count("output_proj_dims", default=1536) if is_sound else shape.heads.hidden
    part = norm("embedding_pre_projection_norm", "rms_without_weights", width)
    part += kept("projector_input", width, num_readers=1, weights_of=(name,)) + linear(name, width, hidden, bias=False)
    return replace(shape, projector=per_token(part, shape.patches_per_token))


def thinker(config: ModelConfig, family: MultimodalFamily, readers: Mapping[str, Reader]) -> ModelSpec:
    """Return the thinker of a model that also speaks: what is fine-tuned, without the talker behind it."""
    section = config.section("thinker_config")
    fields = {**section.fields, "model_type": f"{config.model_type}_thinker"}
    return read_multimodal(replace(section, fields=fields), family, readers)


MULTIMODAL: dict[str, MultimodalFamily] = {
    "qwen2_vl": MultimodalFamily("qwen2_vl_text", "qwen2_vl_vision"),
    "qwen2_5_vl": MultimodalFamily("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "qwen3_vl": MultimodalFamily("qwen3_vl_text", "qwen3_vl_vision"),
    "qwen3_vl_moe": MultimodalFamily("qwen3_vl_moe_text", "qwen3_vl_moe_vision"),
    "qwen3_5": MultimodalFamily("qwen3_5_text", "qwen3_5_vision"),
    "qwen3_5_moe": MultimodalFamily("qwen3_5_moe_text", "qwen3_5_moe_vision"),
    "gemma3": MultimodalFamily("gemma3_text", "siglip_vision_model", _gemma3, tied=True),
    "mistral3": MultimodalFamily("mistral", "pixtral", _mistral3, tied=True),
    "llava": MultimodalFamily("llama", "clip_vision_model", _two_linear),
    "internvl": MultimodalFamily("qwen2", "internvl_vision", _internvl, tied=True),
    "smolvlm": MultimodalFamily("llama", "smolvlm_vision", _smolvlm),
    "idefics3": MultimodalFamily("llama", "idefics3_vision", _smolvlm),
    "gemma4": MultimodalFamily(
        "gemma4_text", "gemma4_vision", _gemma4, tied=True, audio="gemma4_audio", join_sound=_gemma4
    ),
    "qwen2_5_omni_thinker": MultimodalFamily(
        "qwen2_5_omni_text", "qwen2_5_omni_vision_encoder", audio="qwen2_5_omni_audio_encoder"
    ),
    "qwen3_omni_moe_thinker": MultimodalFamily(
        "qwen3_omni_moe_text", "qwen3_omni_moe_vision_encoder", audio="qwen3_omni_moe_audio_encoder"
    ),
    "llama4": MultimodalFamily("llama4_text", "llama4_vision_model", _llama4),
    "glm4v": MultimodalFamily("glm4v_text", "glm4v_vision"),
    "glm4v_moe": MultimodalFamily("glm4v_moe_text", "glm4v_moe_vision"),
}
"""Family by the `model_type` of a config with a `vision_config`."""

_GLM_BIAS = Flag("attention_bias", default=True)

TEXT_PARTS: dict[str, ModernFamily] = {
    "qwen2_vl_text": MODERN["qwen2"]._replace(kv_heads=8, reads_head_dim=False),
    "qwen2_5_vl_text": MODERN["qwen2"]._replace(kv_heads=8, reads_head_dim=False),
    "qwen2_5_omni_text": MODERN["qwen2"]._replace(kv_heads=4, reads_head_dim=False),
    "qwen3_vl_text": MODERN["qwen3"],
    "qwen3_omni_moe_text": EXPERTS["qwen3_moe"],
    "qwen3_vl_moe_text": EXPERTS["qwen3_moe"]._replace(
        kv_heads=16,
        head_dim=128,
        layers=partial(
            every_mixture_layers,
            fields=QWEN3_MOE._replace(num_experts=(NUM_EXPERTS, 60), per_token=(("num_experts_per_tok",), 4)),
        ),
    ),
    "glm4v_text": DENSE["glm4"]._replace(head_dim=None, reads_head_dim=False, qkv_bias=True),
    "glm4v_moe_text": EXPERTS["glm4_moe"]._replace(qkv_bias=_GLM_BIAS, qk_norm=None),
}
"""Text models that are parts of others alone."""
