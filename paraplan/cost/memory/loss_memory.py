"""What the loss holds of the logits: at the end of a forward pass, between the passes, and while it makes gradients."""

from __future__ import annotations

import numpy as np

from paraplan.cost.memory.rank import FP32, HALF, RankMemory
from paraplan.cost.plan_table import Floats, Mask

# torch's cross-entropy keeps log-probabilities in 16 bits and a copy of these in fp32 (ATen/native/LossNLL.cpp).
_KEPT_BYTES = HALF + FP32


def end_of_forward_bytes(rank: RankMemory) -> Floats:
    """Return what stands when a forward pass has made its loss: beside what that keeps, the logits themselves."""
    fused = rank.framework.loss.logit_bytes
    whole = min(HALF + _KEPT_BYTES, fused) if rank.is_mixed else 2 * FP32
    divided = HALF + FP32 if rank.is_mixed else 2 * FP32
    return rank.num_logits * np.where(_is_divided(rank), divided, whole)


def kept_bytes(rank: RankMemory) -> Floats:
    """Return what the loss of one micro-batch keeps for its backward pass; of divided logits the fp32 softmax."""
    whole = min(_KEPT_BYTES, rank.framework.loss.logit_bytes) if rank.is_mixed else FP32
    return rank.num_logits * np.where(_is_divided(rank), FP32, whole)


def backward_bytes(rank: RankMemory) -> Floats:
    """Return the most that a loss holds while its backward pass makes gradients, what it kept included.

    A first half of a backward pass frees nothing: the fp32 log-probabilities stand beside the 16-bit gradients too.
    """
    framework = rank.framework
    whole = framework.loss.logit_bytes if rank.is_mixed else 3 * FP32
    is_plain = rank.is_mixed and whole >= _KEPT_BYTES + FP32
    unfreed = np.where(rank.takes_halves, HALF if is_plain else 0.0, 0.0)
    divided = (framework.loss.parallel_logit_bytes or 0.0) if rank.is_mixed else FP32
    return rank.num_logits * np.where(_is_divided(rank), divided, whole + unfreed)


def _is_divided(rank: RankMemory) -> Mask:
    """Return the plans whose loss is computed on logits that tensor parallelism divided, by code of its own."""
    return np.asarray((rank.table.tp > 1) & (rank.framework.loss.parallel_logit_bytes is not None))
