"""Lightning attention (MiniMax 2025, arXiv 2501.08313, section 2.2): linear attention with a fixed decay for each head.

What it keeps is that of transformers' torch code, block by block; other kernels keep queries, keys and values alone.
"""

from __future__ import annotations

from typing import NamedTuple

from paraplan.model.config_file import ModelConfig
from paraplan.model.norm import norm
from paraplan.model.part import Part, kept, linear
from paraplan.model.spec import Matmul


class Lightning(NamedTuple):
    """Shapes of a layer: heads of queries, keys and values, and the tokens of a block."""

    hidden: int
    heads: int
    dim: int
    block: int
    activation: str

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.heads * self.dim


def read_lightning(config: ModelConfig, hidden: int, *, heads: int, dim: int) -> Lightning:
    """Return the shapes of a config's layers with linear attention."""
    block = config.count("block_size", default=256)
    if config.seq_length is not None:
        block = min(block, config.seq_length)
    return Lightning(hidden, heads, dim, block, config.text("hidden_act", default="silu"))


def lightning(shape: Lightning) -> Part:
    """Return the fused projection with its activation, products inside and between blocks, norm, gate and output."""
    width, readers = shape.width, ("self_attn.qkv_proj", "self_attn.output_gate")
    part = kept("attention_input", shape.hidden, split="sequence", num_readers=2, weights_of=readers)
    part += linear(readers[0], shape.hidden, 3 * width, bias=False, split="column")
    part += kept("activation_input", 3 * width, split="tensor")
    part += kept("heads", 3 * width, split="tensor")
    part += kept("decayed_heads", 3 * width, split="tensor", by="modules")
    inside = shape.heads * (shape.block + shape.dim * shape.dim / shape.block)
    part += kept("chunks", inside, split="tensor", in_attention_core=True, by="modules")
    part += Part(matmuls=tuple(_products(shape)))
    part += norm("self_attn.norm", "rms", width, is_residual=False)
    part += linear(readers[1], shape.hidden, width, bias=False, split="column")
    part += kept("output_gate", width, split="tensor") + kept("scaled_output", width, split="tensor")
    part += kept("gated_output", width, split="tensor", weights_of=("self_attn.out_proj",))
    return part + linear("self_attn.out_proj", width, shape.hidden, bias=False, split="row")


def _products(shape: Lightning) -> list[Matmul]:
    """Return the products of one token: scores in its block and their values, the state read and written."""
    heads = float(shape.heads)

    def product(name: str, k: int, n: int) -> Matmul:
        return Matmul(name=f"lightning {name}", k=k, n=n, rows_per_token=heads, split="column", of_activations=True)

    dim, block = shape.dim, shape.block
    return [
        product("scores", dim, block),
        product("values", block, dim),
        product("state read", dim, dim),
        product("state written", dim, dim),
    ]
