"""Time of one optimizer step, by parts that sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts
from paraplan.cost.communication.collectives import GroupLinks, group_links, overlap_s
from paraplan.cost.communication.data_parallel import (
    SlotSeconds,
    WeightWork,
    data_parallel_s,
    exchanged_experts,
    frozen_bytes,
    frozen_expert_bytes,
    sharded_parameters,
    stage_parameters,
    weight_work,
)
from paraplan.cost.communication.exchanges import (
    Exchanges,
    context_parallel_s,
    expert_exchange_s,
    run_again,
)
from paraplan.cost.communication.offload import offload_gather_s, offload_step_s
from paraplan.cost.communication.tensor_parallel import tensor_parallel_s
from paraplan.cost.communication.torch_data_parallel import torch_data_parallel_s
from paraplan.cost.host import HostSeconds, host_seconds
from paraplan.cost.memory.activations import copy_s
from paraplan.cost.pipeline.bubble import bubble_s
from paraplan.cost.pipeline.simulation import RankSeconds
from paraplan.cost.pipeline.stages import StageBlocks, joined_ranks
from paraplan.cost.plan_table import Floats, Ints, Mask, PlanTable, RecomputeCode
from paraplan.cost.slowest import slowest_gpu_share
from paraplan.cost.workload import Workload
from paraplan.model.spec import ModelSpec


class StepTime(NamedTuple):
    """Seconds of one step that nothing else hides, one entry a plan; `data_parallel_wire_s` stands beside the sum."""

    compute_s: Floats
    recompute_s: Floats
    tensor_parallel_s: Floats
    context_parallel_s: Floats
    expert_parallel_s: Floats
    pipeline_bubble_s: Floats
    pipeline_send_s: Floats
    data_parallel_s: Floats
    optimizer_s: Floats
    data_parallel_wire_s: Floats

    @property
    def step_time_s(self) -> Floats:
        """Sum of the exposed parts."""
        *parts, _ = self
        return np.asarray(sum(parts))


class MicroBatchTime(NamedTuple):
    """Seconds that one micro-batch spends on one pipeline rank, one entry a plan."""

    forward_s: Floats
    """The forward pass, half of the sends between stages included."""
    weight_s: Floats
    """The gradients of weights."""
    end_s: Floats
    """Both passes of the embedding, or of the head and the loss."""
    compute_s: Floats
    """Kernels of both passes, `end_s` included."""
    recompute_s: Floats
    """Forward passes that run again."""
    tensor_parallel_s: Floats
    """Exposed communication of tensor parallelism in both passes."""
    context_parallel_s: Floats
    """Exposed communication of context parallelism in both passes."""
    expert_parallel_s: Floats
    """Exposed communication of expert parallelism in both passes."""
    send_s: Floats
    """Sends between stages in both passes."""
    forward_tensor_parallel_s: Floats
    """Tensor parallelism's share of the forward pass."""
    forward_context_parallel_s: Floats
    """Context parallelism's share of the forward pass."""
    forward_expert_parallel_s: Floats
    """Expert parallelism's share of the forward pass."""

    @property
    def total_s(self) -> Floats:
        """Forward and backward."""
        sends = self.tensor_parallel_s + self.context_parallel_s + self.expert_parallel_s + self.send_s
        return np.asarray(self.compute_s + self.recompute_s + sends)

    def of_rank(self, shares: Floats) -> RankSeconds:
        """Return the seconds that a schedule looks at; `shares` `[V, N]` are those of its chunks in the blocks."""
        return RankSeconds(self.forward_s, self.total_s - self.forward_s, self.weight_s, self.end_s, shares)


