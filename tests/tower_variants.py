"""Small random configurations of language models with towers. Not a test module itself."""

from __future__ import annotations

from typing import Any

_FLAG = (True, False)
_TEXT: dict[str, tuple[Any, ...]] = {
    "vocab_size": (96, 131),
    "hidden_size": (64, 128),
    "intermediate_size": (80, 192),
    "num_hidden_layers": (6, 8),
    "num_attention_heads": (4, 8),
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (16, 32),
    "max_position_embeddings": (256,),
    "pad_token_id": (None,),
}
_LINEAR: dict[str, tuple[Any, ...]] = {
    "linear_num_key_heads": (2,),
    "linear_num_value_heads": (2, 4),
    "linear_key_head_dim": (16, 24),
    "linear_value_head_dim": (24, 32),
}
_EXPERTS: dict[str, tuple[Any, ...]] = {
    "num_experts": (4, 6),
    "num_experts_per_tok": (2,),
    "moe_intermediate_size": (24, 48),
    "shared_expert_intermediate_size": (64, 80),
}
_QWEN: dict[str, tuple[Any, ...]] = {
    "depth": (2, 3),
    "hidden_size": (32, 48),
    "intermediate_size": (48, 64),
    "num_heads": (2, 4),
    "patch_size": (14, 16),
    "spatial_merge_size": (2,),
    "temporal_patch_size": (1, 2),
}
_POSITIONS: dict[str, tuple[Any, ...]] = {"num_position_embeddings": (16, 64)}
_VIT: dict[str, tuple[Any, ...]] = {
    "hidden_size": (32, 48),
    "intermediate_size": (48, 64),
    "num_hidden_layers": (2, 3),
    "num_attention_heads": (2, 4),
    "image_size": (56, 112),
    "patch_size": (14,),
    "num_channels": (3,),
}


def _kind(name: str) -> dict[str, tuple[Any, ...]]:
    return {"model_type": (name,)}


_DEEPSTACK: dict[str, tuple[Any, ...]] = {"deepstack_visual_indexes": ([0], [0, 1])}
_SQUARE: dict[str, tuple[Any, ...]] = {"image_size": ([56, 56],), "patch_size": ([14, 14],)}
_WIDTH = {"out_hidden_size": "hidden_size"}

