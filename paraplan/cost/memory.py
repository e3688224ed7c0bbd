"""Memory of one rank of each pipeline stage at its peak, by parts that sum.

A step has a few moments at which a rank may hold most: the end of the forward pass, the loss's backward pass, that of a
block, the end of the backward pass, and the optimizer's step. Each is added up by parts; the largest is the peak.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from paraplan.cost.blocks import BlockCosts
from paraplan.cost.optimizers import OptimizerStates, optimizer_states
from paraplan.cost.stages import StageBlocks, in_flight
from paraplan.cost.table import OFFLOADS, RECOMPUTES, SCHEDULES, Floats, Mask, PlanTable
from paraplan.cost.workload import Workload

_FULL = RECOMPUTES.index("full")
_GPIPE = SCHEDULES.index("gpipe")
_FP32, _HALF = 4.0, 2.0


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Bytes that one rank of a stage allocates at its peak, one entry a plan."""

    parameter_bytes: Floats
    gradient_bytes: Floats
    optimizer_state_bytes: Floats
    activation_bytes: Floats
    workspace_bytes: Floats

    @property
    def total_bytes(self) -> Floats:
        """Sum of the parts."""
        return np.asarray(sum(getattr(self, field.name) for field in fields(self)))


def stage_memory(workload: Workload, table: PlanTable, costs: BlockCosts, stage: StageBlocks) -> StageMemory:
    """Return the memory of one rank of `stage` under each plan, at the moment when it holds most.

    The unit is what `torch.cuda.max_memory_allocated` shows.
    """
    rank = _Rank.of(workload, table, costs, stage)
    moments = (
        _end_of_forward(rank),
        _loss_backward(rank),
        _block_backward(rank),
        _block_reduction(rank),
        _end_of_backward(rank),
        _optimizer_step(rank),
    )
    largest = np.argmax([moment.total_bytes for moment in moments], axis=0)
    parts = {
        field.name: np.choose(largest, [getattr(moment, field.name) for moment in moments])
        for field in fields(StageMemory)
    }
    return StageMemory(**parts)


def host_bytes(workload: Workload, table: PlanTable, costs: BlockCosts, stage: StageBlocks) -> Floats:
    """Return the host memory that offload moves a rank's state to.

    An offloaded optimizer brings its state, fp32 parameters to update and fp32 gradients to update by (Ren et al. 2021,
    ZeRO-Offload, section 4.1); offloaded parameters are those fp32 parameters.
    """
    rank = _Rank.of(workload, table, costs, stage)
    states = rank.state_bytes / rank.state_shards
    copies = 2 * _FP32 * rank.parameters / rank.state_shards
    return np.where(table.offload == OFFLOADS.index("none"), 0.0, states + copies)


