"""Peak-memory candidates: the points of a step where allocation can peak, each added up by parts.

Candidates are the end of the forward pass, the backward pass of the loss, of the head and of a block, the end of the
backward pass, and the optimizer step. `docs/memory.md` says how each is counted, with the sources.

Zero bubble splits the backward pass of all stages but the first: the first half makes input gradients and keeps its
graph, so that only what the loss alone reads is freed, and the output gradients of each matmul and norm wait beside it;
the second half makes weight gradients one by one in the model's order and frees what waited for each; activations go
with the last (torch/distributed/pipelining/_backward.py, `stage_backward_input` and `stage_backward_weight`; stage.py,
`backward_one_chunk`). FSDP adds up what a second half made where the next first half passes the unit: until then it
stands beside the sum, in 16 bits.
"""

from __future__ import annotations

import numpy as np

from paraplan.cost.communication.exchanges import run_again
from paraplan.cost.indexers import index_heads
from paraplan.cost.memory.losses import loss_bytes
from paraplan.cost.memory.overheads import held_by_collectives_bytes
from paraplan.cost.memory.parts import FP32, HALF, StageMemory
from paraplan.cost.memory.rank import RankMemory
from paraplan.cost.plan_table import Floats, Mask, OffloadCode
from paraplan.plan.allocators import grows_segments


def peak_of(rank: RankMemory) -> StageMemory:
    """Return the memory of a rank where it holds most, as `torch.cuda.max_memory_allocated` shows it."""
    found = _candidates(rank)
    largest = np.argmax([candidate.total_bytes for candidate in found], axis=0)
    return StageMemory(*(np.choose(largest, parts) for parts in zip(*found, strict=True)))


def peak_bytes(rank: RankMemory) -> Floats:
    """Return the total of `peak_of` alone."""
    return np.asarray(np.max([candidate.total_bytes for candidate in _candidates(rank)], axis=0))


def _candidates(rank: RankMemory) -> list[StageMemory]:
    found = [
        end_of_forward(rank),
        loss_backward(rank),
        head_backward(rank),
        block_backward(rank),
        first_block_backward(rank),
        end_of_backward(rank),
        optimizer_step(rank),
    ]
    if rank.splits_backward.any():
        found += [end_of_input_gradients(rank), later_input_gradients(rank)]
        found += [first_weight_gradient(rank), last_weight_gradient(rank)]
    if rank.is_fsdp.any():
        found += [block_reduction(rank), next_block_backward(rank)]
    if (heads := index_heads(rank.workload)) is not None:
        found.append(index_scores(rank, heads))
    return found


def index_scores(rank: RankMemory, num_heads: float) -> StageMemory:
    """Return the point when a last block's indexer has its scores in fp32, before and after an operation on them."""
    length = rank.workload.training.seq_length
    pairs = rank.table.micro_batch_size * length * length / rank.table.cp
    return rank.candidate(
        parameters=rank.forward_copies_bytes,
        gradients=rank.gradient_bytes,
        activations=rank.kept_bytes + rank.passed_bytes,
        workspace=rank.unfinished_bytes + 2 * FP32 * num_heads * pairs * (rank.stage.num_blocks > 0),
    )


def cached_bytes(rank: RankMemory, peak: StageMemory) -> Floats:
    """Return what torch's allocator takes from the GPU before its rounding: the peak, or more where blocks do not fit.

    The caching allocator does not merge segments, so a larger request allocates a new one, unless segments grow.
    In the first step sizes grow: tensors of blocks, of the loss, then flat copies of gradients. They stand side by
    side, although never all are live, and beside them what collectives still read. Frameworks on other allocators hold
    their peak.
    """
    beside = loss_backward_bytes(rank) + rank.bucket_bytes + rank.flat_step_bytes
    held = held_by_collectives_bytes(rank.workload, rank.table, rank.costs, rank.stage)
    if grows_segments(rank.framework.storage.expandable_segments, rank.workload.cluster.num_gpus):
        return np.asarray(np.maximum(peak.total_bytes, _by_stream_bytes(rank)) + held)
    return np.asarray(np.maximum(peak.total_bytes, block_backward(rank).total_bytes + beside) + held)


