"""The moments of a step at which a rank may hold most memory, each added up by parts."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from paraplan.cost.memory import loss_memory
from paraplan.cost.memory.rank import FP32, RankMemory, StageMemory
from paraplan.cost.plan_table import OFFLOADS, Floats, Mask


def end_of_forward(rank: RankMemory) -> StageMemory:
    """Return the moment when all weights have their copies, and the loss has made its tensors."""
    kept = loss_memory.kept_bytes(rank) * (losses_in_flight(rank) - 1) + loss_memory.end_of_forward_bytes(rank)
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0, end=rank.head_alone) + rank.copied_bytes(in_forward=True),
        gradients=rank.gradient_bytes(at_end=False),
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + kept,
        workspace=rank.unfinished_bytes,
    )


def losses_in_flight(rank: RankMemory) -> Floats:
    """Return of how many micro-batches the loss's tensors are kept: taken in halves, the first half frees them."""
    return np.where(rank.is_zero_bubble, np.minimum(rank.head_in_flight, 1.0), rank.head_in_flight)


def loss_backward(rank: RankMemory) -> StageMemory:
    """Return the moment when everything is kept, and the loss makes gradients of the size of the logits."""
    kept = loss_memory.kept_bytes(rank)
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0, end=rank.head_alone) + rank.copied_bytes(in_forward=False),
        gradients=rank.gradient_bytes(at_end=False),
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + kept * losses_in_flight(rank),
        workspace=np.maximum(0.0, loss_memory.backward_bytes(rank) - kept) + rank.unfinished_bytes,
    )


def head_backward(rank: RankMemory) -> StageMemory:
    """Return the moment when the gradient of the head's matrix is there, and the head has let go of the rest."""
    copies = rank.copied_bytes(in_forward=False)
    head = rank.costs.head_copied_parameters[rank.costs.key] * rank.stage.is_last
    own_copy = np.minimum(head * rank.framework.storage.autocast_copy_bytes, copies)
    becomes = np.where(rank.makes_gradients, head * FP32, 0.0)
    earlier = loss_memory.kept_bytes(rank) * (losses_in_flight(rank) - 1)
    moment = rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0) + copies - own_copy,
        gradients=rank.gradient_bytes(at_end=False) + becomes,
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + earlier,
        workspace=head_gradient_bytes(rank) * rank.stage.is_last,
    )
    return where(~rank.takes_halves & ~rank.is_fsdp & rank.framework.storage.frees_gradients, moment)


def head_gradient_bytes(rank: RankMemory) -> Floats:
    """Return the gradient of the head's matrix as computed, and its fp32 copy unless that becomes the gradient."""
    weight = rank.costs.head_copied_parameters[rank.costs.key]
    added = np.where(rank.makes_gradients, 0.0, FP32)
    return np.asarray(weight * (added + (rank.compute_bytes if rank.is_mixed else 0.0)))


def block_backward(rank: RankMemory) -> StageMemory:
    """Return the moment when the last block's backward pass begins: its working set stands beside all that is kept."""
    key = rank.costs.key
    head = rank.costs.head_parameters[key] * rank.stage.is_last
    fresh = np.where(rank.is_fsdp, waiting_head_bytes(rank), head * np.where(rank.makes_gradients, FP32, 0.0))
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=2) + rank.copied_bytes(in_forward=False),
        gradients=rank.gradient_bytes(at_end=False) + fresh,
        activations=rank.kept_bytes + rank.passed_bytes + loss_memory.kept_bytes(rank) * (losses_in_flight(rank) - 1),
        workspace=_working_bytes(rank),
    )


def waiting_head_bytes(rank: RankMemory) -> Floats:
    """Return the gradient of the head's matrix under FSDP: as computed, or what its own reduction reads."""
    head = rank.costs.head_parameters[rank.costs.key] * rank.stage.is_last
    is_reduced = (rank.head_alone > 0) & (rank.table.zero_stage > 1)
    return np.asarray(head * np.where(is_reduced, FP32, rank.compute_bytes))


def _working_bytes(rank: RankMemory) -> Floats:
    """Return what the backward pass of a block has beside what was kept for it."""
    costs, key = rank.costs, rank.costs.key
    gradient = costs.largest_gradient_bytes[key]
    return np.asarray(costs.working_bytes[key] + costs.boundary_bytes[key] + gradient)


def where(happens: Mask, moment: StageMemory) -> StageMemory:
    """Return `moment` where it happens, and nothing elsewhere."""
    return StageMemory(
        **{field.name: np.where(happens, getattr(moment, field.name), 0.0) for field in fields(StageMemory)}
    )


def block_reduction(rank: RankMemory) -> StageMemory:
    """Return the moment when the last block's backward pass is done, and FSDP reduces its gradients."""
    key = rank.costs.key
    head = np.where((rank.head_alone > 0) & (rank.table.zero_stage > 1), 0.0, waiting_head_bytes(rank))
    blocks = np.maximum(rank.stage.num_blocks * rank.in_flight, 1.0)
    moment = rank.moment(
        parameters=rank.gathered_bytes(num_blocks=2),
        gradients=rank.gradient_bytes(at_end=False) + head + rank.reduced_bytes(rank.block_parameters),
        activations=rank.kept_bytes * (1 - 1 / blocks) + rank.passed_bytes,
        workspace=rank.costs.boundary_bytes[key],
    )
    # Stage 1 reduces after the last micro-batch only, when a pipeline holds no other.
    return where(rank.is_fsdp & ((rank.table.zero_stage > 1) | ~rank.accumulates), moment)


def end_of_backward(rank: RankMemory) -> StageMemory:
    """Return the moment of the last gradients: the embedding's, and what FSDP reduces of all outside of the blocks."""
    kept = rank.kept_bytes + rank.head_kept_bytes
    of_one = kept / np.maximum(rank.in_flight, 1.0)
    embedding = rank.costs.embedding_parameters[rank.costs.key] * rank.stage.is_first * FP32
    # The first gradient stays as it is: another one beside it is that of a later micro-batch, which has fewer others.
    is_first = rank.makes_gradients & rank.accumulates
    is_later = is_first & (embedding > of_one)
    root = np.where(rank.embedding_alone > 0, rank.embedding_alone, rank.root_parameters - rank.head_alone)
    is_apart = rank.framework.storage.frees_gradients & (rank.table.zero_stage == 0) & (is_later | ~is_first)
    num_others = np.maximum(rank.in_flight - np.where(is_later, 2, 1), 0.0)
    others = of_one * num_others
    copies = rank.copied_bytes(in_forward=False) * num_others / np.maximum(rank.in_flight, 1.0)
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0, end=rank.embedding_alone) + copies,
        gradients=rank.gradient_bytes(at_end=True) + rank.reduced_bytes(root),
        activations=others + rank.passed_bytes,
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
