from __future__ import annotations

import pytest

from paraplan.errors import ModelError
from paraplan.model.shapes import TransformerShapes, model_from_shapes

GPT3 = TransformerShapes(
    num_layers=96, hidden_size=12288, num_heads=96, vocab_size=50257, max_seq_length=2048, activation="gelu"
)


def test_ungated_shapes_make_gpt_blocks() -> None:
    # 12 L h^2 (1 + 13 / (12 h)) + V h + s h (Narayanan et al. 2021, eq. 2), and the final norm.
    layers, hidden = 96, 12288
    expected = 12 * layers * hidden**2 + 13 * layers * hidden + (50257 + 2048) * hidden + 2 * hidden
    assert model_from_shapes(GPT3).parameters.total == expected


def test_gated_shapes_make_llama_blocks() -> None:
    shapes = TransformerShapes(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
        vocab_size=128256,
        max_seq_length=8192,
        activation="swiglu",
        tied_embeddings=False,
    )
    assert model_from_shapes(shapes).parameters.total == 8_030_261_248  # Llama-3-8B


def test_grouped_queries_beside_an_ungated_mlp_keep_their_fewer_key_heads() -> None:
    grouped = GPT3.replace(num_kv_heads=8, max_seq_length=4096)
    attention = model_from_shapes(grouped).runs[0].block.attention
    assert attention is not None
    assert (attention.num_heads, attention.num_kv_heads) == (96, 8)


def test_heads_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ModelError, match="96"):
        model_from_shapes(GPT3.replace(hidden_size=12289))