def _by_stream_bytes(rank: RankMemory) -> Floats:
    """Return what segments that grow hold: each stream has its own, as large as the most that was ever in it.

    FSDP gathers on one stream and reduces on another (torch/distributed/fsdp/_fully_shard/_fsdp_state.py); all else
    is on a third.
    """
    in_backward = block_backward(rank).total_bytes - rank.gathered_blocks_bytes
    in_loss = loss_backward(rank).total_bytes - rank.gathered_head_bytes
    gathered = np.maximum.reduce([rank.gathered_blocks_bytes, rank.gathered_head_bytes, rank.gathered_embedding_bytes])
    largest = np.maximum.reduce([rank.block_parameters, rank.head_alone, rank.embedding_alone])
    reduced = np.where(rank.table.zero_stage >= 1, largest * rank.full_bytes, 0.0)
    return np.asarray(np.where(rank.is_fsdp, np.maximum(in_backward, in_loss) + gathered + reduced, 0.0))


def host_bytes(rank: RankMemory) -> Floats:
    """Return the host memory that offload moves a rank's state and activations to.

    An offloaded optimizer brings its state, fp32 parameters to update and fp32 gradients to update by (Ren et al. 2021,
    ZeRO-Offload, section 4.1); offloaded parameters are those fp32 parameters, or 16-bit ones beside them, and frozen
    ones as they are stored. DeepSpeed's 16-bit gradients arrive in a buffer of their own, in stages 1 and 2 where
    micro-batches add up (`grad_partitions_flat_buffer` in zero/stage3.py, `accumulated_grads_in_cpu` in
    zero/stage_1_and_2.py).
    """
    has_masters = rank.is_mixed and rank.framework.storage.master_bytes > 0  # among the state already
    states = rank.state_bytes / rank.state_shards
    copies = (1 if has_masters else 2) * FP32 * rank.parameters / rank.state_shards
    stored = rank.framework.storage.weight_bytes * has_masters * rank.parameters / rank.shards
    moved = np.where(rank.offloads_parameters, stored + rank.frozen_shard_bytes, 0.0)
    arrives = rank.sends_gradients & ((rank.table.zero_stage == 3) | (rank.table.num_microbatches > 1))
    arriving = np.where(arrives, rank.compute_bytes * rank.parameters / rank.state_shards, 0.0)
    waiting = rank.activation_bytes - rank.kept_bytes
    optimizer = np.where(rank.table.offload == OffloadCode.NONE, 0.0, states + copies)
    return np.asarray(optimizer + moved + arriving + waiting)


def end_of_forward(rank: RankMemory) -> StageMemory:
    """Return the point when all weights have their copies, and the loss has made its tensors."""
    kept = _kept_loss_bytes(rank) * (losses_in_flight(rank) - 1) + loss_bytes(rank).forward
    kept = kept + np.where(run_again(rank.workload, rank.table), 0.0, rank.unscattered_bytes)
    return rank.candidate(
        parameters=rank.gathered_head_bytes + rank.forward_copies_bytes,
        gradients=rank.gradient_bytes,
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + kept,
        workspace=rank.unfinished_bytes,
    )


def losses_in_flight(rank: RankMemory) -> Floats:
    """Return the micro-batches whose loss tensors are alive; with split backward the first half frees them."""
    return np.where(rank.is_zero_bubble, np.minimum(rank.head_in_flight, 1.0), rank.head_in_flight)


def loss_backward(rank: RankMemory) -> StageMemory:
    """Return the point when everything is kept, and the loss makes gradients of the size of the logits."""
    kept = _kept_loss_bytes(rank)
    return rank.candidate(
        parameters=rank.gathered_head_bytes + rank.backward_copies_bytes,
        gradients=rank.gradient_bytes,
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + kept * losses_in_flight(rank),
        workspace=np.maximum(0.0, loss_backward_bytes(rank) - kept) + rank.unfinished_bytes,
    )


def head_backward(rank: RankMemory) -> StageMemory:
    """Return the point when the gradient of the head's matrix is there, and the head has let go of the rest."""
    copies = rank.backward_copies_bytes
    head = rank.costs.head_copied_parameters[rank.costs.key] * rank.stage.is_last
    own_copy = np.minimum(head * HALF, copies)
    becomes = np.where(rank.makes_gradients, head * rank.full_bytes, 0.0)
    earlier = _kept_loss_bytes(rank) * (losses_in_flight(rank) - 1)
    candidate = rank.candidate(
        parameters=rank.gathered_root_bytes + copies - own_copy,
        gradients=rank.gradient_bytes + becomes,
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + earlier,
        workspace=head_gradient_bytes(rank) * rank.stage.is_last,
    )
    return _only(~rank.splits_backward & ~rank.is_fsdp & rank.framework.storage.frees_gradients, candidate)


