"""Activations that a rank keeps on its GPU, and those that wait in the host's memory."""

from __future__ import annotations

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts
from paraplan.cost.pipeline.stages import StageBlocks, one_chunk_in_flight
from paraplan.cost.plan_table import Floats, PlanTable
from paraplan.cost.workload import Workload

BLOCKS_HERE = 2
"""Blocks whose activations are on the GPU where they are offloaded: the one at work, and the one whose copies are on
their way (torchtune's and TRL's OffloadActivations hold back what is computed until its copy is done, and fetch the
next block's beside a backward pass)."""


def kept_activations(table: PlanTable, costs: BlockCosts, stage: StageBlocks, in_flight: Floats) -> Floats:
    """Return bytes that blocks, and what stands before them, keep of all micro-batches in flight.

    `in_flight` is `[V, N]`, the micro-batches of each virtual chunk.
    """
    first, later = (
        stage.sum_in_flight(costs, kept, in_flight) for kept in (costs.saved_bytes, costs.later_saved_bytes)
    )
    in_first_chunk = one_chunk_in_flight(table, stage, np.zeros_like(table.virtual))
    embedding = costs.embedding_saved_bytes[costs.key] * in_first_chunk
    return np.asarray(np.where(stage.is_first, first + embedding, later))


def on_gpu(workload: Workload, costs: BlockCosts, kept: Floats) -> Floats:
    """Return how much of what is `kept` stays on the GPU: all, or that of few blocks where it is offloaded."""
    if not workload.training.offloads_activations:
        return kept
    return np.asarray(np.minimum(kept, BLOCKS_HERE * costs.saved_bytes[costs.key].max(axis=1)))


def copy_s(workload: Workload, costs: BlockCosts, stage: StageBlocks) -> Floats:
    """Return the seconds in which one micro-batch's activations pass PCIe in one direction, beside compute."""
    if not workload.training.offloads_activations:
        return np.zeros(len(costs.key))
    saved = np.where(stage.is_first, stage.sum(costs, costs.saved_bytes), stage.sum(costs, costs.later_saved_bytes))
    return np.asarray(saved / workload.cluster.gpu.pcie_bandwidth_bytes_per_s)
