"""Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464): Qwen3-Next's and Qwen3.5's layers.

What it keeps depends on who runs it. Under flash and sdpa attention it is flash-linear-attention (fla), whose kernel
computes its chunks again in the backward pass; under eager attention transformers' torch code, which writes them out.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from paraplan.model.attention import EAGER, FUSED_KERNELS
from paraplan.model.config_file import ModelConfig
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.saved_role import SavedRole
from paraplan.model.spec import ActivationSplit, ElementType, Matmul

CHUNK = 64
"""Tokens of a chunk, in fla and in transformers' code."""


class DeltaRule(NamedTuple):
    """Shapes of a layer: heads of keys (as many of queries), heads of values, of which several share one key head."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    has_fused_projections: bool

    @property
    def tp_limit(self) -> int:
        """The number that tensor parallelism divides: the heads."""
        return gcd(self.key_heads, self.value_heads)

    @property
    def key_width(self) -> int:
        """Features of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Features of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def repeated_width(self) -> int:
        """Features of the keys of all value heads."""
        return self.value_heads * self.key_dim


def read_delta_rule(config: ModelConfig, hidden: int, *, has_fused_projections: bool) -> DeltaRule:
    """Return the shapes that a config's `linear_...` fields give; absent ones are Qwen3-Next's."""
    key_heads = config.count("linear_num_key_heads", default=16)
    value_heads = config.count("linear_num_value_heads", default=32)
    config.divide("linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)
    return DeltaRule(
        hidden=hidden,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.count("linear_key_head_dim", default=128),
        value_dim=config.count("linear_value_head_dim", default=128),
        kernel=config.count("linear_conv_kernel_dim", default=4),
        has_fused_projections=has_fused_projections,
    )


def delta_rule(shape: DeltaRule) -> Part:
    """Return projections, the convolution over time, the chunked rule, and the gated norm before the output."""
    keys, values, heads = shape.key_width, shape.value_width, shape.value_heads
    convolved = 2 * keys + values
    if shape.has_fused_projections:
        projections = {"qkvz": convolved + values, "ba": 2 * heads}
    else:
        projections = {"qkv": convolved, "z": values, "b": heads, "a": heads}
    readers = tuple(f"linear_attn.in_proj_{name}" for name in projections)
    part = kept("attention_input", shape.hidden, split="sequence", num_readers=len(readers), weights_of=readers)
    for name, width in zip(readers, projections.values(), strict=True):
        part += linear(name, shape.hidden, width, bias=False, split="column")
    part += weight("linear_attn.conv1d.weight", convolved, 1, shape.kernel, tp_dim=0)
    part += weight("linear_attn.dt_bias", heads, tp_dim=0) + weight("linear_attn.A_log", heads, tp_dim=0)
    part += weight("linear_attn.norm.weight", shape.value_dim)
    part += _tensor("convolution_input", convolved)
    part += kept("convolution_output", convolved, split="tensor", kernels=EAGER, by="modules")
    part += _tensor("decay", 2 * heads, "fp32") + _tensor("beta", heads)
    part += _in_kernel(shape) + _written_out(shape)
    part += _gated_norm(values, heads) + Part(matmuls=tuple(_products(shape)))
    return part + linear("linear_attn.out_proj", values, shape.hidden, bias=False, split="row")


def _tensor(role: SavedRole, elements: float, element_type: ElementType = "activation") -> Part:
    split: ActivationSplit = "tensor"
    return kept(role, elements, element_type=element_type, split=split)


def _in_kernel(shape: DeltaRule) -> Part:
    """Return what fla's kernel keeps: normalised queries and keys with their roots, values, decays, and the inverse.

    (fla/ops/gated_delta_rule/chunk.py, `ChunkGatedDeltaRuleFunction`.) Megatron-Core hands it queries and keys that are
    repeated for the heads of values, beside the normalised ones (core/ssm/gated_delta_net.py).
    """
    part = Part()
    repeats = shape.value_heads > shape.key_heads
    for _ in ("query", "key"):
        part += kept("normalised_heads", shape.key_width, split="tensor", kernels=FUSED_KERNELS)
        part += kept("norm_root", shape.key_heads, element_type="fp32", split="tensor", kernels=FUSED_KERNELS)
        if repeats:
            part += kept("repeated_heads", shape.repeated_width, split="tensor", kernels=FUSED_KERNELS, by="fused")
    part += kept("values", shape.value_width, split="tensor", kernels=FUSED_KERNELS)
    part += kept("decay", shape.value_heads, element_type="fp32", split="tensor", kernels=FUSED_KERNELS)
    return part + kept("inverse", shape.value_heads * CHUNK, split="tensor", kernels=FUSED_KERNELS)


def _written_out(shape: DeltaRule) -> Part:
    """Return what transformers' `torch_chunk_gated_delta_rule` keeps, all in fp32.

    Keys, queries and values as they are normalised, weighted and decayed; five matrices of a chunk; a state a chunk.
    """
    each = 8 * shape.key_dim + 3 * shape.value_dim + 5 * CHUNK + 8 + shape.key_dim * shape.value_dim / CHUNK
    return kept(
        "chunks", shape.value_heads * each, element_type="fp32", split="tensor", kernels=EAGER, in_attention_core=True
    )


def _gated_norm(values: int, heads: int) -> Part:
    """Return the norm of each head's output, its gate, and the output projection's input.

    transformers writes it in fp32: the output, the gate and its activation; Megatron-Core keeps them as they are.
    """
    part = kept("rule_output", values, element_type="fp32", split="tensor", by="modules")
    part += kept("rule_output", values, split="tensor", by="fused")
    part += _tensor("norm_root", heads, "fp32")
    part += kept("normalised", values, split="tensor", weights_of=(), by="modules")
    part += kept("output_gate", values, element_type="fp32", split="tensor", by="modules")
    part += kept("output_gate", values, element_type="fp32", split="tensor", by="modules")
    part += kept("scaled_output", values, split="tensor") + kept("output_gate", values, split="tensor", by="fused")
    return part + kept("projection_input", values, split="tensor", weights_of=("linear_attn.out_proj",))


def _products(shape: DeltaRule) -> list[Matmul]:
    """Return the products of the chunked rule (Yang et al. 2024, section 3.3): of one token of each head of values.

    Keys and queries with the chunk's keys, the chunk's new values with these scores, the state read twice and written;
    and the triangular systems, half of a product each.
    """
    heads, key, value = float(shape.value_heads), shape.key_dim, shape.value_dim

    def product(name: str, k: int, n: int, rows: float) -> Matmul:
        return Matmul(name=f"delta rule {name}", k=k, n=n, rows_per_token=rows, split="column", of_activations=True)

    return [
        product("scores", key, CHUNK, 2 * heads),
        product("new values", CHUNK, value, heads),
        product("state", key, value, 3 * heads),
        product("system for values", CHUNK, value, heads / 2),
        product("system for keys", CHUNK, key, heads / 2),
    ]