def head_gradient_bytes(rank: RankMemory) -> Floats:
    """Return the gradient of the head's matrix as computed, and its fp32 copy unless that becomes the gradient."""
    weight = rank.costs.head_copied_parameters[rank.costs.key]
    added = np.where(rank.makes_gradients, 0.0, rank.full_bytes)
    has_copy = rank.is_mixed and rank.full_bytes > HALF
    return np.asarray(weight * (added + (rank.compute_bytes if has_copy else 0.0)))


def block_backward(rank: RankMemory) -> StageMemory:
    """Return the point when the last block's backward pass begins: its working set stands beside all that is kept."""
    key = rank.costs.key
    head = rank.costs.head_parameters[key] * rank.stage.is_last
    fresh = np.where(
        rank.is_fsdp, waiting_head_bytes(rank), head * np.where(rank.makes_gradients, rank.full_bytes, 0.0)
    )
    return rank.candidate(
        parameters=rank.gathered_blocks_bytes + rank.backward_copies_bytes,
        gradients=rank.gradient_bytes + fresh,
        activations=rank.kept_bytes + rank.passed_bytes + _kept_loss_bytes(rank) * (losses_in_flight(rank) - 1),
        workspace=_working_bytes(rank),
    )


def first_block_backward(rank: RankMemory) -> StageMemory:
    """Return the point when the first block's backward pass runs, beside the gradients of the experts behind it.

    Replicas that share out their experts have those in no buckets: they come block by block.
    """
    blocks = np.maximum(rank.stage.num_blocks, 1.0)
    left = 1 - (1 - 1 / blocks) / np.maximum(rank.in_flight, 1.0)
    candidate = rank.candidate(
        parameters=rank.forward_copies_bytes * left,
        gradients=rank.gradient_bytes + rank.spread_experts * (1 - 1 / blocks) * rank.full_bytes,
        activations=rank.kept_bytes * left + rank.passed_bytes,
        workspace=_working_bytes(rank),
    )
    is_fresh = rank.framework.storage.frees_gradients & rank.is_replica & ~rank.has_earlier_gradients
    return _only(is_fresh & (rank.spread_experts > 0) & ~rank.splits_backward, candidate)


def waiting_head_bytes(rank: RankMemory) -> Floats:
    """Return the gradient of the head's matrix under FSDP: as computed, or what its own reduction reads and writes."""
    head = rank.costs.head_parameters[rank.costs.key] * rank.stage.is_last
    is_reduced = (rank.head_alone > 0) & (rank.table.zero_stage > 1)
    return np.asarray(head * np.where(is_reduced, rank.full_bytes * (1 + 1 / rank.shards), rank.compute_bytes))


def _working_bytes(rank: RankMemory) -> Floats:
    """Return what the backward pass of a block has beside what was kept for it; nothing on a rank without a block."""
    costs, key = rank.costs, rank.costs.key
    gradient = costs.largest_gradient_bytes[key]
    keeps_next = rank.workload.training.stack.flat_shards and rank.workload.model.is_partly_frozen
    num_blocks = np.where(rank.is_fsdp & keeps_next, 2.0, 1.0)
    boundary = np.where(rank.stage.is_first, costs.first_boundary_bytes[key], costs.boundary_bytes[key])
    working = costs.working_bytes[key] * num_blocks + boundary + gradient
    return np.where(rank.stage.num_blocks > 0, working, 0.0)


def _only(happens: Mask, candidate: StageMemory) -> StageMemory:
    """Return the candidate where it happens, and nothing elsewhere."""
    return StageMemory(*(np.where(happens, part, 0.0) for part in candidate))


