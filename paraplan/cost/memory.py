"""Memory of one rank of each pipeline stage at its peak, by parts that sum.

A step has a few moments at which a rank may hold most: the end of the forward pass, the loss's backward pass, that of a
block, the end of the backward pass, and the optimizer's step. Each is added up by parts; the largest is the peak.
`docs/memory.md` says how, with the sources.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from paraplan.cost import moments
from paraplan.cost.blocks import BlockCosts
from paraplan.cost.rank_memory import FP32, RankMemory, StageMemory
from paraplan.cost.stages import StageBlocks
from paraplan.cost.table import OFFLOADS, Floats, PlanTable
from paraplan.cost.workload import Workload

__all__ = ["StageMemory", "cached_bytes", "host_bytes", "stage_memory"]


def stage_memory(workload: Workload, table: PlanTable, costs: BlockCosts, stage: StageBlocks) -> StageMemory:
    """Return the memory of one rank of `stage` under each plan, at the moment when it holds most.

    The unit is what `torch.cuda.max_memory_allocated` shows.
    """
    rank = RankMemory.of(workload, table, costs, stage)
    candidates = (
        moments.end_of_forward(rank),
        moments.loss_backward(rank),
        moments.block_backward(rank),
        moments.end_of_first_half(rank),
        moments.block_reduction(rank),
        moments.end_of_backward(rank),
        moments.optimizer_step(rank),
    )
    largest = np.argmax([moment.total_bytes for moment in candidates], axis=0)
    parts = {
        field.name: np.choose(largest, [getattr(moment, field.name) for moment in candidates])
        for field in fields(StageMemory)
    }
    return StageMemory(**parts)


def cached_bytes(workload: Workload, table: PlanTable, costs: BlockCosts, stage: StageBlocks) -> Floats:
    """Return what torch's allocator takes from the GPU before its rounding: the peak, or more where blocks do not fit.

    The allocator never joins what it took in several pieces, so that what is larger than each of these is taken anew.
    In the first step sizes grow: tensors of blocks, of the loss, then flat copies of gradients. They stand side by
    side, although never all are live. Frameworks on other allocators hold their peak.
    """
    rank = RankMemory.of(workload, table, costs, stage)
    peak = stage_memory(workload, table, costs, stage).total_bytes
    if workload.habits.matmul_workspaces == "none":
        return peak
    beside = rank.loss_bytes * rank.num_logits + rank.bucket_bytes + rank.flat_step_bytes
    return np.asarray(np.maximum(peak, moments.block_backward(rank).total_bytes + beside))


def host_bytes(workload: Workload, table: PlanTable, costs: BlockCosts, stage: StageBlocks) -> Floats:
    """Return the host memory that offload moves a rank's state to.

    An offloaded optimizer brings its state, fp32 parameters to update and fp32 gradients to update by (Ren et al. 2021,
    ZeRO-Offload, section 4.1); offloaded parameters are those fp32 parameters.
    """
    rank = RankMemory.of(workload, table, costs, stage)
    has_masters = workload.is_mixed_precision and workload.habits.master_bytes > 0  # among the state already
    states = rank.state_bytes / rank.state_shards
    copies = (1 if has_masters else 2) * FP32 * rank.parameters / rank.state_shards
    return np.where(table.offload == OFFLOADS.index("none"), 0.0, states + copies)
