"""Small random configurations of every family, for comparisons with transformers. Not a test module itself."""

from __future__ import annotations

import random
from typing import Any

from linear_variants import LINEAR

_HEADS = {"num_attention_heads": (4, 8), "num_key_value_heads": (1, 2, 4)}
_MODERN: dict[str, tuple[Any, ...]] = {
    "vocab_size": (96, 131),
    "hidden_size": (64, 128),
    "intermediate_size": (80, 192),
    "num_hidden_layers": (2, 5),
    "max_position_embeddings": (256,),
    "tie_word_embeddings": (True, False),
    **_HEADS,
}
_FLAG = (True, False)
_NO_CACHE_IDS = {"pad_token_id": (None,), "bos_token_id": (None,), "eos_token_id": (None,)}
_MLM = {
    "vocab_size": (96, 131),
    "hidden_size": (64, 128),
    "intermediate_size": (80, 192),
    "num_hidden_layers": (2, 3),
    "num_attention_heads": (4, 8),
    "max_position_embeddings": (64, 512),
    "type_vocab_size": (1, 2, 3),
    "tie_word_embeddings": (True, False),
    "hidden_act": ("gelu", "relu", "gelu_new"),
    "hidden_dropout_prob": (0.0, 0.1),
    "attention_probs_dropout_prob": (0.0, 0.1),
    "num_labels": (1, 2, 5),
}
_GPT = {
    "vocab_size": (96, 131),
    "n_embd": (64, 128),
    "n_layer": (2, 3),
    "n_head": (4, 8),
    "n_positions": (128, 256),
    "n_inner": (None, 96),
    "tie_word_embeddings": (True, False),
    "attn_pdrop": (0.0, 0.1),
    "resid_pdrop": (0.0, 0.1),
    "embd_pdrop": (0.0, 0.1),
}
_GEMMA = {"head_dim": (16, 32), "attention_bias": _FLAG}

_SHARED: dict[str, tuple[Any, ...]] = {
    "attention_bias": _FLAG,
    "head_dim": (16, 32),
    "n_routed_experts": (8, 16),
    "n_shared_experts": (1, 2),
    "num_experts_per_tok": (2, 3),
    "moe_intermediate_size": (32, 48),
    "first_k_dense_replace": (0, 1),
    "n_group": (1,),
    "topk_group": (1,),
}
_LATENT = {key: value for key, value in _MODERN.items() if key != "num_key_value_heads"} | {
    "attention_bias": _FLAG,
    "q_lora_rank": (None, 24),
    "kv_lora_rank": (16, 32),
    "qk_nope_head_dim": (16, 32),
    "qk_rope_head_dim": (8, 16),
    "v_head_dim": (16, 24),
}
_INDEXED = {"index_n_heads": (2, 4), "index_head_dim": (16, 32), "index_topk": (32, 64)}

