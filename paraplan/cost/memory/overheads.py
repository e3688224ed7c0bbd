"""Memory of a rank beside the tensors of its model: cuBLAS workspaces, and the padding of FSDP's shards."""

from __future__ import annotations

from collections import Counter

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts
from paraplan.cost.cost_model import cache_of
from paraplan.cost.memory.parts import HALF
from paraplan.cost.pipeline.stages import StageBlocks
from paraplan.cost.plan_table import Floats, Mask, PlanTable, distinct_rows
from paraplan.cost.workload import Workload
from paraplan.model.spec import ModelSpec
from paraplan.plan.sharding import padded_share, sharded_dimension

_THREADS = 2
"""torch keeps a workspace for each thread that multiplies, and a backward pass runs on a thread of its own."""

_QUEUED_COMMANDS = 1024
"""Launches that CUDA's driver queues before it makes the host wait (quoted from memory, not looked up)."""

_COLLECTIVES = 10
"""Collectives of tensor parallelism in both passes of a block under sequence parallelism, inputs gathered again."""


def matmul_workspace_bytes(workload: Workload) -> int:
    """Return the bytes of the workspaces that matmuls keep on a GPU of the workload; none where it is no NVIDIA GPU."""
    gpu = workload.cluster.gpu
    if gpu.vendor != "nvidia" or not workload.constants.counts_matmul_workspaces:
        return 0
    stated = workload.constants.cublas_workspace_bytes
    total = _THREADS * (gpu.shared.torch_workspace_bytes if stated is None else stated)
    return total + (gpu.shared.engine_workspace_bytes if workload.framework.kernels.engine else 0)


def shard_padding(workload: Workload, table: PlanTable) -> Floats:
    """Return how much larger than an even share FSDP's shards are; the first rank holds the rows that are left over.

    Without tp the runtime divides each parameter along `sharded_dimension`, with it along the first.
    """
    if not workload.framework.data_parallel.sharding.is_fsdp:
        return np.ones(len(table))
    kinds, kind = distinct_rows(np.where(table.zero_stage >= 1, table.shard_size, 1), np.minimum(table.tp, 2))
    known, asked = cache_of(workload).shard_paddings, list(zip(*(column.tolist() for column in kinds), strict=True))
    missing = [one for one in asked if one not in known]
    if missing:
        elements = _elements_by_shape(workload.model)
        known.update((one, _mean_padding(elements, one[0], chooses=one[1] == 1)) for one in missing)
    return np.array([known[one] for one in asked])[kind]


def gathered_frozen_bytes(workload: Workload, blocks: Floats, root: Floats) -> Floats:
    """Return the frozen weights that ZeRO-3 has gathered while blocks of so many bytes are in use, as they are stored.

    `root` are the bytes outside of blocks. There may be fewer in all.
    """
    sharding = workload.framework.data_parallel.sharding
    if sharding.is_fsdp:
        return np.asarray(root + blocks)
    return np.asarray(np.maximum(np.maximum(blocks, 2 * root), sharding.max_live_elements * HALF))


def root_frozen_bytes(costs: BlockCosts, stage: StageBlocks, is_tied: Mask) -> Floats:
    """Return the bytes of frozen embeddings and heads, without towers; a last stage has a tied one too."""
    embedding = (costs.embedding_frozen_bytes - costs.tower_frozen_bytes)[costs.key] * (is_tied | stage.is_first)
    return np.asarray(embedding + costs.head_frozen_bytes[costs.key] * stage.is_last)


def optimizer_shards(table: PlanTable, costs: BlockCosts, stage: StageBlocks, parameters: Floats) -> Floats:
    """Return by how much ZeRO divides `parameters`: experts only over the ranks that hold the same ones."""
    shards = table.shard_size.astype(float)
    if not (table.ep > 1).any():
        return shards
    experts = stage.sum(costs, costs.expert_parameters)
    return np.asarray(shards * parameters / np.maximum(parameters + experts * (table.ep - 1), 1.0))


def _elements_by_shape(model: ModelSpec) -> Counter[tuple[int, ...]]:
    elements: Counter[tuple[int, ...]] = Counter()
    for block, count in ((model.embedding, 1), *((run.block, run.count) for run in model.runs), (model.head, 1)):
        for parameter in block.parameters:
            elements[parameter.shape or (1,)] += parameter.num_elements * count
    return elements


def _mean_padding(elements: Counter[tuple[int, ...]], num_shards: int, *, chooses: bool) -> float:
    padded = 0.0
    for shape, count in elements.items():
        dim = sharded_dimension(shape, num_shards) if chooses else 0
        padded += count * padded_share(shape[dim], num_shards)
    return padded / elements.total()


def held_by_collectives_bytes(workload: Workload, table: PlanTable, costs: BlockCosts, stage: StageBlocks) -> Floats:
    """Return what torch's allocator may not use again yet, since collectives on another stream read or write it.

    A pass over a block gives two whole activations to collectives of tensor parallelism: outputs to reduce, or
    gradients of inputs. What it frees of them waits for the GPU (`record_stream`), and the host is ahead of that by as
    many blocks as the driver queues, or as it gains on the GPU in a step.
    """
    framework, kernels = workload.framework, workload.framework.kernels
    commands = framework.tensor_parallel.commands_per_block
    if not commands:
        return np.zeros(len(table))
    blocks = np.maximum(stage.num_blocks, 1)
    host_s = (2.0 * kernels.host_s_per_block + _COLLECTIVES * kernels.collective_host_s) * blocks
    gpu_s = stage.sum(costs, costs.forward_s) + stage.sum(costs, costs.backward_s)
    gained = 2.0 * blocks * table.num_microbatches * np.maximum(0.0, 1.0 - host_s / np.maximum(gpu_s, host_s))
    ahead = np.minimum(_QUEUED_COMMANDS / commands, gained)
    whole = costs.boundary_bytes[costs.key] * np.where(table.sequence_parallel == 1, table.tp, 1)
    return np.where(table.tp > 1, 2.0 * ahead * whole / workload.model.residual_streams, 0.0)
