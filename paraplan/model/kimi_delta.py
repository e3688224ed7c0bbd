"""Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692): the gated delta rule with a decay for each feature.

What it keeps depends on who runs it. Under flash and sdpa attention it is flash-linear-attention (fla), whose kernel
computes its chunks again in the backward pass; under eager attention transformers' torch code, which writes them out.
"""

from __future__ import annotations

from typing import NamedTuple

from paraplan.errors import ModelError
from paraplan.model.attention import EAGER, FUSED_KERNELS
from paraplan.model.config_file import OWN_CODE_HINT, ModelConfig
from paraplan.model.delta_rule import CHUNK
from paraplan.model.part import Part, kept, linear, weight
from paraplan.model.saved_role import SavedRole
from paraplan.model.spec import AttentionKernel, ElementType, Matmul


class KimiDelta(NamedTuple):
    """Shapes of a layer: as many heads of queries, keys and values, `dim` features each.

    `has_low_rank_gates` says that both gates go through `dim` features; those of Ling 3 have one product each.
    """

    hidden: int
    heads: int
    dim: int
    kernel: int
    has_low_rank_gates: bool = True

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.heads * self.dim


def read_ling_delta(config: ModelConfig, hidden: int) -> KimiDelta:
    """Return the shapes of Ling 3: heads as those of attention.

    A file that transformers wrote has the width of rotary positions for `head_dim`, and `linear_head_dim` beside it.
    Raises ModelError for Ling and Ring 2.5, of the same model_type.
    """
    of_2_5 = next((name for name in ("group_norm_size", "linear_silu") if config.has(name)), None)
    if of_2_5 is not None:
        raise ModelError(
            f"{config.source}: {of_2_5}={config.fields[of_2_5]!r} is of Ling and Ring 2.5, whose lightning attention "
            "no reader describes: model_type='bailing_hybrid' is Ling 3 in transformers, with Kimi Delta Attention",
            hint=OWN_CODE_HINT,
        )
    return KimiDelta(
        hidden=hidden,
        heads=config.count("linear_num_heads", "num_attention_heads"),
        dim=config.count("linear_head_dim", "head_dim", default=128),
        kernel=config.count("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        has_low_rank_gates=False,
    )


def read_kimi_delta(config: ModelConfig, hidden: int) -> KimiDelta:
    """Return the shapes that `linear_attn_config` gives, as checkpoints have it, else the `linear_...` fields."""
    own = config.section("linear_attn_config")
    return KimiDelta(
        hidden=hidden,
        heads=own.count("num_heads", default=config.count("linear_num_heads", default=32)),
        dim=own.count("head_dim", default=config.count("linear_head_dim", default=128)),
        kernel=own.count("short_conv_kernel_size", default=config.count("linear_conv_kernel_dim", default=4)),
    )


def kimi_delta(shape: KimiDelta) -> Part:
    """Return projections, the convolution over time, both gates, the chunked rule, and the norm before the output."""
    hidden, width, heads, dim = shape.hidden, shape.width, shape.heads, shape.dim
    columns = {"q_proj": width, "k_proj": width, "v_proj": width, "b_proj": heads}
    gates = ("forget_gate.f", "g")
    suffix = "_a_proj" if shape.has_low_rank_gates else "_proj"
    readers = tuple(f"self_attn.{name}" for name in (*columns, *(f"{name}{suffix}" for name in gates)))
    part = kept("attention_input", hidden, split="sequence", num_readers=len(readers), weights_of=readers)
    for name, size in columns.items():
        part += linear(f"self_attn.{name}", hidden, size, bias=False, split="column")
    for name in gates:
        reader, entry = f"self_attn.{name}_proj", hidden
        if shape.has_low_rank_gates:
            reader, entry = f"self_attn.{name}_b_proj", dim
            part += linear(f"self_attn.{name}_a_proj", hidden, dim, bias=False)
            part += kept("gate_inner", dim, weights_of=(reader,))
        part += linear(reader, entry, width, bias=False, split="column")
    part += weight("self_attn.conv1d.weight", 3 * width, 1, shape.kernel, tp_dim=0)
    part += weight("self_attn.forget_gate.dt_bias", width, tp_dim=0) + weight("self_attn.o_norm.weight", dim)
    part += _kept("convolution_input", 3 * width) + _kept("convolution_output", 3 * width, kernels=EAGER)
    part += _kept("beta", heads) + _forget_gate(shape)
    part += _in_kernel(shape) + _written_out(shape)
    # The norm's input, normalised, scaled, and the sigmoid that it is multiplied by.
    part += _kept("gated_norm", 4 * width + heads, "fp32") + Part(matmuls=tuple(_products(shape)))
    part += kept("projection_input", width, split="tensor", weights_of=("self_attn.o_proj",))
    return part + linear("self_attn.o_proj", width, hidden, bias=False, split="row")


def _forget_gate(shape: KimiDelta) -> Part:
    """Return the decays of heads, and what transformers' code keeps of the gate of each feature.

    Kimi's: an exponential, one more, the logarithm of that, and where they count. Ling's: a sigmoid and its input.
    """
    name = "self_attn.forget_gate.A_log"
    if not shape.has_low_rank_gates:
        part = weight(name, shape.heads, tp_dim=0)
        return part + kept("decay", 2 * shape.width, element_type="fp32", split="tensor", by="modules")
    part = weight(name, 1, 1, shape.heads, 1, tp_dim=2)
    part += kept("decay", shape.width, element_type="mask", split="tensor", by="modules")
    return part + kept("decay", 3 * shape.width, element_type="fp32", split="tensor", by="modules")


def _kept(
    role: SavedRole,
    elements: float,
    element_type: ElementType = "activation",
    kernels: tuple[AttentionKernel, ...] | None = None,
) -> Part:
    return kept(role, elements, element_type=element_type, split="tensor", kernels=kernels)


def _in_kernel(shape: KimiDelta) -> Part:
    """Return what fla's kernel keeps: queries and keys normalised with their roots, values, decays, two matrices.

    (fla/ops/kda/chunk.py, `ChunkKDAFunction`: decays as they come and summed, both in fp32; scores and the inverse.)
    """
    part = _kept("normalised_heads", 3 * shape.width, kernels=FUSED_KERNELS)
    part += _kept("norm_root", 2 * shape.heads, "fp32", kernels=FUSED_KERNELS)
    part += _kept("decay", 2 * shape.width, "fp32", kernels=FUSED_KERNELS)
    return part + _kept("inverse", 2 * shape.heads * CHUNK, kernels=FUSED_KERNELS)


def _written_out(shape: KimiDelta) -> Part:
    """Return what transformers' `chunk_kimi_delta_attention` keeps, all in fp32.

    Three products of all features of each pair of a chunk; fifteen tensors like the keys; the rows and squares of a
    matrix that is inverted row by row; two matrices, and a state, of each chunk.
    """
    rows = sum(place + place**2 for place in range(1, CHUNK)) / CHUNK
    each = (3 * CHUNK + 15) * shape.dim + rows + 2 * CHUNK + 3 + shape.dim**2 / CHUNK
    return kept(
        "chunks", shape.heads * each, element_type="fp32", split="tensor", kernels=EAGER, in_attention_core=True
    )


def _products(shape: KimiDelta) -> list[Matmul]:
    """Return the products of the chunked rule, those of the gated delta rule (Yang et al. 2024, section 3.3)."""
    heads, dim = float(shape.heads), shape.dim

    def product(name: str, k: int, n: int, rows: float) -> Matmul:
        return Matmul(name=f"delta rule {name}", k=k, n=n, rows_per_token=rows, split="column", of_activations=True)

    return [
        product("scores", dim, CHUNK, 2 * heads),
        product("new values", CHUNK, dim, heads),
        product("state", dim, dim, 3 * heads),
        product("inverse times values and keys", CHUNK, dim, 2 * heads),
    ]
