"""Tiny models of transformers, by family: from scratch, two layers, without dropout."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, TOKENS = 32, 8

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_GATED = _SIZES | {"intermediate_size": 48, "max_position_embeddings": 32, "pad_token_id": 0}
_GROUPED = _GATED | {"num_key_value_heads": 2}
_EXPERTS = _GROUPED | {"num_experts_per_tok": 2}
_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
_GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
_GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED | {"tie_word_embeddings": False},
    "mistral": _GROUPED | {"sliding_window": 4},
    "qwen2": _GROUPED | {"tie_word_embeddings": True},
    "qwen3": _GROUPED | {"head_dim": 8},
    "gemma2": _GROUPED | {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": _GROUPED | {"head_dim": 8, "sliding_window": 4},
    "olmo2": _GROUPED,
    "phi": _GATED | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "phi3": _GROUPED,
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "glm4": _GROUPED | {"head_dim": 8},
    "cohere": _GROUPED,
    "smollm3": _GROUPED,
    "gpt_neox": _GATED | _NO_DROPOUT,
    "gpt2": _GPT,
    "gptj": _GPT | {"rotary_dim": 4},
    "opt": _SIZES | {"ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_NO_DROPOUT},
    "falcon": _SIZES | _NO_DROPOUT | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    "mixtral": _EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "qwen2_moe": _EXPERTS
    | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "pad_token_id": None},
    "olmoe": _EXPERTS | {"num_experts": 4},
    "gpt_oss": _EXPERTS | {"num_local_experts": 4, "head_dim": 8, "rope_parameters": {"rope_type": "default"}},
    "llama4_text": _EXPERTS | {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48},
    "deepseek_v3": _GATED
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
    | {"first_k_dense_replace": 1},
    "bert": _GATED | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def build(family: str, **more: Any) -> torch.nn.Module:
    """Return a model of `family` with a language-modelling head; the weights are those of torch's present seed."""
    import transformers

    config = transformers.AutoConfig.for_model(family, **(FAMILIES[family] | more))
    head = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    model: torch.nn.Module = head.from_config(config, dtype=torch.float32)
    model.config.use_cache = False
    return model.train()
