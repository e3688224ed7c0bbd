"""How frozen weights are stored: plain types, and the block formats of bitsandbytes and torchao."""

from __future__ import annotations

from math import ceil, prod
from typing import Literal, NamedTuple

from paraplan.errors import PlanError

WeightFormat = Literal["bf16", "fp32", "fp8", "int8", "nf4", "nf4:double", "fp4", "fp4:double", "int4", "mxfp4"]
"""nf4 and fp4: bitsandbytes' Linear4bit; `:double` quantizes the scales too (`bnb_4bit_use_double_quant`). int8:
bitsandbytes' Linear8bitLt. int4: GPTQ in groups of 128. mxfp4: the Open Compute Project's microscaling format. fp8: one
byte and a scale for the tensor, as Transformer Engine stores it."""

_PLAIN_BYTES = {"bf16": 2.0, "fp32": 4.0}
_FP32, _DOUBLE_BLOCK = 4, 256


def is_linear_4bit(weights: str | None) -> bool:
    """Whether weights are stored in the 4 bits of bitsandbytes' Linear4bit; a training without a format has none."""
    return weights is not None and weights.startswith(("nf4", "fp4"))


class BlockFormat(NamedTuple):
    """A format of `bits` an element with a scale of `scale_bytes` for each block of `block_size` elements.

    `has_double_scales` says that scales are bytes themselves, with an fp32 scale for each 256 of them. `tables_bytes`
    are the tables of values that each tensor has beside it.
    """

    bits: int
    block_size: int
    scale_bytes: float
    has_double_scales: bool = False
    tables_bytes: int = 0


_BLOCK_FORMATS = {
    # bitsandbytes/functional.py, `quantize_4bit`: two elements a byte, `absmax` in fp32 for each 64, a table of 16 fp32
    # values; nested: `absmax` in bytes with fp32 scales for each 256 (`quantize_blockwise`), a table of 256 and a mean.
    "nf4": BlockFormat(4, 64, _FP32, tables_bytes=16 * _FP32),
    "fp4": BlockFormat(4, 64, _FP32, tables_bytes=16 * _FP32),
    "nf4:double": BlockFormat(4, 64, 1, has_double_scales=True, tables_bytes=(16 + 256 + 1) * _FP32),
    "fp4:double": BlockFormat(4, 64, 1, has_double_scales=True, tables_bytes=(16 + 256 + 1) * _FP32),
    # GPTQ (Frantar et al. 2023) as AutoGPTQ stores it: 4 bits, and a 16-bit scale and a 4-bit zero for each 128.
    "int4": BlockFormat(4, 128, 2.5),
    # OCP Microscaling Formats 1.0: 4 bits, and an 8-bit exponent for each 32.
    "mxfp4": BlockFormat(4, 32, 1),
}


def stored_bytes(weight_format: WeightFormat, shape: tuple[int, ...]) -> float:
    """Return the bytes of a weight of `shape` with its scales and tables."""
    elements = prod(shape)
    if weight_format in _PLAIN_BYTES:
        return elements * _PLAIN_BYTES[weight_format]
    if weight_format == "fp8":
        return elements + _FP32
    if weight_format == "int8":  # `SCB`, an fp32 scale for each row (bitsandbytes/autograd/_functions.py)
        return elements + _FP32 * (elements / shape[-1])
    block = _BLOCK_FORMATS[weight_format]
    num_blocks = ceil(elements / block.block_size)
    scales = num_blocks * block.scale_bytes
    if block.has_double_scales:
        scales += ceil(num_blocks / _DOUBLE_BLOCK) * _FP32
    return ceil(elements * block.bits / 8) + scales + block.tables_bytes


def is_quantized(weight_format: WeightFormat) -> bool:
    """Return whether matmuls read a copy in 16 bits that is made for each use."""
    return weight_format not in (*_PLAIN_BYTES, "fp8", "int8")


def is_stored_below_16_bits(weight_format: WeightFormat) -> bool:
    """Return whether a format holds less than 16 bits an element."""
    return weight_format not in _PLAIN_BYTES


WEIGHT_FORMATS: tuple[WeightFormat, ...] = (
    "bf16",
    "fp32",
    "fp8",
    "int8",
    "nf4",
    "nf4:double",
    "fp4",
    "fp4:double",
    "int4",
    "mxfp4",
)


def weight_format(text: str) -> WeightFormat:
    """Return the format that a user names. Raises `PlanError` for one that nobody stores frozen weights in."""
    words = text.strip().lower()
    for known in WEIGHT_FORMATS:
        if words == known:
            return known
    raise PlanError(f"base weights {text!r} are not a known format", hint=f"use {', '.join(WEIGHT_FORMATS)}")