def block_reduction(rank: RankMemory) -> StageMemory:
    """Return the point when the last block's backward pass is done, and FSDP reduces its gradients."""
    key = rank.costs.key
    head = np.where((rank.head_alone > 0) & (rank.table.zero_stage > 1), 0.0, waiting_head_bytes(rank))
    blocks = np.maximum(rank.stage.num_blocks * rank.in_flight, 1.0)
    candidate = rank.candidate(
        parameters=rank.gathered_blocks_bytes,
        gradients=rank.gradient_bytes + head + rank.reduced_bytes(rank.block_parameters),
        activations=rank.kept_bytes * (1 - 1 / blocks) + rank.passed_bytes,
        workspace=rank.costs.boundary_bytes[key],
    )
    # Stage 1 reduces after the last micro-batch only, when a pipeline holds no other.
    return _only(rank.is_fsdp & ((rank.table.zero_stage > 1) | ~rank.accumulates), candidate)


def next_block_backward(rank: RankMemory) -> StageMemory:
    """Return the point when the last block but one runs its backward pass.

    FSDP keeps what it reduced of the block behind it until it reduces again (fsdp/_fully_shard/_fsdp_param_group.py,
    `reduce_scatter_state`).
    """
    head = np.where((rank.head_alone > 0) & (rank.table.zero_stage > 1), 0.0, waiting_head_bytes(rank))
    blocks = np.maximum(rank.stage.num_blocks * rank.in_flight, 1.0)
    reduced = rank.block_parameters * rank.full_bytes * (1 + 1 / rank.shards)
    candidate = rank.candidate(
        parameters=rank.gathered_blocks_bytes,
        gradients=rank.gradient_bytes + head + reduced,
        activations=rank.kept_bytes * (1 - 1 / blocks) + rank.passed_bytes,
        workspace=_working_bytes(rank),
    )
    return _only(rank.is_fsdp & ((rank.table.zero_stage > 1) | ~rank.accumulates) & (blocks > 1), candidate)


def end_of_backward(rank: RankMemory) -> StageMemory:
    """Return the point of the last gradients: the embedding's, and what FSDP reduces of all outside of the blocks."""
    kept = rank.kept_bytes + rank.head_kept_bytes
    of_one = kept / np.maximum(rank.in_flight, 1.0)
    embedding = rank.costs.embedding_parameters[rank.costs.key] * rank.stage.is_first * rank.full_bytes
    # The first gradient stays as it is: another one beside it is that of a later micro-batch, which has fewer others.
    is_first = rank.makes_gradients & rank.accumulates
    is_later = is_first & (embedding > of_one)
    root = np.where(rank.embedding_alone > 0, rank.embedding_alone, rank.root_parameters - rank.head_alone)
    is_apart = rank.framework.storage.frees_gradients & (rank.table.zero_stage == 0) & (is_later | ~is_first)
    num_others = np.maximum(rank.in_flight - np.where(is_later, 2, 1), 0.0)
    others = of_one * num_others
    copies = rank.backward_copies_bytes * num_others / np.maximum(rank.in_flight, 1.0)
    return rank.candidate(
        parameters=rank.gathered_embedding_bytes + copies,
        gradients=rank.final_gradient_bytes + rank.reduced_bytes(root),
        activations=others + rank.passed_bytes,
        workspace=np.where(is_apart, embedding, np.where(rank.table.zero_stage == 1, rank.bucket_bytes, 0.0)),
    )


def optimizer_step(rank: RankMemory) -> StageMemory:
    """Return the point of the step or just before: activations are gone, and copies of all parameters or one made."""
    is_here = rank.table.offload == OffloadCode.NONE
    copies = np.where(is_here, step_copies_bytes(rank), 0.0)
    return rank.candidate(
        parameters=np.zeros(len(rank.table)),
        gradients=rank.final_gradient_bytes,
        activations=rank.passed_bytes,
        workspace=np.maximum(copies, rank.flat_average_bytes),
    )


def step_copies_bytes(rank: RankMemory) -> Floats:
    """Return what an optimizer step allocates: of all parameters at once, or of one after the other."""
    flat = rank.flat_step_bytes
    if rank.framework.storage.optimizer_step == "fused":
        return flat
    costs, states = rank.costs, rank.states
    weight = costs.largest_weight_parameters[costs.key]
    ends = np.maximum(
        costs.embedding_parameters[costs.key] * rank.stage.is_first,
        costs.head_parameters[costs.key] * rank.stage.is_last,
    )
    one = states.loop_copies * np.maximum(weight, ends) + states.left_over * weight
    is_by_tensor = rank.is_fsdp & (not rank.workload.training.stack.flat_shards)
    loops = is_by_tensor | (rank.framework.storage.optimizer_step == "for_loop") | (states.foreach_copies is None)
    copies = np.where(loops, one, rank.parameters * (states.foreach_copies or 0.0)) / rank.state_shards
    return np.asarray(flat + copies * rank.full_bytes)