@dataclass(frozen=True, eq=False)
class _Rank:
    """What the moments of a step are added up from. Bytes of one rank, one entry a plan.

    `parameters` and `root_parameters` count the stage's and those outside of its blocks. `state_bytes` is the whole
    optimizer state, `state_shards` the ranks over which it is divided, and `padding` how much larger than an even
    share the shards of the first rank are.
    """

    workload: Workload
    table: PlanTable
    costs: BlockCosts
    stage: StageBlocks
    states: OptimizerStates
    parameters: Floats
    root_parameters: Floats
    state_bytes: Floats
    shards: Floats
    state_shards: Floats
    in_flight: Floats
    padding: Floats

    @classmethod
    def of(cls, workload: Workload, table: PlanTable, costs: BlockCosts, stage: StageBlocks) -> _Rank:
        states = optimizer_states(workload.model, workload.training.optimizer)
        key = costs.key
        blocks = stage.sum(costs, costs.parameters)
        is_tied = stage.is_last & (table.pp > 1) & workload.model.tied_embeddings
        embedding = costs.embedding_parameters[key] * (stage.is_first | is_tied)
        head = costs.head_parameters[key] * stage.is_last
        master = workload.habits.master_bytes if workload.is_mixed_precision else 0.0
        state_bytes = blocks * states.blocks + embedding * states.embedding + head * states.head
        shards = table.shard_size.astype(float)
        return cls(
            workload=workload,
            table=table,
            costs=costs,
            stage=stage,
            states=states,
            parameters=np.asarray(blocks + embedding + head),
            root_parameters=np.asarray(embedding + head),
            state_bytes=np.asarray(state_bytes + master * (blocks + embedding + head)),
            shards=shards,
            state_shards=np.where(table.zero_stage >= 1, shards, 1.0),
            in_flight=in_flight(table, stage),
            padding=_padding(workload, table),
        )

    @cached_property
    def is_mixed(self) -> bool:
        return self.workload.is_mixed_precision

    @cached_property
    def compute_bytes(self) -> float:
        """Bytes of an element of what matmuls read."""
        return float(self.workload.training.activation_bytes)

    @cached_property
    def is_fsdp(self) -> Mask:
        """Plans whose shards FSDP gathers, at any ZeRO stage."""
        return np.asarray((self.table.zero_stage >= 1) & self.workload.habits.shards_with_fsdp)

    @cached_property
    def accumulates(self) -> Mask:
        """Plans with several micro-batches a step, whose gradients add up."""
        return self.table.num_microbatches > 1

    @cached_property
    def has_earlier_gradients(self) -> Mask:
        """Plans that keep most activations when gradients are there already; GPipe keeps all before its first."""
        return np.asarray(self.accumulates & ((self.table.schedule != _GPIPE) | (self.table.pp == 1)))

    @cached_property
    def block_parameters(self) -> Floats:
        """Parameters of the largest block."""
        return self.costs.largest_block_parameters[self.costs.key]

    @cached_property
    def weight_bytes(self) -> Floats:
        """Parameters that stay from step to step: whole, or the shards of FSDP and ZeRO-3."""
        each = self.workload.habits.weight_bytes if self.is_mixed else _FP32
        is_sharded = self.is_fsdp | (self.table.zero_stage == 3)
        return np.asarray(self.parameters * each * np.where(is_sharded, self.padding / self.shards, 1.0))

    @cached_property
    def optimizer_bytes(self) -> Floats:
        is_here = self.table.offload == OFFLOADS.index("none")
        return np.where(is_here, self.state_bytes * self.padding / self.state_shards, 0.0)

    def gathered_bytes(self, *, num_blocks: int) -> Floats:
        """Return what ZeRO has gathered while `num_blocks` blocks are in use.

        FSDP's stages 1 and 2 gather all for a step; stage 3 blocks as they are used, and all outside of the blocks for
        a whole pass. Other ZeRO-3 gathers the largest unit and its successor.
        """
        units = self.root_parameters + num_blocks * self.block_parameters
        if not self.workload.habits.shards_with_fsdp:
            units = 2 * np.maximum(self.block_parameters, self.root_parameters)
        live = np.minimum(units, self.parameters)
        gathers_all = self.is_fsdp & (self.table.zero_stage < 3)
        is_sharded = self.is_fsdp | (self.table.zero_stage == 3)
        return np.where(is_sharded, np.where(gathers_all, self.parameters, live) * self.compute_bytes, 0.0)

    def copied_bytes(self, *, in_forward: bool) -> Floats:
        """Return the 16-bit copies of fp32 weights that autocast makes for each pass and its backward pass.

        With full recompute a forward pass drops those of the blocks at its end, and a backward pass has one block's.
        """
        if not (self.workload.habits.copy_bytes and self.is_mixed):
            return np.zeros(len(self.table))
        blocks = self.stage.sum(self.costs, self.costs.copied_parameters)
        head = self.costs.head_copied_parameters[self.costs.key] * self.stage.is_last
        one_block = blocks if in_forward else np.minimum(blocks, self.block_parameters)
        kept = np.where(self.table.recompute == _FULL, one_block, blocks * self.in_flight) + head * self.in_flight
        return np.where(self.table.zero_stage == 0, kept * self.workload.habits.copy_bytes, 0.0)

    @cached_property
    def kept_bytes(self) -> Floats:
        """Activations of the blocks and what stands before them, of all micro-batches in flight."""
        key = self.costs.key
        first, later = (
            self.stage.sum(self.costs, kept) for kept in (self.costs.saved_bytes, self.costs.later_saved_bytes)
        )
        kept = np.where(self.stage.is_first, first + self.costs.embedding_saved_bytes[key], later)
        return np.asarray(kept * self.in_flight)

    @cached_property
    def passed_bytes(self) -> Floats:
        """Buffers of a pipeline: what is received, and what is kept of what was sent."""
        boundary = self.costs.boundary_bytes[self.costs.key]
        neighbours = (~self.stage.is_first).astype(float) + ~self.stage.is_last
        if not self.workload.habits.allocates_every_receive:
            return np.where(self.table.pp > 1, 2 * boundary, 0.0)
        received = neighbours * self.table.num_microbatches
        return np.where(self.table.pp > 1, (received + self.in_flight * ~self.stage.is_last) * boundary, 0.0)

    @cached_property
    def num_logits(self) -> Floats:
        """Logits of one micro-batch on this rank: 0 away from the last stage."""
        tokens = self.table.micro_batch_size * self.workload.training.seq_length / self.table.cp
        outputs = max((matmul.n for matmul in self.workload.model.head.matmuls), default=0)
        divisor = self.table.tp if self.workload.habits.splits_vocabulary else 1
        return np.asarray(tokens * outputs / divisor * self.stage.is_last)

    @cached_property
    def head_kept_bytes(self) -> Floats:
        """What the head keeps of all micro-batches in flight, without what the loss keeps of the logits."""
        kept = self.costs.head_saved_bytes[self.costs.key] * self.stage.is_last
        return np.asarray(kept * self.in_flight)

    def gradient_bytes(self, *, at_end: bool) -> Floats:
        """Return the gradients while the last micro-batch's backward pass begins, or at its end.

        Gradients that are freed after a step do not exist before the first backward pass. DDP's buckets do, and
        micro-batches add up beside them until the last one is reduced in them. FSDP's stage 1 adds up whole gradients
        in fp32; the others reduce after every micro-batch, and what the reduction of the root reads stays until the
        next one.
        """
        habits = self.workload.habits
        each = habits.gradient_bytes if self.is_mixed else _FP32
        whole = self.parameters * each
        before = self.has_earlier_gradients & (not at_end)
        is_ddp = (self.table.dp * self.table.cp > 1) & (self.table.zero_stage == 0) & habits.frees_gradients
        stands = before | at_end | (not habits.frees_gradients)
        replicated = whole * (stands | is_ddp) + np.where(is_ddp & before, whole, 0.0)
        shard = whole * self.padding / self.shards
        reduced = np.where(self.table.zero_stage == 1, whole, shard + self.root_parameters * _FP32)
        fsdp = np.where(at_end, shard, np.where(before, reduced, 0.0))
        other = np.where(self.table.zero_stage >= 2, whole / self.shards, whole)
        sharded = np.where(self.is_fsdp, fsdp, other)
        return np.where(self.table.zero_stage == 0, replicated, sharded)

    @cached_property
    def makes_gradients(self) -> Mask:
        """Plans whose gradients do not exist before the backward pass that makes them."""
        is_alone = (self.table.dp * self.table.cp == 1) & ~self.has_earlier_gradients
        return np.asarray(is_alone & self.workload.habits.frees_gradients)

    def reduced_bytes(self, parameters: Floats) -> Floats:
        """Return the gradients of a unit of `parameters` while FSDP reduces them: as computed, and to be reduced."""
        return np.where(self.is_fsdp, parameters * (self.compute_bytes + _FP32), 0.0)

    @cached_property
    def standing_workspace_bytes(self) -> Floats:
        """What a framework keeps through the whole step: Transformer Engine's dummies, DeepSpeed's buckets."""
        habits = self.workload.habits
        dummies = self.costs.distinct_weight_parameters[self.costs.key] * (_HALF if habits.keeps_dummy_gradients else 0)
        buckets = 2 * np.minimum(habits.bucket_elements, self.parameters) * self.compute_bytes
        return np.asarray(dummies + np.where(self.table.zero_stage >= 1, buckets, 0.0))

    def moment(self, *, parameters: Floats, gradients: Floats, activations: Floats, workspace: Floats) -> StageMemory:
        """Return a moment: beside what it names, the weights, the optimizer's state and what stands always."""
        return StageMemory(
            parameter_bytes=self.weight_bytes + parameters,
            gradient_bytes=gradients,
            optimizer_state_bytes=self.optimizer_bytes,
            activation_bytes=activations,
            workspace_bytes=self.standing_workspace_bytes + workspace,
        )


