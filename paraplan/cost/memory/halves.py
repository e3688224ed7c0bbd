"""The moments of a step whose backward passes torch takes in halves (zero bubble), on every stage but the first.

The first half makes the gradients of activations and keeps its graph, so that nothing is freed but what the loss alone
reads; the gradients of what each matmul and norm gave wait beside it. The second half makes the gradients of the
weights, one after the other in the model's order, and frees what waited for each; the activations go with the last
(torch/distributed/pipelining/_backward.py, `stage_backward_input` and `stage_backward_weight`). The first stage does
all in its second half (stage.py, `backward_one_chunk`). FSDP adds up what a second half made where the next first half
passes the unit: until then it stands beside the sum, in 16 bits.
"""

from __future__ import annotations

import numpy as np

from paraplan.cost.memory import loss_memory, moments
from paraplan.cost.memory.rank import RankMemory, StageMemory
from paraplan.cost.plan_table import Floats


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


def start_of_second_half(rank: RankMemory) -> StageMemory:
    """Return the moment when the second half makes the first gradients of weights: a tied head's, a block's."""
    is_tied = rank.stage.is_last & rank.workload.model.tied_embeddings
    of_block = np.where(rank.has_earlier_gradients, rank.costs.second_half_bytes[rank.costs.key], 0.0)
    moment = _moment(
        rank,
        activations=rank.kept_bytes + rank.head_kept_bytes,
        workspace=rank.waiting_bytes
        + rank.half_done_bytes
        + np.maximum(of_block, moments.head_gradient_bytes(rank) * is_tied),
        at_end=False,
    )
    return moments.where(rank.takes_halves, moment)


def end_of_second_half(rank: RankMemory) -> StageMemory:
    """Return the moment when the second half makes the last gradient of a weight: an untied head's, or a block's."""
    costs, key = rank.costs, rank.costs.key
    has_head = rank.stage.is_last & (not rank.workload.model.tied_embeddings)
    head = costs.head_output_gradient_bytes[key] + moments.head_gradient_bytes(rank)
    moment = _moment(
        rank,
        activations=rank.kept_bytes + rank.head_kept_bytes,
        workspace=rank.waiting_bytes
        + np.where(has_head, head, costs.largest_gradient_bytes[key])
        + np.where(rank.is_fsdp, rank.parameters * rank.compute_bytes, 0.0),
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
    key = rank.costs.key
    unadded = np.where(rank.is_fsdp, rank.block_parameters * rank.compute_bytes, 0.0)
    return np.asarray(rank.costs.first_half_bytes[key] + rank.costs.boundary_bytes[key] + unadded)