def end_of_input_gradients(rank: RankMemory) -> StageMemory:
    """Return the point when a micro-batch has all gradients of activations, and those before it wait too."""
    candidate = _split_candidate(
        rank,
        activations=rank.kept_bytes + rank.head_kept_bytes + _kept_loss_bytes(rank),
        workspace=rank.waiting_bytes + rank.split_backward_bytes + _split_working_bytes(rank),
        at_end=False,
    )
    return _only(rank.splits_backward, candidate)


def later_input_gradients(rank: RankMemory) -> StageMemory:
    """Return the same point one micro-batch later, of ranks that had all in flight before any gradient of a weight."""
    left = 1 - 1 / np.maximum(rank.in_flight, 1.0)
    candidate = _split_candidate(
        rank,
        activations=(rank.kept_bytes + rank.head_kept_bytes) * left + _kept_loss_bytes(rank),
        workspace=rank.waiting_bytes + rank.split_backward_bytes + _split_working_bytes(rank),
        at_end=True,
    )
    has_next = rank.stage.rank + 1 < rank.table.num_microbatches
    return _only(rank.splits_backward & ~rank.has_earlier_gradients & has_next, candidate)


def first_weight_gradient(rank: RankMemory) -> StageMemory:
    """Return the point when the second half makes the first gradients of weights: a tied head's, a block's."""
    is_tied = rank.stage.is_last & rank.workload.model.tied_embeddings
    of_block = np.where(rank.has_earlier_gradients, rank.costs.second_half_bytes[rank.costs.key], 0.0)
    candidate = _split_candidate(
        rank,
        activations=rank.kept_bytes + rank.head_kept_bytes,
        workspace=rank.waiting_bytes
        + rank.split_backward_bytes
        + np.maximum(of_block, head_gradient_bytes(rank) * is_tied),
        at_end=False,
    )
    return _only(rank.splits_backward, candidate)


def last_weight_gradient(rank: RankMemory) -> StageMemory:
    """Return the point when the second half makes the last gradient of a weight: an untied head's, or a block's."""
    costs, key = rank.costs, rank.costs.key
    has_head = rank.stage.is_last & (not rank.workload.model.tied_embeddings)
    head = costs.head_output_gradient_bytes[key] + head_gradient_bytes(rank)
    candidate = _split_candidate(
        rank,
        activations=rank.kept_bytes + rank.head_kept_bytes,
        workspace=rank.waiting_bytes
        + np.where(has_head, head, costs.largest_gradient_bytes[key])
        + np.where(rank.is_fsdp, rank.parameters * rank.compute_bytes, 0.0),
        at_end=True,
    )
    return _only(rank.splits_backward, candidate)


def _split_candidate(rank: RankMemory, *, activations: Floats, workspace: Floats, at_end: bool) -> StageMemory:
    return rank.candidate(
        parameters=rank.gathered_root_bytes + rank.backward_copies_bytes,
        gradients=rank.final_gradient_bytes if at_end else rank.gradient_bytes,
        activations=activations + rank.passed_bytes,
        workspace=workspace,
    )


def _split_working_bytes(rank: RankMemory) -> Floats:
    """Return what the first half of a block's backward pass has beside what stays for the second."""
    key = rank.costs.key
    unadded = np.where(rank.is_fsdp, rank.block_parameters * rank.compute_bytes, 0.0)
    return np.asarray(rank.costs.first_half_bytes[key] + rank.costs.boundary_bytes[key] + unadded)


def _kept_loss_bytes(rank: RankMemory) -> Floats:
    """Return what the loss of one micro-batch keeps for its backward pass."""
    return loss_bytes(rank).kept


def loss_backward_bytes(rank: RankMemory) -> Floats:
    """Return the most that a loss holds while its backward pass makes gradients, what it kept included."""
    return loss_bytes(rank).backward
