"""Small random configurations of families with linear attention. Not a test module itself."""

from __future__ import annotations

from typing import Any

_FLAG = (True, False)
_LINEAR: dict[str, tuple[Any, ...]] = {
    "vocab_size": (96, 131),
    "hidden_size": (64, 128),
    "intermediate_size": (80, 192),
    "num_hidden_layers": (4, 5),
    "num_attention_heads": (4, 8),
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (16, 32),
    "max_position_embeddings": (256,),
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "linear_num_key_heads": (2,),
    "linear_num_value_heads": (2, 4),
    "linear_key_head_dim": (16, 24),
    "linear_value_head_dim": (24, 32),
    "linear_conv_kernel_dim": (2, 4),
    "layer_types": (None,),
    "full_attention_interval": (2, 4),
}
_EXPERTS = {
    "num_experts": (4, 6),
    "num_experts_per_tok": (2, 3),
    "moe_intermediate_size": (32, 48),
    "shared_expert_intermediate_size": (64, 80),
}

LINEAR: dict[str, tuple[tuple[str, ...], dict[str, tuple[Any, ...]]]] = {
    "qwen3_next": (
        ("Qwen3NextForCausalLM", "Qwen3NextModel"),
        _LINEAR | _EXPERTS | {"decoder_sparse_step": (1, 2), "mlp_only_layers": ([], [1])},
    ),
    "qwen3_5_text": (("Qwen3_5ForCausalLM", "Qwen3_5TextModel"), _LINEAR),
    "qwen3_5_moe_text": (
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
        {name: values for name, values in _LINEAR.items() if name != "intermediate_size"} | _EXPERTS,
    ),
}
