"""Losses that never hold all logits: in chunks, fused with the head, or without any logits in memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paraplan.cost.memory.parts import FP32, HALF
from paraplan.cost.memory.rank import RankMemory
from paraplan.cost.plan_table import Floats
from paraplan.plan.chunks import FEWEST, TOKENS

_KEPT_LOSS_BYTES = HALF + FP32
"""torch's cross-entropy keeps log-probabilities in 16 bits and a copy of these in fp32 (ATen/native/LossNLL.cpp)."""

_CHUNKS = 8.0
"""torchtune's CEWithChunkedOutputLoss: the head's outputs in 8 chunks, of which one at a time is made fp32."""


class LossBytes(NamedTuple):
    """Bytes of a loss: when it was computed, between the passes, and in its backward pass."""

    forward: Floats
    kept: Floats
    backward: Floats


def loss_bytes(rank: RankMemory) -> LossBytes:
    """Return what the loss of the training holds on a rank."""
    plain = _loss_of_all_logits(rank)
    return plain if rank.workload.training.loss == "plain" else _loss_without_all_logits(rank, plain)


def _loss_of_all_logits(rank: RankMemory) -> LossBytes:
    """Return what cross-entropy of all logits holds: beside what that keeps, the logits themselves.

    Of divided logits it keeps the fp32 softmax. A first half of a backward pass frees nothing: the fp32
    log-probabilities stand beside the 16-bit gradients too.
    """
    loss, is_mixed = rank.framework.loss, rank.is_mixed
    fused = loss.peak_logit_bytes
    backward = fused if is_mixed else 3 * FP32
    is_plain = is_mixed and backward >= _KEPT_LOSS_BYTES + FP32
    unfreed = np.where(rank.splits_backward, HALF if is_plain else 0.0, 0.0)
    is_divided = np.asarray((rank.table.tp > 1) & (loss.parallel_logit_bytes is not None))
    divided = (loss.parallel_logit_bytes or 0.0) if is_mixed else FP32
    forward = np.where(
        is_divided, HALF + FP32 if is_mixed else 2 * FP32, min(HALF + _KEPT_LOSS_BYTES, fused) if is_mixed else 2 * FP32
    )
    kept = np.where(is_divided, FP32, min(_KEPT_LOSS_BYTES, fused) if is_mixed else FP32)
    logits = rank.num_logits
    return LossBytes(logits * forward, logits * kept, logits * np.where(is_divided, divided, backward + unfreed))


def _loss_without_all_logits(rank: RankMemory, plain: LossBytes) -> LossBytes:
    """Return what the loss of the training's `loss` holds on a rank; for another than plain.

    chunked: 16-bit logits of all tokens, and of one chunk what cross-entropy makes of it in fp32, twice its size;
    nothing where torchtune compiles it with the blocks (torchtune/training/_compile.py): inductor writes gradients
    in 16 bits from logits in 16 bits (seen in torch 2.13's allocations).
    Where the backward pass computes logits again, those of one chunk alone, and the gradients that the head hands on.
    liger: the gradients of the head's input and of its matrix, made in the forward pass, where that trains, and the
    16-bit logits, their fp32 values and gradients of one chunk of tokens, as many as make logits of the size of the
    input (Hsu et al. 2024, Liger Kernel, section 3.2: chunks are vocabulary over hidden size, a power of two).
    cut: one fp32 number a token, and the gradients of the head's input and matrix in the backward pass (Wijmans et al.
    2024, section 4.2).
    """
    model, table = rank.workload.model, rank.table
    tokens = table.tokens(rank.workload.training.seq_length) * rank.stage.is_last
    each = rank.compute_bytes
    logits = rank.num_logits
    entry = tokens * model.hidden_size * each
    head = rank.costs.head_copied_parameters[rank.costs.key] * rank.stage.is_last
    trained = (rank.costs.head_parameters + rank.costs.tied_parameters)[rank.costs.key] > 0
    if rank.workload.training.loss == "chunked" and rank.framework.loss.recomputes_chunks:
        chunks = np.maximum(FEWEST, np.ceil(tokens / TOKENS))
        beside = entry + 2 * head * each * trained  # the gradients of one chunk are added to those of the others
        return LossBytes(plain.forward / chunks, np.zeros_like(logits), plain.backward / chunks + beside)
    if rank.workload.training.loss == "chunked":
        of_chunk = logits / _CHUNKS * 2 * (0 if rank.workload.training.compiled else FP32)
        return LossBytes(logits * each + of_chunk, logits * each, logits * (each + each / _CHUNKS) + of_chunk)
    if rank.workload.training.loss == "cut":
        return LossBytes(tokens * FP32, tokens * FP32, tokens * FP32 + entry + head * each * trained)
    chunks = 2.0 ** np.ceil(np.log2(max(1.0, model.vocabulary / model.hidden_size)))
    gradients = entry + head * each * trained
    return LossBytes(gradients + logits / chunks * (each + 2 * FP32), gradients, gradients + entry)
