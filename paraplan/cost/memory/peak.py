"""Memory of one rank of each pipeline stage at its peak, by parts that sum.

A step has a few moments at which a rank may hold most: the end of the forward pass, the backward pass of the loss, of
the head and of a block, the end of the backward pass, and the optimizer's step. Each is added up by parts; the largest
is the peak.
`docs/memory.md` says how, with the sources.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from paraplan.cost.memory import halves, loss_memory, moments
from paraplan.cost.memory.rank import FP32, RankMemory, StageMemory
from paraplan.cost.plan_table import OFFLOADS, Floats

__all__ = ["RankMemory", "StageMemory", "cached_bytes", "host_bytes", "peak_bytes", "peak_of"]


def peak_of(rank: RankMemory) -> StageMemory:
    """Return the memory of a rank at the moment when it holds most, as `torch.cuda.max_memory_allocated` shows it."""
    candidates = _candidates(rank)
    largest = np.argmax([moment.total_bytes for moment in candidates], axis=0)
    parts = {
        field.name: np.choose(largest, [getattr(moment, field.name) for moment in candidates])
        for field in fields(StageMemory)
    }
    return StageMemory(**parts)


def peak_bytes(rank: RankMemory) -> Floats:
    """Return the total of `peak_of` alone."""
    return np.asarray(np.max([moment.total_bytes for moment in _candidates(rank)], axis=0))


def _candidates(rank: RankMemory) -> list[StageMemory]:
    found = [
        moments.end_of_forward(rank),
        moments.loss_backward(rank),
        moments.head_backward(rank),
        moments.block_backward(rank),
        moments.end_of_backward(rank),
        moments.optimizer_step(rank),
    ]
    if rank.takes_halves.any():
        found += [halves.end_of_first_half(rank), halves.later_first_half(rank)]
        found += [halves.start_of_second_half(rank), halves.end_of_second_half(rank)]
    if rank.is_fsdp.any():
        found.append(moments.block_reduction(rank))
    return found


def cached_bytes(rank: RankMemory, peak: StageMemory) -> Floats:
    """Return what torch's allocator takes from the GPU before its rounding: the peak, or more where blocks do not fit.

    The allocator never joins what it took in several pieces, so that what is larger than each of these is taken anew.
    In the first step sizes grow: tensors of blocks, of the loss, then flat copies of gradients. They stand side by
    side, although never all are live. Frameworks on other allocators hold their peak.
    """
    if rank.framework.storage.matmul_workspaces == "none":
        return peak.total_bytes
    beside = loss_memory.backward_bytes(rank) + rank.bucket_bytes + rank.flat_step_bytes
    return np.asarray(np.maximum(peak.total_bytes, moments.block_backward(rank).total_bytes + beside))


def host_bytes(rank: RankMemory) -> Floats:
    """Return the host memory that offload moves a rank's state to.

    An offloaded optimizer brings its state, fp32 parameters to update and fp32 gradients to update by (Ren et al. 2021,
    ZeRO-Offload, section 4.1); offloaded parameters are those fp32 parameters.
    """
    has_masters = rank.is_mixed and rank.framework.storage.master_bytes > 0  # among the state already
    states = rank.state_bytes / rank.state_shards
    copies = (1 if has_masters else 2) * FP32 * rank.parameters / rank.state_shards
    return np.where(rank.table.offload == OFFLOADS.index("none"), 0.0, states + copies)
