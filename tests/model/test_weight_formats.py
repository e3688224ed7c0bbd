from __future__ import annotations

from typing import Any

import pytest
import torch

from paraplan.errors import PlanError
from paraplan.model.weight_formats import WEIGHT_FORMATS, WeightFormat, stored_bytes, weight_format


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("shape", [(1024, 512), (4096, 1408), (64, 64)])
@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4:double", "fp4:double"])
def test_four_bits_are_stored_as_bitsandbytes_does(shape: tuple[int, int], name: WeightFormat) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="compares with bitsandbytes' tensors")
    kind, _, nested = name.partition(":")
    packed, state = functional.quantize_4bit(torch.randn(shape), quant_type=kind, compress_statistics=bool(nested))
    stored = bytes_of(packed, state.absmax, state.code)
    if nested:
        stored += bytes_of(state.offset, state.state2.absmax, state.state2.code)
    assert stored_bytes(name, shape) == stored


@pytest.mark.parametrize("shape", [(1024, 512), (96, 160)])
def test_eight_bits_are_stored_as_bitsandbytes_does(shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="compares with bitsandbytes' tensors")
    packed, scales, _ = functional.int8_vectorwise_quant(torch.randn(shape, dtype=torch.float16))
    assert stored_bytes("int8", shape) == bytes_of(packed, scales)


def test_nf4_takes_what_torchao_takes_but_for_its_table() -> None:
    module: Any = pytest.importorskip(
        "torchao.quantization.quantize_.workflows.nf4.nf4_tensor", reason="compares with torchao's tensors"
    )
    tensor = module.to_nf4(torch.randn(1024, 512, dtype=torch.bfloat16))
    stored = bytes_of(tensor.quantized_data, tensor.quantized_scalers, tensor.quantization_factor)
    tables = (16 + 256 + 1) * 4
    assert stored_bytes("nf4:double", (1024, 512)) - tables == pytest.approx(stored, rel=1e-3)


def test_formats_are_counted_by_hand() -> None:
    shape = (4096, 4096)
    elements = 4096 * 4096
    assert stored_bytes("bf16", shape) == 2 * elements
    assert stored_bytes("fp32", shape) == 4 * elements
    assert stored_bytes("int8", shape) == elements + 4 * 4096
    assert stored_bytes("nf4", shape) == elements / 2 + 4 * elements / 64 + 64
    assert stored_bytes("mxfp4", shape) == elements / 2 + elements / 32


def test_names_of_formats_are_read_and_others_refused() -> None:
    assert [weight_format(name.upper()) for name in WEIGHT_FORMATS] == list(WEIGHT_FORMATS)
    with pytest.raises(PlanError, match="'nf5' are not a known format"):
        weight_format("nf5")