def _padding(workload: Workload, table: PlanTable) -> Floats:
    """Return how much larger than an even share FSDP's shards are: parameters are divided along their first dimension.

    The first rank holds the rows that are left over (torch.distributed.fsdp, `fully_shard`).
    """
    if not workload.habits.shards_with_fsdp:
        return np.ones(len(table))
    model = workload.model
    elements: Counter[int] = Counter()
    for block, count in ((model.embedding, 1), *((run.block, run.count) for run in model.runs), (model.head, 1)):
        for parameter in block.parameters:
            elements[parameter.shape[0] if parameter.shape else 1] += parameter.num_elements * count
    sizes, inverse = np.unique(np.where(table.zero_stage >= 1, table.shard_size, 1), return_inverse=True)
    rows, weights = np.array(list(elements)), np.array(list(elements.values()), dtype=float)
    padded = np.ceil(rows / sizes[:, None]) * sizes[:, None] / rows
    return np.asarray((padded @ weights / weights.sum())[inverse.reshape(-1)])


def _end_of_forward(rank: _Rank) -> StageMemory:
    """Return the moment when all weights have their copies, and the loss has made its tensors.

    torch's cross-entropy holds 16-bit logits, their log-probabilities and a copy of these in fp32; in fp32 logits and
    log-probabilities (ATen/native/LossNLL.cpp).
    """
    each = _FP32 + 2 * _HALF if rank.is_mixed else 2 * _FP32
    each = min(each, rank.workload.habits.logit_bytes) if rank.is_mixed else each
    earlier = _loss_kept_bytes(rank) * (rank.in_flight - 1)
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=1) + rank.copied_bytes(in_forward=True),
        gradients=rank.gradient_bytes(at_end=False),
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + earlier + each * rank.num_logits,
        workspace=np.zeros(len(rank.table)),
    )