def step_time(workload: Workload, table: PlanTable, costs: BlockCosts, stages: list[StageBlocks]) -> StepTime:
    """Return the time of one step under each plan.

    The slowest rank works through its micro-batches and waits in the bubble of its schedule (`bubble`). `stages` are
    the first and the last rank of each plan and two between, or all ranks of a single one. The sum over all stages does
    not depend on where the blocks are cut.
    """
    context = _StepContext.of(workload, table, costs)
    slots = _slots(context, stages)
    slowest = np.argmax(np.stack([slot.total_s for slot in slots]), axis=0)
    rows = np.arange(len(table))

    def of_slowest(name: str) -> Floats:
        return np.asarray(np.stack([getattr(slot, name) for slot in slots])[slowest, rows])

    microbatches = table.num_microbatches
    bubble = np.zeros(len(table))
    if (table.pp > 1).any():
        whole = _slot(context, _all_blocks(table, costs))
        ranks = [slot.of_rank(stage.chunk_shares(table.virtual)) for slot, stage in zip(slots, stages, strict=True)]
        bubble = bubble_s(table, ranks, whole.total_s + whole.send_s * (table.pp - 1))
    slot = SlotSeconds(*map(of_slowest, SlotSeconds._fields))
    wire, exposed = data_parallel_s(workload, table, costs, stages, slot)
    parameters = np.max([stage_parameters(costs, stage) for stage in stages], axis=0)
    experts = exchanged_experts(table, costs, stages)
    divided = torch_data_parallel_s(workload, table, parameters)
    sharded = sharded_parameters(table, parameters, experts)
    frozen = [
        sharded_parameters(table, frozen_bytes(costs, stage), frozen_expert_bytes(table, costs, stage))
        for stage in stages
    ]
    found = StepTime(
        compute_s=microbatches * of_slowest("compute_s"),
        recompute_s=microbatches * of_slowest("recompute_s"),
        tensor_parallel_s=microbatches * of_slowest("tensor_parallel_s"),
        context_parallel_s=microbatches * of_slowest("context_parallel_s"),
        expert_parallel_s=microbatches * of_slowest("expert_parallel_s"),
        pipeline_bubble_s=bubble,
        pipeline_send_s=microbatches * of_slowest("send_s"),
        data_parallel_s=exposed + divided + offload_gather_s(workload, table, sharded, np.max(frozen, axis=0)),
        optimizer_s=optimizer_s(workload, table, sharded),
        data_parallel_wire_s=wire + divided,
    )
    if workload.correction is None:
        return found
    factors = workload.time_factors(table)
    return StepTime(*(each * factors for each in found))


def optimizer_s(workload: Workload, table: PlanTable, sharded: Floats) -> Floats:
    """Return the seconds of an optimizer step on `sharded` parameters of one rank, on the GPU or offloaded."""
    traffic = workload.optimizer_traffic(workload.framework.storage.optimizer_step)
    return np.where(
        table.offload > 0,
        offload_step_s(workload, table, sharded),
        sharded * traffic / workload.memory_bandwidth_bytes_per_s,
    )


def micro_batch_times(
    workload: Workload, table: PlanTable, costs: BlockCosts, stages: list[StageBlocks]
) -> list[MicroBatchTime]:
    """Return the seconds of one micro-batch on each of `stages`, as `step_time` counts them."""
    slots = _slots(_StepContext.of(workload, table, costs), stages)
    if workload.correction is None:
        return slots
    factors = workload.time_factors(table)
    return [MicroBatchTime(*(each * factors for each in slot)) for slot in slots]


@dataclass(frozen=True, eq=False)
class _StepContext:
    """Inputs that all stages of the plans of a table share."""

    workload: Workload
    table: PlanTable
    costs: BlockCosts
    tensor: GroupLinks
    """Links of tensor parallelism."""
    pipeline: GroupLinks
    """Links between pipeline stages."""
    exchanges: Exchanges
    """Exchanges of context and expert parallelism in one block."""
    work: WeightWork
    """Weight handling of one micro-batch."""
    host: HostSeconds
    """The host's time for one block."""

    @classmethod
    def of(cls, workload: Workload, table: PlanTable, costs: BlockCosts) -> _StepContext:
        tensor, pipeline = group_links(workload, table, "tp"), group_links(workload, table, "pp")
        exchanges = Exchanges(*context_parallel_s(workload, table), *expert_exchange_s(workload, table, tensor))
        work = weight_work(workload, table)
        host = host_seconds(workload, table, tensor, work)
        return cls(workload, table, costs, tensor, pipeline, exchanges, work, host)

    def select(self, rows: Ints) -> _StepContext:
        return _StepContext(
            self.workload,
            self.table.select(rows),
            self.costs.select(rows),
            self.tensor.select(rows),
            self.pipeline.select(rows),
            self.exchanges.select(rows),
            self.work.select(rows),
            self.host.select(rows),
        )


