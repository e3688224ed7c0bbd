"""The moments of a step at which a rank may hold most memory, each added up by parts."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from paraplan.cost.rank_memory import FP32, HALF, RankMemory, StageMemory
from paraplan.cost.table import OFFLOADS, Floats, Mask


def end_of_forward(rank: RankMemory) -> StageMemory:
    """Return the moment when all weights have their copies, and the loss has made its tensors.

    torch's cross-entropy holds 16-bit logits, their log-probabilities and a copy of these in fp32; in fp32 logits and
    log-probabilities (ATen/native/LossNLL.cpp).
    """
    each = FP32 + 2 * HALF if rank.is_mixed else 2 * FP32
    each = min(each, rank.workload.habits.logit_bytes) if rank.is_mixed else each
    earlier = _loss_kept_bytes(rank) * (_losses_in_flight(rank) - 1)
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0) + rank.copied_bytes(in_forward=True),
        gradients=rank.gradient_bytes(at_end=False),
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + earlier + each * rank.num_logits,
        workspace=np.zeros(len(rank.table)),
    )


def _losses_in_flight(rank: RankMemory) -> Floats:
    """Return of how many micro-batches the loss's tensors are kept: taken in halves, the first half frees them."""
    return np.where(rank.is_zero_bubble, np.minimum(rank.head_in_flight, 1.0), rank.head_in_flight)


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
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + kept * _losses_in_flight(rank),
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
        activations=rank.kept_bytes + rank.passed_bytes + _loss_kept_bytes(rank) * (_losses_in_flight(rank) - 1),
        workspace=_working_bytes(rank),
    )


def _working_bytes(rank: RankMemory) -> Floats:
    """Return what the backward pass of a block has beside what was kept for it."""
    costs, key = rank.costs, rank.costs.key
    gradient = costs.largest_gradient_bytes[key]
    return np.asarray(costs.working_bytes[key] + costs.boundary_bytes[key] + gradient)


def end_of_first_half(rank: RankMemory) -> StageMemory:
    """Return the moment, under zero bubble, when the backward pass of the activations ends; it frees nothing before."""
    moment = rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0) + rank.copied_bytes(in_forward=False),
        gradients=rank.gradient_bytes(at_end=False),
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + _loss_kept_bytes(rank),
        workspace=rank.halves_bytes + _working_bytes(rank),
    )
    return _where(rank.is_zero_bubble, moment)


def _where(happens: Mask, moment: StageMemory) -> StageMemory:
    """Return `moment` where it happens, and nothing elsewhere."""
    return StageMemory(
        **{field.name: np.where(happens, getattr(moment, field.name), 0.0) for field in fields(StageMemory)}
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
    # Stage 1 reduces after the last micro-batch only, when a pipeline holds no other.
    return _where(rank.is_fsdp & ((rank.table.zero_stage > 1) | ~rank.accumulates), moment)


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
    """Return the moment of the step or just before: activations are gone, and copies of all parameters or one made."""
    is_here = rank.table.offload == OFFLOADS.index("none")
    copies = np.where(is_here, rank.step_copies_bytes, 0.0)
    return rank.moment(
        parameters=np.zeros(len(rank.table)),
        gradients=rank.gradient_bytes(at_end=True),
        activations=rank.passed_bytes,
        workspace=np.maximum(copies, rank.flat_average_bytes),
    )
