"""Losses that never hold all logits: in chunks, fused with the head, or without any logits in memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paraplan.cost.memory.parts import FP32
from paraplan.cost.memory.rank import RankMemory
from paraplan.cost.plan_table import Floats

_CHUNKS = 8.0
"""torchtune's CEWithChunkedOutputLoss: the head's outputs in 8 chunks, of which one at a time is made fp32."""


class LossBytes(NamedTuple):
    """Bytes of a loss: when it was computed, between the passes, and in its backward pass."""

    forward: Floats
    kept: Floats
    backward: Floats


def loss_without_all_logits(rank: RankMemory) -> LossBytes:
    """Return what the loss of the training's `loss` holds on a rank; for another than plain.

    chunked: 16-bit logits of all tokens, and of one chunk what cross-entropy makes of it in fp32, twice its size;
    nothing where torchtune compiles it with the blocks (torchtune/training/_compile.py): inductor writes gradients
    in 16 bits from logits in 16 bits (seen in torch 2.13's allocations).
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
    if rank.workload.training.loss == "chunked":
        of_chunk = logits / _CHUNKS * 2 * (0 if rank.workload.training.compiled else FP32)
        return LossBytes(logits * each + of_chunk, logits * each, logits * (each + each / _CHUNKS) + of_chunk)
    if rank.workload.training.loss == "cut":
        return LossBytes(tokens * FP32, tokens * FP32, tokens * FP32 + entry + head * each * trained)
    chunks = 2.0 ** np.ceil(np.log2(max(1.0, model.vocabulary / model.hidden_size)))
    gradients = entry + head * each * trained
    return LossBytes(gradients + logits / chunks * (each + 2 * FP32), gradients, gradients + entry)