def _all_blocks(table: PlanTable, costs: BlockCosts) -> StageBlocks:
    count = costs.counts.shape[1] - 1
    ones = np.ones(len(table), dtype=bool)
    zeros = np.zeros((1, len(table)), dtype=np.int64)
    return StageBlocks(rank=zeros[0], low=zeros, high=zeros + count, is_first=ones, is_last=ones)


def _slots(context: _StepContext, stages: list[StageBlocks]) -> list[MicroBatchTime]:
    """Return the slot of each of `stages`; those of a single plan are computed side by side."""
    if len(context.table) != 1:
        return [_slot(context, stage) for stage in stages]
    slot = _slot(context.select(np.zeros(len(stages), dtype=np.int64)), joined_ranks(stages))
    return [MicroBatchTime(*(each[rank : rank + 1] for each in slot)) for rank in range(len(stages))]


def _slot(context: _StepContext, stage: StageBlocks) -> MicroBatchTime:
    """Return the seconds of one micro-batch on a rank."""
    workload, table, costs, work = context.workload, context.table, context.costs, context.work
    tp, pp, of_block = context.tensor, context.pipeline, context.exchanges
    key, framework = costs.key, workload.framework
    is_full = table.recompute == RecomputeCode.FULL
    # Of the collectives of a block that runs again in part, the gathers do: results of reductions are kept.
    repeats = run_again(workload, table)
    unread = stage.sum(costs, costs.unread_s)
    # Of the two sums of a pass the last is not run again where its product is not; of one in two parts a half.
    summed_again = 1.0 - np.where(unread > 0, np.where(table.sequence_parallel == 1, 0.25, 0.5), 0.0)
    tensor_again = is_full * summed_again + 0.5 * (repeats & ~is_full)
    slowest = slowest_gpu_share(workload.constants, table)
    forward, backward, again = (slowest * each for each in _passes(workload, costs, stage, work))
    # With sequence parallelism the boundary is already divided by tp; an all-reduce moves the whole activation.
    whole = costs.boundary_bytes[key] * np.where(table.sequence_parallel == 1, table.tp, 1)
    activation = whole / workload.model.residual_streams
    forward_sends, backward_sends = tensor_parallel_s(
        workload, table, tp, activation, stage.num_blocks, (again, backward)
    )
    # The host starts kernels and collectives alike: where it is slower than both, neither adds to its time.
    host = HostSeconds(*(each * stage.num_blocks for each in context.host))
    shown, shown_backward = (each * stage.num_blocks for each in _shown_exchanges(of_block, repeats | is_full))
    again = np.maximum(again - slowest * unread, host.again_s - forward_sends - shown) + host.idle_s
    copies = copy_s(workload, costs, stage)  # of activations to the host and back, beside all that a pass does
    forward = np.maximum(forward, np.maximum(host.forward_s, copies) - forward_sends - shown) + host.idle_s
    backward = np.maximum(backward, np.maximum(host.backward_s, copies - again) - backward_sends - shown_backward)
    # Both passes of the embedding, or of the head and the loss, start about as many kernels as one of a block.
    head_s = np.maximum(slowest * costs.head_s[key], context.host.kernels_s) * stage.is_last
    ends = np.maximum(costs.embedding_s[key], context.host.kernels_s) * stage.is_first + head_s
    recompute = np.where(is_full, again, slowest * stage.sum(costs, costs.recompute_s))
    in_part = np.maximum(recompute, host.again_in_part_s - shown)
    recompute = np.where(repeats & ~is_full, in_part, recompute)
    transfers = np.where(table.pp > 1, table.virtual, 0)
    splits = framework.pipeline.splits_sends
    sent = np.minimum(whole / (table.tp if splits else 1), costs.boundary_bytes[key])
    # A share that tensor-parallel ranks receive is gathered, unless sequence parallelism leaves it divided.
    gathered = tp.all_gather_s(whole) * (table.sequence_parallel == 0) if splits else 0.0
    sends = transfers * (2.0 * pp.send_s(sent) + 2.0 * gathered)
    if framework.pipeline.overlaps_sends:
        sends = _exposed_sends(table, sends, forward + backward, workload.constants.overlap_slowdown)
    context_s = of_block.context_s * stage.num_blocks
    experts = _expert_parallel(workload, of_block, stage, (forward, backward))
    # A third of the head's time is its forward pass; half of a backward pass are the gradients of weights.
    forwards = 1.0 + workload.training.learns_from.extra_forwards
    return MicroBatchTime(
        forward_s=forwards * (forward + forward_sends + context_s + experts[0] + sends / 2 + ends / 3),
        weight_s=backward / 2 * weight_share(workload.model) + ends / 3,
        end_s=ends * (2 + forwards) / 3,
        compute_s=forward * forwards + backward + ends * (2 + forwards) / 3,
        recompute_s=recompute,
        tensor_parallel_s=forward_sends * (forwards + tensor_again) + backward_sends,
        context_parallel_s=context_s * forwards + of_block.context_backward_s * stage.num_blocks,
        expert_parallel_s=experts[0] * forwards + experts[1],
        send_s=sends * (1 + forwards) / 2,
        forward_tensor_parallel_s=forward_sends * forwards,
        forward_context_parallel_s=context_s * forwards,
        forward_expert_parallel_s=experts[0] * forwards,
    )