# family: (classes, fields with the values to draw from)
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, tuple[Any, ...]]]] = LINEAR | {
    "gpt2": (("GPT2LMHeadModel", "GPT2Model", "GPT2ForSequenceClassification", "GPT2ForQuestionAnswering"), _GPT),
    "gptj": (("GPTJForCausalLM", "GPTJModel"), _GPT | {"rotary_dim": (8,)}),
    "gpt_neo": (
        ("GPTNeoForCausalLM", "GPTNeoModel"),
        {
            "vocab_size": (96,),
            "hidden_size": (64, 128),
            "num_layers": (4,),
            "num_heads": (4, 8),
            "attention_types": ([[["global", "local"], 2]], [[["global"], 4]]),
            "intermediate_size": (None, 96),
            "max_position_embeddings": (256,),
            "window_size": (256,),
            "tie_word_embeddings": _FLAG,
            "resid_dropout": (0.0, 0.1),
            "attention_dropout": (0.0, 0.1),
        },
    ),
    "gpt_neox": (
        ("GPTNeoXForCausalLM", "GPTNeoXModel"),
        {key: value for key, value in _MODERN.items() if key != "num_key_value_heads"}
        | {
            "use_parallel_residual": _FLAG,
            "attention_bias": _FLAG,
            "hidden_dropout": (0.0, 0.1),
            "attention_dropout": (0.0, 0.1),
            "hidden_act": ("gelu", "gelu_new", "relu"),
        },
    ),
    "opt": (
        ("OPTForCausalLM", "OPTModel", "OPTForSequenceClassification"),
        {
            "vocab_size": (96,),
            "hidden_size": (64, 128),
            "ffn_dim": (96, 256),
            "num_hidden_layers": (2, 3),
            "num_attention_heads": (4, 8),
            "max_position_embeddings": (256,),
            "do_layer_norm_before": _FLAG,
            "_remove_final_layer_norm": _FLAG,
            "word_embed_proj_dim": (None, 32),
            "enable_bias": _FLAG,
            "layer_norm_elementwise_affine": _FLAG,
            "tie_word_embeddings": _FLAG,
            "dropout": (0.0, 0.1),
            "attention_dropout": (0.0, 0.1),
            "activation_function": ("relu", "gelu"),
        },
    ),
    "bloom": (
        ("BloomForCausalLM", "BloomModel", "BloomForTokenClassification"),
        {
            "vocab_size": (96,),
            "hidden_size": (64, 128),
            "n_layer": (2, 3),
            "n_head": (4, 8),
            "tie_word_embeddings": _FLAG,
            "hidden_dropout": (0.0, 0.1),
            "attention_dropout": (0.0, 0.1),
            "apply_residual_connection_post_layernorm": _FLAG,
        },
    ),
    "falcon": (
        ("FalconForCausalLM", "FalconModel"),
        {
            "vocab_size": (96,),
            "hidden_size": (64, 128),
            "num_hidden_layers": (2, 3),
            "num_attention_heads": (4, 8),
            "num_kv_heads": (None, 2, 4),
            "ffn_hidden_size": (None, 96),
            "new_decoder_architecture": _FLAG,
            "num_ln_in_parallel_attn": (None, 1, 2),
            "multi_query": _FLAG,
            "parallel_attn": _FLAG,
            "bias": _FLAG,
            "alibi": _FLAG,
            "tie_word_embeddings": _FLAG,
            "hidden_dropout": (0.0, 0.1),
            "attention_dropout": (0.0, 0.1),
        },
    ),
    "mpt": (
        ("MptForCausalLM", "MptModel"),
        {
            "vocab_size": (96,),
            "d_model": (64, 128),
            "n_layers": (2, 3),
            "n_heads": (4, 8),
            "max_seq_len": (256,),
            "expansion_ratio": (4, 2),
            "no_bias": _FLAG,
            "tie_word_embeddings": _FLAG,
            "attn_config": ({"attn_type": "multihead_attention", "attn_pdrop": 0}, {"qk_ln": True}, None),
        },
    ),
    "llama": (
        ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification", "LlamaForTokenClassification"),
        _MODERN | {"attention_bias": _FLAG, "mlp_bias": _FLAG, "head_dim": (None, 24)},
    ),
    "mistral": (
        ("MistralForCausalLM", "MistralModel"),
        _MODERN | {"head_dim": (None, 24), "sliding_window": (None, 256)},
    ),
    "mixtral": (
        ("MixtralForCausalLM", "MixtralModel"),
        _MODERN | {"num_local_experts": (4, 8), "num_experts_per_tok": (1, 2), "head_dim": (None, 24)},
    ),
    "qwen2": (("Qwen2ForCausalLM", "Qwen2Model", "Qwen2ForSequenceClassification"), _MODERN),
    "qwen2_moe": (
        ("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
        _MODERN
        | {
            "num_experts": (4, 6),
            "num_experts_per_tok": (2, 3),
            "moe_intermediate_size": (32, 48),
            "shared_expert_intermediate_size": (64, 80),
            "decoder_sparse_step": (1, 2),
            "mlp_only_layers": ([], [1], None),
            "qkv_bias": _FLAG,
            "norm_topk_prob": _FLAG,
        },
    ),
    "qwen3": (("Qwen3ForCausalLM", "Qwen3Model"), _MODERN | {"attention_bias": _FLAG, "head_dim": (16, 32)}),
    "qwen3_moe": (
        ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        _MODERN
        | {
            "attention_bias": _FLAG,
            "head_dim": (16, 32),
            "num_experts": (4, 6),
            "num_experts_per_tok": (2, 3),
            "moe_intermediate_size": (32, 48),
            "decoder_sparse_step": (1, 2),
            "mlp_only_layers": ([], [1]),
            "norm_topk_prob": _FLAG,
        },
    ),
    "gemma": (("GemmaForCausalLM", "GemmaModel"), _MODERN | _GEMMA),
    "gemma2": (("Gemma2ForCausalLM", "Gemma2Model"), _MODERN | _GEMMA | {"attn_logit_softcapping": (None, 50.0)}),
    "gemma3_text": (("Gemma3ForCausalLM", "Gemma3TextModel"), _MODERN | _GEMMA),
    "minimax": (
        ("MiniMaxForCausalLM", "MiniMaxModel"),
        _MODERN
        | {
            "head_dim": (16, 32),
            "num_local_experts": (4, 6),
            "num_experts_per_tok": (2,),
            "block_size": (32, 64),
        },
    ),
    "gemma3n_text": (
        ("Gemma3nForCausalLM", "Gemma3nTextModel"),
        _MODERN
        | _GEMMA
        | {
            "num_hidden_layers": (5, 10),
            "sliding_window": (256,),
            "intermediate_size": (80, 192),
            "num_kv_shared_layers": (0,),
            "vocab_size_per_layer_input": (96, 131),
            "hidden_size_per_layer_input": (8, 16),
            "laurel_rank": (4, 8),
            "altup_num_inputs": (2, 4),
            "altup_correct_scale": _FLAG,
            "final_logit_softcapping": (30.0,),
        },
    ),
    "gemma4_text": (
        ("Gemma4ForCausalLM", "Gemma4TextModel"),
        _MODERN
        | _GEMMA
        | {
            "num_hidden_layers": (4, 5),
            "layer_types": (None,),
            "sliding_window": (256,),
            "global_head_dim": (32, 48),
            "attention_k_eq_v": _FLAG,
            "num_global_key_value_heads": (None, 1),
            "num_kv_shared_layers": (0, 2),
            "use_double_wide_mlp": _FLAG,
            "vocab_size_per_layer_input": (96, 131),
            "hidden_size_per_layer_input": (0, 16),
            "enable_moe_block": _FLAG,
            "num_experts": (4, 6),
            "top_k_experts": (2,),
            "moe_intermediate_size": (24, 48),
            "final_logit_softcapping": (None, 30.0),
        },
    ),
    "phi": (
        ("PhiForCausalLM", "PhiModel", "PhiForSequenceClassification"),
        _MODERN
        | {
            "qk_layernorm": _FLAG,
            "resid_pdrop": (0.0, 0.1),
            "embd_pdrop": (0.0, 0.1),
            "hidden_act": ("gelu_new", "gelu"),
        },
    ),
    "phi3": (("Phi3ForCausalLM", "Phi3Model"), _MODERN | {"resid_pdrop": (0.0, 0.1), "sliding_window": (None, 256)}),
    "starcoder2": (
        ("Starcoder2ForCausalLM", "Starcoder2Model"),
        _MODERN | {"use_bias": _FLAG, "residual_dropout": (0.0, 0.1), "embedding_dropout": (0.0, 0.1)},
    ),
    "stablelm": (
        ("StableLmForCausalLM", "StableLmModel"),
        _MODERN
        | {
            "use_qkv_bias": _FLAG,
            "qk_layernorm": _FLAG,
            "use_parallel_residual": _FLAG,
            "hidden_dropout": (0.0, 0.1),
        },
    ),
    "olmo2": (("Olmo2ForCausalLM", "Olmo2Model"), _MODERN | {"attention_bias": _FLAG}),
    "cohere": (("CohereForCausalLM", "CohereModel"), _MODERN | {"use_qk_norm": _FLAG, "attention_bias": _FLAG}),
    "deepseek_v2": (
        ("DeepseekV2ForCausalLM", "DeepseekV2Model"),
        _LATENT | _SHARED | {"mlp_bias": _FLAG, "n_routed_experts": (4, 8)},
    ),
    "deepseek_v3": (
        ("DeepseekV3ForCausalLM", "DeepseekV3Model"),
        _LATENT | _SHARED | {"n_group": (2, 4), "topk_group": (2,)},
    ),
    "smollm3": (
        ("SmolLM3ForCausalLM", "SmolLM3Model", "SmolLM3ForSequenceClassification"),
        _MODERN
        | {
            "attention_bias": _FLAG,
            "mlp_bias": _FLAG,
            "use_sliding_window": _FLAG,
            "sliding_window": (None, 256),
            "no_rope_layer_interval": (2, 4),
        },
    ),
    "glm": (("GlmForCausalLM", "GlmModel"), _MODERN | _GEMMA),
    "glm4": (("Glm4ForCausalLM", "Glm4Model"), _MODERN | _GEMMA),
    "ernie4_5": (("Ernie4_5ForCausalLM", "Ernie4_5Model"), _MODERN | {"use_bias": _FLAG, "head_dim": (16, 32)}),
    "seed_oss": (
        ("SeedOssForCausalLM", "SeedOssModel"),
        _MODERN
        | {
            "head_dim": (16, 32),
            "attention_bias": _FLAG,
            "attention_out_bias": _FLAG,
            "attention_dropout": (0.0, 0.1),
            "residual_dropout": (0.0, 0.1),
        },
    ),
    "hunyuan_v1_dense": (
        ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Model"),
        _MODERN | {"attention_bias": _FLAG, "head_dim": (16, 32)},
    ),
    "ministral": (
        ("MinistralForCausalLM", "MinistralModel"),
        _MODERN | {"head_dim": (16, 24), "sliding_window": (256,)},
    ),
    "ministral3": (("Ministral3ForCausalLM", "Ministral3Model"), _MODERN | {"head_dim": (16, 24)}),
    "arcee": (("ArceeForCausalLM", "ArceeModel"), _MODERN | {"attention_bias": _FLAG, "mlp_bias": _FLAG}),
    "granite": (
        ("GraniteForCausalLM", "GraniteModel"),
        _MODERN
        | {"attention_bias": _FLAG, "mlp_bias": _FLAG, "residual_multiplier": (0.22,), "logits_scaling": (16.0,)},
    ),
    "olmo3": (("Olmo3ForCausalLM", "Olmo3Model"), _MODERN | {"attention_bias": _FLAG, "sliding_window": (256,)}),
    "exaone4": (("Exaone4ForCausalLM", "Exaone4Model"), _MODERN | {"head_dim": (16,), "sliding_window": (256,)}),
    "cohere2": (("Cohere2ForCausalLM", "Cohere2Model"), _MODERN | {"attention_bias": _FLAG, "sliding_window": (256,)}),
    "glm4_moe": (("Glm4MoeForCausalLM", "Glm4MoeModel"), _MODERN | _SHARED | {"use_qk_norm": _FLAG}),
    "solar_open": (("SolarOpenForCausalLM", "SolarOpenModel"), _MODERN | _SHARED),
    "minimax_m2": (
        ("MiniMaxM2ForCausalLM", "MiniMaxM2Model"),
        _MODERN
        | {"head_dim": (16, 32), "num_local_experts": (4, 8), "num_experts_per_tok": (2, 3), "rotary_dim": (8,)},
    ),
    "dots1": (
        ("Dots1ForCausalLM", "Dots1Model"),
        _MODERN | _SHARED | {"sliding_window": (None, 256), "max_window_layers": (1, 5)},
    ),
    "ernie4_5_moe": (
        ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel"),
        _MODERN
        | {
            "use_bias": _FLAG,
            "moe_num_experts": (4, 6),
            "moe_k": (2, 3),
            "moe_intermediate_size": (32, 48),
            "moe_num_shared_experts": (0, 2),
            "moe_layer_start_index": (0, 1),
            "moe_layer_end_index": (-1, 3),
            "moe_layer_interval": (1, 2),
        },
    ),
    "hunyuan_v1_moe": (
        ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Model"),
        _MODERN | {"attention_bias": _FLAG, "head_dim": (16, 32), "num_experts": (4, 6), "moe_topk": (1, 2)},
    ),
    "hy_v3": (
        ("HYV3ForCausalLM", "HYV3Model"),
        _MODERN
        | {
            "attention_bias": _FLAG,
            "head_dim": (16, 32),
            "num_experts": (4, 6),
            "num_experts_per_tok": (2, 3),
            "num_shared_experts": (1, 2),
            "moe_intermediate_size": (32, 48),
            "enable_moe_fp32_combine": _FLAG,
        },
    ),
    "llama4_text": (
        ("Llama4ForCausalLM", "Llama4TextModel"),
        _MODERN
        | {
            "num_hidden_layers": (4, 5),
            "attention_bias": _FLAG,
            "head_dim": (16, 32),
            "use_qk_norm": _FLAG,
            "intermediate_size_mlp": (96, 160),
            "num_local_experts": (4, 6),
            "num_experts_per_tok": (1, 2),
            "interleave_moe_layer_step": (1, 2),
            "no_rope_layer_interval": (2, 4),
            "attention_chunk_size": (None, 512),
        },
    ),
    "olmoe": (
        ("OlmoeForCausalLM", "OlmoeModel"),
        _MODERN | {"attention_bias": _FLAG, "num_experts": (4, 6), "num_experts_per_tok": (2, 3)},
    ),
    "flex_olmo": (
        ("FlexOlmoForCausalLM", "FlexOlmoModel"),
        _MODERN | {"attention_bias": _FLAG, "num_experts": (4, 6), "num_experts_per_tok": (2, 3)},
    ),
    "exaone_moe": (
        ("ExaoneMoeForCausalLM", "ExaoneMoeModel"),
        _MODERN
        | {
            "head_dim": (16,),
            "sliding_window": (256,),
            "num_experts": (8, 16),
            "n_group": (2, 4),
            "topk_group": (2,),
            "num_experts_per_tok": (2, 3),
            "num_shared_experts": (1, 2),
            "moe_intermediate_size": (32, 48),
            "first_k_dense_replace": (0, 1),
        },
    ),
    "deepseek_v32": (
        ("DeepseekV32ForCausalLM", "DeepseekV32Model"),
        _LATENT | _SHARED | _INDEXED | {"q_lora_rank": (24,), "n_group": (2, 4), "topk_group": (2,)},
    ),
    "deepseek_v4": (
        ("DeepseekV4ForCausalLM", "DeepseekV4Model"),
        {
            "vocab_size": (96, 131),
            "hidden_size": (128, 256),
            "num_hidden_layers": (2, 5),
            "max_position_embeddings": (256,),
            "tie_word_embeddings": (True, False),
            "num_attention_heads": (4, 8),
            "head_dim": (32, 64),
            "q_lora_rank": (24, 48),
            "moe_intermediate_size": (32, 48),
            "n_routed_experts": (8, 16),
            "num_experts_per_tok": (2, 3),
            "compress_ratios": ([128, 4, 0, 4, 128], None),
            "compress_rate_hca": (32, 128),
            "num_hash_layers": (1, 2),
            "hc_mult": (2, 4),
            "hc_sinkhorn_iters": (3, 20),
            "sliding_window": (64,),
            "o_groups": (2, 4),
            "o_lora_rank": (8, 16),
            "index_n_heads": (2, 4),
            "index_head_dim": (16,),
            "index_topk": (8,),
        },
    ),
    "glm_moe_dsa": (
        ("GlmMoeDsaForCausalLM", "GlmMoeDsaModel"),
        _LATENT | _SHARED | _INDEXED | {"q_lora_rank": (24,), "index_topk_freq": (1, 2)},
    ),
    "glm4_moe_lite": (("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"), _LATENT | _SHARED),
    "mistral4": (("Mistral4ForCausalLM", "Mistral4Model"), _LATENT | _SHARED),
    "kimi_linear": (
        ("KimiLinearForCausalLM", "KimiLinearModel"),
        _LATENT
        | _SHARED
        | {
            "num_hidden_layers": (4, 5),
            "n_routed_experts": (None,),
            "num_local_experts": (4, 8),
            "tie_word_embeddings": (False,),
            "linear_num_heads": (2, 4),
            "linear_head_dim": (16, 24),
            "linear_conv_kernel_dim": (2, 4),
        },
    ),
    "bailing_hybrid": (
        ("BailingHybridForCausalLM", "BailingHybridModel"),
        _LATENT
        | _SHARED
        | {
            "num_hidden_layers": (4, 5),
            "n_routed_experts": (None,),
            "num_experts": (8, 16),
            "n_group": (2, 4),
            "topk_group": (2,),
            "tie_word_embeddings": (False,),
            "layer_group_size": (2, 3),
            "head_dim": (16, 24),
            "short_conv_kernel_size": (2, 4),
            "kda_safe_gate": _FLAG,
        },
    ),
    "youtu": (("YoutuForCausalLM", "YoutuModel"), _LATENT),
    "gpt_oss": (
        ("GptOssForCausalLM", "GptOssModel"),
        _MODERN
        | {
            "attention_bias": _FLAG,
            "head_dim": (16, 32),
            "num_local_experts": (4, 8),
            "num_experts_per_tok": (2, 3),
            "sliding_window": (256,),
        },
    ),
    "bert": (
        (
            "BertForMaskedLM",
            "BertModel",
            "BertForPreTraining",
            "BertForSequenceClassification",
            "BertForTokenClassification",
            "BertForQuestionAnswering",
            "BertForMultipleChoice",
            "BertForNextSentencePrediction",
            "BertLMHeadModel",
        ),
        _MLM,
    ),
    "roberta": (
        (
            "RobertaForMaskedLM",
            "RobertaModel",
            "RobertaForSequenceClassification",
            "RobertaForTokenClassification",
            "RobertaForQuestionAnswering",
            "RobertaForMultipleChoice",
            "RobertaForCausalLM",
        ),
        _MLM,
    ),
    "t5": (
        (
            "T5ForConditionalGeneration",
            "T5Model",
            "T5EncoderModel",
            "T5ForSequenceClassification",
            "T5ForTokenClassification",
            "T5ForQuestionAnswering",
        ),
        {
            "vocab_size": (96,),
            "d_model": (64, 128),
            "d_kv": (16, 24),
            "d_ff": (96, 256),
            "num_layers": (2, 3),
            "num_decoder_layers": (None, 2, 3),
            "num_heads": (4, 8),
            "relative_attention_num_buckets": (8, 32),
            "feed_forward_proj": ("relu", "gated-gelu", "gated-silu"),
            "tie_word_embeddings": _FLAG,
            "dropout_rate": (0.0, 0.1),
            "num_labels": (2, 5),
        },
    ),
    "vit": (
        ("ViTForImageClassification", "ViTModel", "ViTForMaskedImageModeling"),
        {
            "hidden_size": (64, 128),
            "intermediate_size": (80, 192),
            "num_hidden_layers": (2, 3),
            "num_attention_heads": (4, 8),
            "image_size": (32, 64, [32, 64]),
            "patch_size": (8, 16),
            "encoder_stride": (16,),
            "num_channels": (1, 3),
            "qkv_bias": _FLAG,
            "pooler_output_size": (None, 32),
            "hidden_dropout_prob": (0.0, 0.1),
            "num_labels": (2, 5),
        },
    ),
}


def random_config(model_type: str, seed: int) -> dict[str, Any]:
    """Return the fields of one random configuration of a family, as its config.json would hold them."""
    classes, choices = VARIANTS[model_type]
    draw = random.Random(f"{model_type} {seed}")  # noqa: S311  # no secret: the same seed must give the same config
    fields = {name: draw.choice(values) for name, values in (_NO_CACHE_IDS | choices).items()}
    if model_type in ("bert", "roberta", "t5", "opt"):
        fields["pad_token_id"] = 1
    if model_type == "gemma4_text":
        fields["layer_types"] = ["sliding_attention", "full_attention"] * 2
        fields["layer_types"] += ["full_attention"] * (fields["num_hidden_layers"] - 4)
    if model_type == "gemma3n_text":
        count = fields["num_hidden_layers"]
        fields["activation_sparsity_pattern"] = [0.95, *[0.0] * (count - 1)]
        fields["intermediate_size"] = [fields["intermediate_size"]] * count
        fields["num_kv_shared_layers"] = 5 if count > 5 else 0
    if model_type in ("kimi_linear", "bailing_hybrid"):
        del fields["n_routed_experts"]
    if "kv_lora_rank" in fields:
        if model_type != "bailing_hybrid":
            fields.pop("head_dim", None)
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if model_type == "falcon" and fields["new_decoder_architecture"]:
        fields["parallel_attn"] = True  # transformers builds these other choices, but cannot run them
        fields["num_ln_in_parallel_attn"] = draw.choice((None, 2))
    elif model_type == "falcon":
        fields["num_kv_heads"] = None
        fields["num_ln_in_parallel_attn"] = None
    return {"model_type": model_type, "architectures": [draw.choice(classes)], **fields}
