"""The moments of a step whose backward passes torch takes in halves (zero bubble), on every stage but the first.

The first half makes the gradients of activations and keeps its graph, so that nothing is freed but what the loss alone
reads; the gradients of what each matmul and norm gave wait beside it. The second half makes the gradients of the
weights, one after the other in the model's order, and frees what waited for each; the activations go with the last
(torch/distributed/pipelining/_backward.py, `stage_backward_input` and `stage_backward_weight`). The first stage does
all in its second half (stage.py, `backward_one_chunk`).
"""

from __future__ import annotations

import numpy as np

from paraplan.cost import loss_memory, moments
from paraplan.cost.rank_memory import FP32, RankMemory, StageMemory
from paraplan.cost.table import Floats


def end_of_first_half(rank: RankMemory) -> StageMemory:
    """Return the moment when a micro-batch has all gradients of activations, and those before it wait too."""
    moment = _moment(
        rank,
        activations=rank.kept_bytes + rank.head_kept_bytes + loss_memory.kept_bytes(rank),
        workspace=rank.waiting_bytes + rank.half_done_bytes + _working_bytes(rank),
        at_end=False,
    )
    return moments.where(rank.takes_halves, moment)


def later_first_half(rank: RankMemory) -> StageMemory:
    """Return the same moment one micro-batch later, of ranks that had all in flight before any gradient of a weight."""
    left = 1 - 1 / np.maximum(rank.in_flight, 1.0)
    moment = _moment(
        rank,
        activations=(rank.kept_bytes + rank.head_kept_bytes) * left + loss_memory.kept_bytes(rank),
        workspace=rank.waiting_bytes + rank.half_done_bytes + _working_bytes(rank),
        at_end=True,
    )
    has_next = rank.stage.rank + 1 < rank.table.num_microbatches
    return moments.where(rank.takes_halves & ~rank.has_earlier_gradients & has_next, moment)


def head_in_second_half(rank: RankMemory) -> StageMemory:
    """Return the moment when the second half makes the gradient of a head that is tied, the first of the weights."""
    moment = _moment(
        rank,
        activations=rank.kept_bytes + rank.head_kept_bytes,
        workspace=rank.waiting_bytes + rank.half_done_bytes + _head_gradient_bytes(rank),
        at_end=False,
    )
    is_first = rank.takes_halves & rank.stage.is_last & rank.workload.model.tied_embeddings
    return moments.where(is_first, moment)


def end_of_second_half(rank: RankMemory) -> StageMemory:
    """Return the moment when the second half makes the last gradient of a weight: an untied head's, or a block's."""
    costs, key = rank.costs, rank.costs.key
    has_head = rank.stage.is_last & (not rank.workload.model.tied_embeddings)
    head = costs.head_output_gradient_bytes[key] + _head_gradient_bytes(rank)
    moment = _moment(
        rank,
        activations=rank.kept_bytes + rank.head_kept_bytes,
        workspace=rank.waiting_bytes + np.where(has_head, head, costs.largest_gradient_bytes[key]),
        at_end=True,
    )
    return moments.where(rank.takes_halves, moment)


def _moment(rank: RankMemory, *, activations: Floats, workspace: Floats, at_end: bool) -> StageMemory:
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0) + rank.copied_bytes(in_forward=False),
        gradients=rank.gradient_bytes(at_end=at_end),
        activations=activations + rank.passed_bytes,
        workspace=workspace,
    )


def _working_bytes(rank: RankMemory) -> Floats:
    """Return what the first half of a block's backward pass has beside what stays for the second."""
    return np.asarray(rank.costs.first_half_bytes[rank.costs.key] + rank.costs.boundary_bytes[rank.costs.key])


def _head_gradient_bytes(rank: RankMemory) -> Floats:
    """Return the gradient of the head's matrix as computed, and its fp32 copy unless that becomes the gradient."""
    weight = rank.costs.head_copied_parameters[rank.costs.key]
    added = np.where(rank.has_earlier_gradients, FP32, 0.0)
    return np.asarray(weight * (added + (rank.compute_bytes if rank.is_mixed else 0.0)))
