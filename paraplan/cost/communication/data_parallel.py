"""Data parallelism and ZeRO: weight handling of each pass (casts, copies, host time), gathers, gradient reduction."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts
from paraplan.cost.communication.collectives import data_links, expert_links, group_links, overlap_s
from paraplan.cost.pipeline.stages import StageBlocks
from paraplan.cost.plan_table import Floats, Ints, PlanTable, RecomputeCode
from paraplan.cost.workload import Workload
from paraplan.model.spec import ModelSpec
from paraplan.plan.parallel import Axis

AUTOCAST_BYTES = 6.0
"""Bytes that a cast between 16 bits and fp32 moves for each element: it reads one and writes the other."""


_CONTAINERS = 4


class WeightWork(NamedTuple):
    """The work of each micro-batch on weights and their gradients, one entry a plan.

    Bytes through a GPU's memory: `cast` by autocast in each pass, a recomputed one too, for each weight of a matmul;
    `forward` and `backward` for each parameter that trains, `gathered` in either pass for each byte of the others.
    Seconds of the host for each block: `forward_host_s` and `backward_host_s`.
    """

    cast: Floats
    forward: Floats
    backward: Floats
    gathered: Floats
    forward_host_s: Floats
    backward_host_s: Floats
    again_host_s: Floats
    """A forward pass that runs again: hooks of a block find it gathered, those of its modules gather it once more."""

    def select(self, rows: Ints) -> WeightWork:
        """Return the work of some of the plans."""
        return WeightWork(*(each[rows] for each in self))


def weight_work(workload: Workload, table: PlanTable) -> WeightWork:
    """Return what one micro-batch does with weights and their gradients under each plan.

    Weights are copied out of the buffer that they are gathered in, gradients into the one that is reduced. Autocast
    casts fp32 weights and their gradients. A gradient is added to those of earlier micro-batches, unless the product
    that makes it does so or ranks keep shards of gradients. What happens once a step is divided among its
    micro-batches. Copies on a stream of their own count in full: they take bandwidth from what runs beside them.
    """
    storage, profile = workload.framework.storage, workload.framework.data_parallel
    sharding = profile.sharding
    is_mixed = workload.is_mixed_precision
    kept_bytes = workload.gradient_bytes(table.zero_stage)
    once = 1.0 / table.num_microbatches
    is_whole, is_zero_3 = table.zero_stage == 0, table.zero_stage == 3
    keeps_shards = (table.zero_stage >= 2) & (not profile.accumulates_whole)
    gathers = np.where(is_zero_3, 1.0, np.where(is_whole, 0.0, once) * sharding.is_fsdp)
    again = 1.0 * is_zero_3
    reductions = np.where(keeps_shards, 1.0, np.where(is_whole, 0.0, once))
    cast = np.where(is_whole, AUTOCAST_BYTES if storage.is_autocast and is_mixed else 0.0, 0.0)
    made_bytes = np.where(cast > 0, 4.0, float(workload.training.activation_bytes))
    adds = np.where(keeps_shards, 0.0, 0.0 if profile.fuses_accumulation else 1.0 - once)
    host_s = _modules_of_block(workload.model) if sharding.gathers_each_weight else 1.0
    forward_host_s = gathers * sharding.gather_host_s * host_s
    has_replicas = is_whole & (table.dp * table.cp > 1) & (table.devices == 1)
    narrow, wide = sharding.reduce_traffic
    reduced = reductions * np.where(kept_bytes > 2, wide, narrow) + once * sharding.replica_traffic * has_replicas
    return WeightWork(
        cast=cast,
        forward=gathers * sharding.gather_traffic,
        backward=again * sharding.gather_traffic + reduced + adds * (made_bytes + 2.0 * kept_bytes),
        gathered=np.where(is_zero_3, sharding.gather_traffic / 2, 0.0),
        forward_host_s=forward_host_s,
        backward_host_s=(again * sharding.gather_host_s + reductions * sharding.reduce_host_s) * host_s,
        again_host_s=forward_host_s * sharding.gathers_each_weight,
    )


def _modules_of_block(model: ModelSpec) -> float:
    """Return the modules that a block calls in the mean: products and norms, itself, its two parts, an activation."""
    called = 0.0
    for run in model.runs:
        block = run.block.before_freezing or run.block
        products = sum(one.num_experts == 1 and not one.of_activations for one in block.matmuls)
        norms = sum(len(one.shape) == 1 and one.name.endswith("weight") for one in block.parameters)
        called += (products + norms) * run.count
    return _CONTAINERS + called / max(1, model.num_blocks)


class SlotSeconds(NamedTuple):
    """The time of a rank's work for one micro-batch, one entry a plan, in seconds."""

    compute_s: Floats
    recompute_s: Floats
    tensor_parallel_s: Floats
    context_parallel_s: Floats
    expert_parallel_s: Floats