# family: (class, fields of the text model, of the tower, of both, fields of the tower that repeat one of the text's)
TOWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        _TEXT,
        {**_QWEN, "embed_dim": (32, 48), "mlp_ratio": (2, 4)},
        {},
        {"hidden_size": "hidden_size"},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        _TEXT,
        _QWEN | {"fullatt_block_indexes": ([1], [0, 1])},
        {"tie_word_embeddings": _FLAG},
        _WIDTH,
    ),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", _TEXT, _QWEN | _POSITIONS | _DEEPSTACK, {}, _WIDTH),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        _TEXT | _EXPERTS,
        _QWEN | _POSITIONS | _DEEPSTACK,
        {"tie_word_embeddings": _FLAG},
        _WIDTH,
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        _TEXT | _LINEAR,
        _QWEN | _POSITIONS,
        {"tie_word_embeddings": _FLAG},
        _WIDTH,
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        _TEXT | _LINEAR | _EXPERTS,
        _QWEN | _POSITIONS,
        {"tie_word_embeddings": _FLAG},
        _WIDTH,
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        _TEXT | _kind("gemma3_text"),
        _VIT | {"vision_use_head": _FLAG},
        {"mm_tokens_per_image": (4, 16)},
        {},
    ),
    "mistral3": ("Mistral3ForConditionalGeneration", _TEXT | _kind("mistral"), _VIT | _kind("pixtral"), {}, {}),
    "llava": (
        "LlavaForConditionalGeneration",
        _TEXT | _kind("llama"),
        _VIT | _kind("clip_vision_model"),
        {"multimodal_projector_bias": _FLAG, "vision_feature_layer": (-2, [-2, -1])},
        {},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        _TEXT | _kind("qwen2"),
        _VIT | _kind("internvl_vision") | _SQUARE | {"use_qk_norm": _FLAG, "attention_bias": _FLAG},
        {},
        {},
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        _TEXT | _kind("llama"),
        _VIT | _kind("smolvlm_vision"),
        {"tie_word_embeddings": _FLAG, "scale_factor": (2, 4)},
        {},
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        _TEXT | _kind("llama"),
        _VIT | _kind("idefics3_vision"),
        {"tie_word_embeddings": _FLAG},
        {},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        _TEXT
        | _kind("gemma4_text")
        | {
            "num_hidden_layers": (6,),
            "global_head_dim": (32,),
            "vocab_size_per_layer_input": (96,),
            "hidden_size_per_layer_input": (0, 16),
        },
        _kind("gemma4_vision")
        | {
            "hidden_size": (32, 48),
            "intermediate_size": (48, 64),
            "num_hidden_layers": (2, 3),
            "num_attention_heads": (4,),
            "num_key_value_heads": (2, 4),
            "head_dim": (8, 16),
            "patch_size": (16,),
            "position_embedding_size": (64,),
        },
        {},
        {},
    ),
    "qwen2_5_omni_thinker": (
        "Qwen2_5OmniThinkerForConditionalGeneration",
        {name: values for name, values in _TEXT.items() if name != "head_dim"},
        _QWEN | {"fullatt_block_indexes": ([1], [0, 1])},
        {},
        _WIDTH,
    ),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        _TEXT | _EXPERTS,
        _QWEN | _POSITIONS | _DEEPSTACK,
        {},
        _WIDTH,
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        _TEXT | _kind("llama4_text") | {"num_local_experts": (4, 6), "intermediate_size_mlp": (96, 160)},
        _VIT
        | _kind("llama4_vision_model")
        | {
            "hidden_size": (32,),
            "intermediate_size": (128,),
            "projector_input_dim": (48,),
            "projector_output_dim": (48,),
            "vision_output_dim": (48,),
        },
        {},
        {},
    ),
    "glm4v": (
        "Glm4vForConditionalGeneration",
        _TEXT | _kind("glm4v_text"),
        _QWEN | _kind("glm4v_vision") | {"image_size": (56, 112), "patch_size": (14,)},
        {},
        _WIDTH,
    ),
    "glm4v_moe": (
        "Glm4vMoeForConditionalGeneration",
        _TEXT | _kind("glm4v_moe_text") | {**_EXPERTS, "n_routed_experts": (4, 6)},
        _QWEN | _kind("glm4v_moe_vision") | {"image_size": (56, 112), "patch_size": (14,)},
        {},
        _WIDTH,
    ),
}


_WHISPER: dict[str, tuple[Any, ...]] = {
    "d_model": (32, 48),
    "encoder_layers": (2, 3),
    "encoder_attention_heads": (2, 4),
    "encoder_ffn_dim": (64, 80),
    "num_mel_bins": (16, 32),
}
SOUND: dict[str, dict[str, Any]] = {
    "gemma4": {
        "hidden_size": (32, 64),
        "num_hidden_layers": (2, 3),
        "num_attention_heads": (2, 4),
        "subsampling_conv_channels": ([128, 16], [128, 32]),
        "output_proj_dims": (24, 48),
    },
    "qwen2_5_omni_thinker": _WHISPER,
    "qwen3_omni_moe_thinker": _WHISPER | {"downsample_hidden_size": (12, 16)},
}
"""Fields of towers for sound by family; their output is as wide as the text model where nothing else is drawn."""


def tower_fields(family: str, choose: Any) -> dict[str, Any]:
    """Return the fields of one configuration, each drawn by `choose`."""
    class_name, text, vision, both, repeated = TOWERS[family]
    parts = [{name: choose(values) for name, values in each.items()} for each in (text, vision, both)]
    parts[1] |= {name: parts[0][own] for name, own in repeated.items()}
    if family in SOUND:
        sound = {name: choose(values) for name, values in SOUND[family].items()}
        parts[2]["audio_config"] = {"output_dim": parts[0]["hidden_size"]} | sound
    return {
        "model_type": family,
        "architectures": [class_name],
        "text_config": parts[0],
        "vision_config": parts[1],
        **parts[2],
    }
