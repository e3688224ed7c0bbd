"""Kimi Delta Attention: what fla's kernel keeps, and which layers have it."""

from __future__ import annotations

import pytest

from paraplan.errors import ModelError
from paraplan.model.config_file import ModelConfig
from paraplan.model.reader import read_fields
from paraplan.model.saved import saved_bytes
from paraplan.model.spec import ModelSpec

FIELDS = {
    "model_type": "kimi_linear",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "kv_lora_rank": 64,
    "num_experts": 8,
    "num_experts_per_token": 2,
}
CHECKPOINT = {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}


def model(**fields: object) -> ModelSpec:
    return read_fields(ModelConfig("config", FIELDS | fields))


def test_the_kernel_keeps_queries_keys_values_decays_and_two_matrices_of_each_chunk() -> None:
    # fla/ops/kda/chunk.py, ChunkKDAFunction, of 4 heads of 32: in 16 bits three tensors of 128 and two rows of 64 for
    # each head; in fp32 two roots for each head, and decays twice.
    block = model(linear_attn_config=CHECKPOINT).blocks[0]
    tensors = [one for one in block.saved if one.kernels is not None]
    kept = saved_bytes(tensors, seq_length=1, micro_batch_size=1, kernel="sdpa")
    assert kept == 2 * (3 * 128 + 2 * 4 * 64) + 4 * (2 * 4 + 2 * 128)


def test_a_checkpoint_numbers_its_layers_from_one() -> None:
    numbered = CHECKPOINT | {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}
    has_attention = [block.attention is not None for block in model(linear_attn_config=numbered).blocks]
    assert has_attention == [False, False, False, True] * 2
    types = ["linear_attention"] * 4 + ["full_attention"] * 4
    assert [block.attention is not None for block in model(layer_types=types).blocks] == [False] * 4 + [True] * 4


def test_names_of_checkpoints_are_those_of_the_class() -> None:
    block = model(num_shared_experts=2).blocks[1]
    routed = next(one for one in block.matmuls if one.num_experts > 1)
    assert (routed.num_experts, routed.rows_per_token) == (8, 2.0)
    assert any(one.name.startswith("mlp.shared_experts") and one.shape[0] == 128 for one in block.parameters)


def test_ling_3_has_attention_in_the_last_layer_of_each_group_and_ling_2_5_is_refused() -> None:
    fields = {"model_type": "bailing_hybrid", "num_hidden_layers": 12, "head_dim": 32, "first_k_dense_replace": 1}
    has_attention = [block.attention is not None for block in model(**fields).blocks]
    assert has_attention == ([False] * 5 + [True]) * 2
    with pytest.raises(ModelError, match=r"Ling and Ring 2\.5"):
        model(**fields, group_norm_size=4)


def test_types_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="names 3 layers"):
        model(layer_types=["linear_attention"] * 3)
