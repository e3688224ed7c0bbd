"""A `ModelSpec` from bare shapes, for runs of which only the table of a paper is known."""

from __future__ import annotations

from typing import Literal

from paraplan.model.config_file import ModelConfig
from paraplan.model.reader import read_fields
from paraplan.model.spec import ModelSpec
from paraplan.records import Record

Activation = Literal["gelu", "swiglu", "geglu", "relu", "squared_relu"]
GATED = ("swiglu", "geglu")


class TransformerShapes(Record):
    """The shapes of a decoder-only transformer. `max_seq_length` counts learned positions where the kind has them.

    `writes_out_gelu` says that an unfused GELU is transformers' gelu_new, written out in products, not a kernel.
    `dropout` is the rate of GPT-2's dropouts, of which training keeps masks; blocks of other kinds have none.
    """

    name: str = "transformer"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int
    max_seq_length: int
    activation: Activation = "gelu"
    tied_embeddings: bool = True
    dropout: float = 0.1
    writes_out_gelu: bool = True


def model_from_shapes(shapes: TransformerShapes) -> ModelSpec:
    """Return a transformer of these shapes: Llama's blocks for gated activations, else GPT-2's.

    Grouped-query attention beside an ungated MLP takes StarCoder2's blocks (LayerNorm, biases, rotary positions).
    The default MLP width is 4 h, gated ones 8/3 h. Raises `ModelError` for shapes that do not divide.
    """
    kv_heads = shapes.num_kv_heads or shapes.num_heads
    gated = shapes.activation in GATED
    inner = shapes.ffn_hidden_size or round(shapes.hidden_size * (8 / 3 if gated else 4))
    if gated or kv_heads != shapes.num_heads:
        fields: dict[str, object] = {
            "model_type": "llama" if gated else "starcoder2",
            "hidden_size": shapes.hidden_size,
            "intermediate_size": inner,
            "num_hidden_layers": shapes.num_layers,
            "num_attention_heads": shapes.num_heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": shapes.vocab_size,
            "max_position_embeddings": shapes.max_seq_length,
            "tie_word_embeddings": shapes.tied_embeddings,
        }
    else:
        fields = {
            "model_type": "gpt2",
            "n_embd": shapes.hidden_size,
            "n_inner": inner,
            "n_layer": shapes.num_layers,
            "n_head": shapes.num_heads,
            "n_positions": shapes.max_seq_length,
            "activation_function": "gelu_new" if shapes.writes_out_gelu else "gelu",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shapes.dropout),
            "vocab_size": shapes.vocab_size,
            "tie_word_embeddings": shapes.tied_embeddings,
        }
    return read_fields(ModelConfig(source=shapes.name, fields=fields, name=shapes.name))