def _exposed_sends(table: PlanTable, sends: Floats, computed: Floats, slowdown: float) -> Floats:
    """Return what is left of the sends of a micro-batch that an interleaved pipeline overlaps in its steady state.

    Of the V m chunks that a rank passes forward, p - 1 on average and p (V - 1) fill the pipeline, and as many go
    backward when it empties (Narayanan et al. 2021, section 2.2); nothing hides the sends of these.
    """
    chunks = table.virtual * table.num_microbatches
    filling = np.minimum(1.0, (table.pp - 1 + table.pp * (table.virtual - 1)) / chunks)
    left = filling * sends + overlap_s((1 - filling) * sends, (1 - filling) * computed, slowdown=slowdown)
    return np.where(table.virtual > 1, left, sends)


def _expert_parallel(
    workload: Workload, of_block: Exchanges, stage: StageBlocks, computed_s: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Return the seconds that exchanges of experts add to the two passes of a rank's blocks."""
    shown = (of_block.expert_s, of_block.expert_backward_s)
    hidden = (of_block.hidden_s, of_block.hidden_backward_s)
    forward, backward = (
        alone * stage.num_blocks
        + overlap_s(beside * stage.num_blocks, compute, slowdown=workload.constants.overlap_slowdown)
        for alone, beside, compute in zip(shown, hidden, computed_s, strict=True)
    )
    return forward, backward


def _shown_exchanges(of_block: Exchanges, repeated: Mask) -> tuple[Floats, Floats]:
    """Return a block's exchanges of experts that nothing hides in a forward and a backward pass, none of them again."""
    again = np.where(repeated, of_block.expert_s + of_block.hidden_s, 0.0)
    return of_block.expert_s, of_block.expert_backward_s - again


def weight_share(model: ModelSpec) -> float:
    """Return how much of the products of weight gradients is left where layers are frozen."""
    matmuls = [(one, run.count) for run in model.runs for one in run.block.matmuls]
    whole = sum(one.flops_per_token * count for one, count in matmuls)
    return sum(one.flops_per_token * count for one, count in matmuls if one.trains) / max(1.0, whole)


def _passes(
    workload: Workload, costs: BlockCosts, stage: StageBlocks, work: WeightWork
) -> tuple[Floats, Floats, Floats]:
    """Return the GPU's seconds of a rank's blocks: forward pass, backward pass, and a forward pass that runs again."""
    again, backward = stage.sum(costs, costs.forward_s), stage.sum(costs, costs.backward_s)
    bandwidth = workload.memory_bandwidth_bytes_per_s
    if work.cast.any():
        head = costs.head_copied_parameters[costs.key] * stage.is_last
        cast = work.cast * (stage.sum(costs, costs.copied_parameters) + head) / bandwidth
        again, backward = again + cast, backward + cast
    weights = stage_parameters(costs, stage) / bandwidth
    # Frozen weights are copied out of the buffer that they are gathered in, and have no gradients.
    frozen = work.gathered * frozen_bytes(costs, stage) / bandwidth
    return again + work.forward * weights + frozen, backward + work.backward * weights + frozen, again
