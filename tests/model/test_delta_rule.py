"""Linear attention by the gated delta rule: what kernels keep of it, and what is computed of frozen layers."""

from __future__ import annotations

import pytest

from paraplan.model.config_file import ModelConfig
from paraplan.model.freezing import FrozenStorage, freeze
from paraplan.model.reader import read_fields
from paraplan.model.saved import saved_bytes
from paraplan.model.spec import BlockSpec, ModelSpec
from paraplan.model.trainable import parse_trainable

FIELDS = {
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def _model(**fields: object) -> ModelSpec:
    return read_fields(ModelConfig("config", FIELDS | fields))


def _rule(block: BlockSpec, kernel: str) -> float:
    tensors = [one for one in block.saved if one.kernels is not None]
    return saved_bytes(tensors, seq_length=1, micro_batch_size=1, kernel=kernel)  # type: ignore[arg-type]


def test_every_fourth_layer_has_attention_and_the_others_none() -> None:
    assert [block.attention is not None for block in _model().blocks] == [False, False, False, True] * 2


def test_the_kernel_keeps_its_inputs_and_the_inverse_of_each_chunk() -> None:
    # Queries and keys of 4 heads of 32, values and a row of 64 of 8 heads, in 16 bits; roots and decays in fp32.
    block = _model().blocks[0]
    assert _rule(block, "flash") == _rule(block, "sdpa") == 2 * (2 * 4 * 32 + 8 * 32 + 8 * 64) + 4 * (2 * 4 + 8)


def test_the_written_out_rule_keeps_states_and_matrices_of_chunks() -> None:
    block = _model().blocks[0]
    state = 32 * 32 / 64
    convolved = 2 * (4 * 32 * 2 + 8 * 32)
    assert _rule(block, "eager") == convolved + 4 * 8 * (8 * 32 + 3 * 32 + 5 * 64 + 8 + state)


def test_products_of_activations_have_both_gradients_where_all_is_frozen() -> None:
    frozen = freeze(_model(), parse_trainable("lora:r=4,targets=out_proj"), FrozenStorage())
    products = [one for one in frozen.blocks[0].matmuls if one.of_activations]
    assert products
    assert all(one.trains for one in products)


def test_layer_types_of_another_kind_or_number_are_refused() -> None:
    with pytest.raises(Exception, match="mamba"):
        _model(layer_types=["mamba"] * 8)
    with pytest.raises(Exception, match="4 layers"):
        _model(layer_types=["linear_attention"] * 4)
