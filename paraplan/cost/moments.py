"""The moments of a step at which a rank may hold most memory, each added up by parts."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from paraplan.cost.rank_memory import FP32, HALF, RankMemory, StageMemory
from paraplan.cost.table import OFFLOADS, Floats


def end_of_forward(rank: RankMemory) -> StageMemory:
    """Return the moment when all weights have their copies, and the loss has made its tensors.

    torch's cross-entropy holds 16-bit logits, their log-probabilities and a copy of these in fp32; in fp32 logits and
    log-probabilities (ATen/native/LossNLL.cpp).
    """
    each = FP32 + 2 * HALF if rank.is_mixed else 2 * FP32
    each = min(each, rank.workload.habits.logit_bytes) if rank.is_mixed else each
    earlier = _loss_kept_bytes(rank) * (rank.head_in_flight - 1)
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0) + rank.copied_bytes(in_forward=True),
        gradients=rank.gradient_bytes(at_end=False),
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + earlier + each * rank.num_logits,
        workspace=np.zeros(len(rank.table)),
    )


def _loss_kept_bytes(rank: RankMemory) -> Floats:
    """Return what the loss of one micro-batch keeps: 16-bit and fp32 log-probabilities; a fused one, one tensor."""
    each = min(HALF + FP32, rank.workload.habits.logit_bytes) if rank.is_mixed else FP32
    return np.asarray(each * rank.num_logits)


def loss_backward(rank: RankMemory) -> StageMemory:
    """Return the moment when everything is kept, and the loss makes gradients of the size of the logits."""
    kept = _loss_kept_bytes(rank)
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0) + rank.copied_bytes(in_forward=False),
        gradients=rank.gradient_bytes(at_end=False),
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + kept * rank.head_in_flight,
        workspace=np.maximum(0.0, rank.loss_bytes * rank.num_logits - kept),
    )


def block_backward(rank: RankMemory) -> StageMemory:
    """Return the moment when the last block's backward pass begins: its working set stands beside all that is kept."""
    key = rank.costs.key
    head = rank.costs.head_parameters[key] * rank.stage.is_last
    fresh = head * np.where(rank.is_fsdp, rank.compute_bytes, np.where(rank.makes_gradients, FP32, 0.0))
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=2) + rank.copied_bytes(in_forward=False),
        gradients=rank.gradient_bytes(at_end=False) + fresh,
        activations=rank.kept_bytes + rank.passed_bytes + _loss_kept_bytes(rank) * (rank.head_in_flight - 1),
        workspace=rank.costs.working_bytes[key]
        + rank.costs.boundary_bytes[key]
        + rank.costs.largest_weight_parameters[key] * rank.compute_bytes,
    )


def block_reduction(rank: RankMemory) -> StageMemory:
    """Return the moment when the last block's backward pass is done, and FSDP reduces its gradients."""
    key = rank.costs.key
    head = rank.costs.head_parameters[key] * rank.stage.is_last * rank.compute_bytes
    blocks = np.maximum(rank.stage.num_blocks * rank.in_flight, 1.0)
    moment = rank.moment(
        parameters=rank.gathered_bytes(num_blocks=2),
        gradients=rank.gradient_bytes(at_end=False) + head + rank.reduced_bytes(rank.block_parameters),
        activations=rank.kept_bytes * (1 - 1 / blocks) + rank.passed_bytes,
        workspace=rank.costs.boundary_bytes[key],
    )
    nothing = np.zeros(len(rank.table))
    # Stage 1 reduces after the last micro-batch only, when a pipeline holds no other.
    reduces = rank.is_fsdp & ((rank.table.zero_stage > 1) | ~rank.accumulates)
    return StageMemory(
        **{field.name: np.where(reduces, getattr(moment, field.name), nothing) for field in fields(StageMemory)}
    )


def end_of_backward(rank: RankMemory) -> StageMemory:
    """Return the moment of the last gradients: the embedding's, and what FSDP reduces of all outside of the blocks."""
    others = (rank.in_flight - 1) / np.maximum(rank.in_flight, 1.0)
    embedding = rank.costs.embedding_parameters[rank.costs.key] * rank.stage.is_first * FP32
    is_apart = rank.workload.habits.frees_gradients & (rank.table.zero_stage == 0)
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0),
        gradients=rank.gradient_bytes(at_end=True) + rank.reduced_bytes(rank.root_parameters),
        activations=(rank.kept_bytes + rank.head_kept_bytes) * others + rank.passed_bytes,
        workspace=np.where(is_apart, embedding, np.where(rank.table.zero_stage == 1, rank.bucket_bytes, 0.0)),
    )


def optimizer_step(rank: RankMemory) -> StageMemory:
    """Return the moment of the step: activations are gone, and it makes copies of all parameters or of one."""
    is_here = rank.table.offload == OFFLOADS.index("none")
    return rank.moment(
        parameters=np.zeros(len(rank.table)),
        gradients=rank.gradient_bytes(at_end=True),
        activations=rank.passed_bytes,
        workspace=np.where(is_here, rank.step_copies_bytes, 0.0),
    )
