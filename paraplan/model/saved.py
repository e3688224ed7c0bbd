"""Bytes that tensors kept for the backward pass take on one device that holds them whole."""

from __future__ import annotations

from collections.abc import Iterable

from paraplan.model.spec import AttentionKernel, SavedTensor

_FIXED_BYTES = {"fp32": 4, "mask": 1, "cast": 4, "promoted_copy": 0, "weights_copy": 0}  # without autocast


def saved_bytes(
    tensors: Iterable[SavedTensor],
    *,
    seq_length: int,
    micro_batch_size: int,
    kernel: AttentionKernel,
    bytes_per_element: int = 2,
) -> float:
    """Return the bytes that `tensors` take for a micro-batch, unsplit, under one attention kernel.

    `bytes_per_element` is the size of an activation: 2 in half precision, 4 in fp32, where copies in half precision are
    the tensors that they would be copies of.
    """
    total = 0.0
    for tensor in tensors:
        if tensor.kernels is not None and kernel not in tensor.kernels:
            continue
        if tensor.absent_in_fp32 and bytes_per_element == _FIXED_BYTES["fp32"]:
            continue
        elements = seq_length * (tensor.elements_per_token + tensor.elements_per_token_pair * seq_length)
        total += 2.0 * tensor.elements_of_copy
        copies = 1 if tensor.is_shared_by_batch else micro_batch_size
        total += _FIXED_BYTES.get(tensor.element_type, bytes_per_element) * elements * copies
    return total