def _loss_kept_bytes(rank: _Rank) -> Floats:
    """Return what the loss of one micro-batch keeps: 16-bit and fp32 log-probabilities; a fused one, one tensor."""
    each = min(_HALF + _FP32, rank.workload.habits.logit_bytes) if rank.is_mixed else _FP32
    return np.asarray(each * rank.num_logits)


def _loss_backward(rank: _Rank) -> StageMemory:
    """Return the moment when everything is kept, and the loss makes gradients of the size of the logits."""
    most = rank.workload.habits.logit_bytes if rank.is_mixed else 3 * _FP32
    kept = _loss_kept_bytes(rank)
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0) + rank.copied_bytes(in_forward=False),
        gradients=rank.gradient_bytes(at_end=False),
        activations=rank.kept_bytes + rank.passed_bytes + rank.head_kept_bytes + kept * rank.in_flight,
        workspace=np.maximum(0.0, most * rank.num_logits - kept),
    )


def _block_backward(rank: _Rank) -> StageMemory:
    """Return the moment when the last block's backward pass begins: its working set stands beside all that is kept."""
    key = rank.costs.key
    head = rank.costs.head_parameters[key] * rank.stage.is_last
    fresh = head * np.where(rank.is_fsdp, rank.compute_bytes, np.where(rank.makes_gradients, _FP32, 0.0))
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=2) + rank.copied_bytes(in_forward=False),
        gradients=rank.gradient_bytes(at_end=False) + fresh,
        activations=rank.kept_bytes + rank.passed_bytes + _loss_kept_bytes(rank) * (rank.in_flight - 1),
        workspace=rank.costs.working_bytes[key]
        + rank.costs.boundary_bytes[key]
        + rank.costs.largest_weight_parameters[key] * rank.compute_bytes,
    )


def _block_reduction(rank: _Rank) -> StageMemory:
    """Return the moment when the last block's backward pass is done, and FSDP reduces its gradients."""
    key = rank.costs.key
    head = rank.costs.head_parameters[key] * rank.stage.is_last * rank.compute_bytes
    blocks = np.maximum(rank.stage.num_blocks * rank.in_flight, 1.0)
    moment = rank.moment(
        parameters=rank.gathered_bytes(num_blocks=2),
        gradients=rank.gradient_bytes(at_end=False) + head + rank.reduced_bytes(rank.block_parameters),
        activations=rank.kept_bytes * (1 - 1 / blocks) + rank.passed_bytes,
        workspace=rank.costs.boundary_bytes[key],
    )
    nothing = np.zeros(len(rank.table))
    # Stage 1 reduces after the last micro-batch only, when a pipeline holds no other.
    reduces = rank.is_fsdp & ((rank.table.zero_stage > 1) | ~rank.accumulates)
    return StageMemory(
        **{field.name: np.where(reduces, getattr(moment, field.name), nothing) for field in fields(StageMemory)}
    )


def _end_of_backward(rank: _Rank) -> StageMemory:
    """Return the moment of the last gradients: the embedding's, and what FSDP reduces of all outside of the blocks."""
    others = (rank.in_flight - 1) / np.maximum(rank.in_flight, 1.0)
    embedding = rank.costs.embedding_parameters[rank.costs.key] * rank.stage.is_first * _FP32
    is_apart = rank.workload.habits.frees_gradients & (rank.table.zero_stage == 0)
    return rank.moment(
        parameters=rank.gathered_bytes(num_blocks=0),
        gradients=rank.gradient_bytes(at_end=True) + rank.reduced_bytes(rank.root_parameters),
        activations=(rank.kept_bytes + rank.head_kept_bytes) * others + rank.passed_bytes,
        workspace=np.where(is_apart, embedding, 0.0),
    )


def _optimizer_step(rank: _Rank) -> StageMemory:
    """Return the moment of the step: activations are gone, and it makes copies of all parameters or of one."""
    local = rank.parameters / rank.state_shards
    largest = np.maximum(rank.costs.largest_weight_parameters[rank.costs.key], rank.root_parameters) / rank.state_shards
    loops = rank.is_fsdp | (rank.workload.habits.optimizer_step == "for_loop")
    if rank.workload.habits.optimizer_step == "fused":
        copied = np.zeros(len(rank.table))
    else:
        copied = np.where(loops, 2 * largest, local) * rank.states.step_copies * _FP32
    is_here = rank.table.offload == OFFLOADS.index("none")
    return rank.moment(
        parameters=np.zeros(len(rank.table)),
        gradients=rank.gradient_bytes(at_end=True),
        activations=rank.passed_bytes,
        workspace=np.where(is_here, copied, 0.0),
    )