def stage_parameters(costs: BlockCosts, stage: StageBlocks) -> Floats:
    """Return the parameters of a stage that train, embedding and head included."""
    ends = costs.embedding_parameters[costs.key] * stage.is_first + costs.head_parameters[costs.key] * stage.is_last
    return stage.sum(costs, costs.parameters) + ends


def frozen_bytes(costs: BlockCosts, stage: StageBlocks) -> Floats:
    """Return the bytes of the frozen parameters of a stage, embedding and head included."""
    embedding = costs.embedding_frozen_bytes[costs.key] * stage.is_first
    return stage.sum(costs, costs.frozen_bytes) + embedding + costs.head_frozen_bytes[costs.key] * stage.is_last


def frozen_expert_bytes(table: PlanTable, costs: BlockCosts, stage: StageBlocks) -> Floats:
    """Return the bytes of frozen experts that a rank holds and not all others of dp and cp: 0 without ep."""
    if not (table.ep > 1).any():
        return np.zeros(len(table))
    return np.where(table.ep > 1, stage.sum(costs, costs.frozen_expert_bytes), 0.0)


def exchanged_experts(table: PlanTable, costs: BlockCosts, stages: list[StageBlocks]) -> Floats:
    """Return the parameters of experts that a rank holds and not all others of dp and cp: 0 without ep."""
    if not (table.ep > 1).any():
        return np.zeros(len(table))
    experts = np.max([stage.sum(costs, costs.expert_parameters) for stage in stages], axis=0)
    return np.where(table.ep > 1, experts, 0.0)


def _transfers_s(
    workload: Workload, table: PlanTable, costs: BlockCosts, stages: list[StageBlocks]
) -> tuple[Floats, Floats, Floats]:
    """Return the seconds to reduce gradients to shards once, to gather weights once, and to all-reduce gradients."""
    sharding = workload.framework.data_parallel.sharding
    links, replicas = data_links(workload, table)
    parameters = np.max([stage_parameters(costs, stage) for stage in stages], axis=0)
    num_blocks = np.max([stage.num_blocks for stage in stages], axis=0)
    unit_bytes, gradient_bytes = float(workload.training.activation_bytes), workload.gradient_bytes(table.zero_stage)
    is_zero_2, is_zero_3 = (table.zero_stage == stage for stage in (2, 3))
    # FSDP2 moves one block at a time; DDP and ZeRO-1 move large buckets.
    matmuls = max(len(run.block.matmuls) for run in workload.model.runs) if sharding.gathers_each_weight else 1
    units = np.where(is_zero_2 | is_zero_3, np.maximum(num_blocks, 1) * np.where(is_zero_3, matmuls, 1), 1)
    experts = exchanged_experts(table, costs, stages)
    unit = (parameters - experts) * gradient_bytes / units
    # Ranks with equal shards then sum these (hybrid sharding; Zhao et al. 2023, PyTorch FSDP, section 3.2.2).
    reduce_s = units * (links.reduce_scatter_s(unit) + replicas.all_reduce_s(unit / table.shard_size))
    frozen = np.max([frozen_bytes(costs, stage) for stage in stages], axis=0) * is_zero_3
    frozen_experts = np.max([frozen_expert_bytes(table, costs, stage) for stage in stages], axis=0) * is_zero_3
    gathered = parameters - experts
    if workload.training.fp8_gather:
        blocks = np.max([stage.sum(costs, costs.parameters) for stage in stages], axis=0) - experts
        gathered = gathered - blocks * (1.0 - workload.training.gathered_share)
    gather_s = units * links.all_gather_s((gathered * unit_bytes + frozen - frozen_experts) / units)
    all_reduce_s = links.all_reduce_s((parameters - experts) * gradient_bytes)
    if experts.any() or frozen_experts.any():  # go over the ranks that hold the same ones
        _, alike = expert_links(workload, table)
        reduce_s = reduce_s + units * alike.reduce_scatter_s(experts * gradient_bytes / units)
        gather_s = gather_s + units * alike.all_gather_s((experts * unit_bytes + frozen_experts) / units)
        all_reduce_s = all_reduce_s + alike.all_reduce_s(experts * gradient_bytes)
    return reduce_s, gather_s, all_reduce_s


def data_parallel_s(
    workload: Workload, table: PlanTable, costs: BlockCosts, stages: list[StageBlocks], slot: SlotSeconds
) -> tuple[Floats, Floats]:
    """Return seconds on the wire and seconds exposed of gradient reduction and of ZeRO's gathers.

    DDP and ZeRO-2 reduce while the last micro-batch's backward pass runs; ZeRO-3 gathers parameters twice or more and
    reduces once in every micro-batch (or in the last alone, `accumulates_whole`), each block's transfer behind its
    neighbour's work in `slot`; ZeRO-1 reduces and gathers around the optimizer step, where nothing hides it, or beside
    the passes before and after it (`overlaps_zero_1`), but for what ends the one and begins the other. Overlap
    slows both sides by `overlap_slowdown` (Galvatron, section 4).
    """
    profile = workload.framework.data_parallel
    parameters = np.max([stage_parameters(costs, stage) for stage in stages], axis=0)
    num_blocks = np.max([stage.num_blocks for stage in stages], axis=0)
    slowdown, microbatches = workload.constants.overlap_slowdown, table.num_microbatches
    is_zero_1, is_zero_2, is_zero_3 = (table.zero_stage == stage for stage in (1, 2, 3))
    reduce_s, gather_s, all_reduce_s = _transfers_s(workload, table, costs, stages)
    block = np.maximum(costs.largest_block_parameters[costs.key], 1.0)
    # What is further from its recomputed forward pass than may stay is gathered again (stage3_max_reuse_distance).
    is_full = table.recompute == RecomputeCode.FULL
    lost = np.maximum(0.0, 1 - live / (2 * block)) if (live := profile.sharding.max_live_elements) else 0.0
    gathers = 2.0 + is_full * lost + workload.training.learns_from.extra_forwards
    reductions = reduce_s * (1 if profile.accumulates_whole else microbatches)
    wire = np.select(
        [is_zero_3, is_zero_2, is_zero_1],
        [microbatches * gathers * gather_s + reductions, gather_s + reductions, reduce_s + gather_s],
        all_reduce_s,
    )
    passes_s = slot.compute_s + _sends_elsewhere(workload, table, slot)
    whole, backward = passes_s + slot.recompute_s, passes_s * (2 / 3) + slot.recompute_s
    hidden = [microbatches * whole, np.zeros_like(whole)]
    behind = np.select([is_zero_3, is_zero_1], hidden, backward * profile.overlaps_gradients)
    ahead = np.where(is_zero_3, np.maximum(0.0, 1 - profile.sharding.prefetch_elements / block), 0.0)
    waited = gathers * gather_s * microbatches * ahead
    # The embedding's gradient is the last of a backward pass, and nothing runs beside what is sent then.
    embedding = costs.embedding_parameters[costs.key] / np.maximum(parameters, 1.0)
    last = wire * np.maximum(embedding, 1 / np.maximum(num_blocks, 1)) / np.where(is_zero_3, microbatches, 1)
    last = np.where(is_zero_1, 0.0, np.minimum(last, wire - waited))
    overlapped = overlap_s(wire - waited - last, behind, slowdown=slowdown)
    exposed = waited + last + overlapped
    if profile.overlaps_zero_1 and is_zero_1.any():
        ends = np.maximum(embedding, 1 / np.maximum(num_blocks, 1))
        beside = (reduce_s, backward), (gather_s, passes_s / 3)
        exposed = np.where(is_zero_1, _around_step_s(beside, ends, slowdown), exposed)
    return wire, exposed


def _around_step_s(beside: tuple[tuple[Floats, Floats], ...], ends: Floats, slowdown: float) -> Floats:
    """Return what is seen of transfers around an optimizer step, each given with the pass that runs beside it.

    Nothing runs beside the share `ends` of them: the last gradients to be reduced and the first weights to be gathered.
    """
    seen = [ends * each + overlap_s((1 - ends) * each, computed, slowdown=slowdown) for each, computed in beside]
    return np.asarray(sum(seen))


def _sends_elsewhere(workload: Workload, table: PlanTable, slot: SlotSeconds) -> Floats:
    """Return the seconds of collectives that stay in a node, beside which data-parallel ones between nodes go on."""
    total = np.zeros(len(table))
    within: dict[Axis, Floats] = {"tp": slot.tensor_parallel_s, "cp": slot.context_parallel_s}
    for axis, seconds in within.items():
        total = total + np.where(group_links(workload, table, axis).leaves_node, 0.0, seconds)
    if (table.ep > 1).any():
        total = total + np.where(expert_links(workload, table)[0].leaves_node, 0.0, slot.expert_parallel_s)
    return np.where(data_links(workload, table)[0].leaves_node, total, 0.0)


def sharded_parameters(table: PlanTable, parameters: Floats, experts: Floats) -> Floats:
    """Return the parameters whose shard one rank has, or their bytes, of `parameters` of its part, `experts` of them.

    ZeRO shards over all ranks of dp and cp, and experts over those that hold the same ones: `ep` times fewer.
    """
    alike = parameters + experts * (table.ep - 1)
    return np.where(table.zero_stage >= 1, alike / table.shard_size, parameters)
