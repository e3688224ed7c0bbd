"""Memory held by one rank of a pipeline stage: the terms of each peak candidate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts
from paraplan.cost.communication.exchanges import run_again
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.generation import generation_of
from paraplan.cost.memory.activations import kept_activations, on_gpu
from paraplan.cost.memory.optimizers import OptimizerStates, optimizer_states
from paraplan.cost.memory.overheads import (
    gathered_frozen_bytes,
    matmul_workspace_bytes,
    optimizer_shards,
    root_frozen_bytes,
    shard_padding,
)
from paraplan.cost.memory.parts import FP32, HALF, StageMemory
from paraplan.cost.pipeline.stages import StageBlocks, chunk_in_flight, mean_in_flight, one_chunk_in_flight
from paraplan.cost.plan_table import Floats, Mask, OffloadCode, PlanTable, ScheduleCode
from paraplan.cost.workload import Workload


@dataclass(frozen=True, eq=False)
class RankMemory:
    """The terms of each peak candidate. Bytes of one rank, one entry a plan.

    `chunks_in_flight` is `[V, N]`, the micro-batches of each virtual chunk whose activations a rank keeps, `in_flight`
    their mean, and `head_in_flight` those of the last chunk, where the head is.
    `parameters` and `root_parameters` count the stage's that train and those outside of blocks; `frozen_bytes` and
    `root_frozen_bytes` are the bytes of those that do not. `state_bytes` is the whole
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
    frozen_bytes: Floats
    root_frozen_bytes: Floats
    state_bytes: Floats
    shards: Floats
    state_shards: Floats
    chunks_in_flight: Floats
    in_flight: Floats
    head_in_flight: Floats
    padding: Floats

    @classmethod
    def of(cls, workload: Workload, table: PlanTable, costs: BlockCosts, stage: StageBlocks) -> RankMemory:
        """Return what a rank of `stage` holds under each plan."""
        states = optimizer_states(
            workload.model, workload.training.optimizer, workload.framework.storage.optimizer_state_bytes
        )
        key = costs.key
        blocks = stage.sum(costs, costs.parameters)
        is_tied = stage.is_last & (table.pp > 1) & workload.model.tied_embeddings
        embedding = np.where(stage.is_first, costs.embedding_parameters[key], costs.tied_parameters[key] * is_tied)
        head = costs.head_parameters[key] * stage.is_last
        master = workload.framework.storage.master_bytes if workload.is_mixed_precision else 0.0
        state_bytes = blocks * states.blocks + embedding * states.embedding + head * states.head
        shards = optimizer_shards(table, costs, stage, blocks + embedding + head)
        chunks = chunk_in_flight(table, stage)
        ends = root_frozen_bytes(costs, stage, is_tied)
        return cls(
            workload=workload,
            table=table,
            costs=costs,
            stage=stage,
            states=states,
            parameters=np.asarray(blocks + embedding + head),
            root_parameters=np.asarray(embedding + head),
            frozen_bytes=np.asarray(stage.sum(costs, costs.frozen_bytes) + ends),
            root_frozen_bytes=ends,
            state_bytes=np.asarray(state_bytes + master * (blocks + embedding + head)),
            shards=shards,
            state_shards=np.where(table.zero_stage >= 1, shards, 1.0),
            chunks_in_flight=chunks,
            in_flight=mean_in_flight(table, chunks),
            head_in_flight=one_chunk_in_flight(table, stage, table.virtual - 1),
            padding=shard_padding(workload, table),
        )

    @property
    def framework(self) -> FrameworkProfile:
        """The framework that is modelled."""
        return self.workload.framework

    @cached_property
    def is_mixed(self) -> bool:
        """Whether matmuls run in 16 bits."""
        return self.workload.is_mixed_precision

    @cached_property
    def compute_bytes(self) -> float:
        """Bytes of an element of what matmuls read."""
        return float(self.workload.training.activation_bytes)

    @cached_property
    def full_bytes(self) -> float:
        """Bytes of a gradient's element as the optimizer reads it, and of a copy that its step makes."""
        return self.framework.storage.step_gradient_bytes if self.is_mixed else FP32

    @cached_property
    def is_fsdp(self) -> Mask:
        """Plans whose shards FSDP gathers, at any ZeRO stage."""
        return np.asarray((self.table.zero_stage >= 1) & self.framework.data_parallel.uses_fsdp)

    @cached_property
    def accumulates(self) -> Mask:
        """Plans with several micro-batches a step, whose gradients add up."""
        return self.table.num_microbatches > 1

    @cached_property
    def has_earlier_gradients(self) -> Mask:
        """Plans that already hold gradients when activations peak."""
        keeps_all = (self.table.schedule != ScheduleCode.INTERLEAVED) & (self.table.num_microbatches <= self.in_flight)
        return np.asarray(self.accumulates & ((self.table.pp == 1) | ~keeps_all))

    @cached_property
    def block_parameters(self) -> Floats:
        """Parameters of the largest block."""
        return self.costs.largest_block_parameters[self.costs.key]

    @cached_property
    def weight_bytes(self) -> Floats:
        """Parameters that stay from step to step: whole, or the shards of FSDP and ZeRO-3 unless they are offloaded."""
        each = self.framework.storage.weight_bytes if self.is_mixed else FP32
        is_sharded = self.is_fsdp | (self.table.zero_stage == 3)
        shard = np.where(self.offloads_parameters, 0.0, self.padding / self.shards)
        own = (self.parameters * each + self.frozen_bytes) * np.where(is_sharded, shard, 1.0)
        return np.asarray(own + self.reference_bytes)

    @cached_property
    def reference_bytes(self) -> Floats:
        """A reference model beside the one that trains, in the type that matmuls compute in; ZeRO-3 shards it too."""
        if not self.workload.training.copies_reference:
            return np.zeros(len(self.table))
        whole = self.parameters * self.compute_bytes + self.frozen_bytes
        return np.where(self.table.zero_stage == 3, whole / self.shards, whole)

    @cached_property
    def offloads_parameters(self) -> Mask:
        """Plans whose shards of parameters and gradients lie in the host's memory between their uses."""
        is_sharded = self.is_fsdp | (self.table.zero_stage == 3)
        return np.asarray(is_sharded & (self.table.offload == OffloadCode.PARAMETERS))

    @cached_property
    def optimizer_bytes(self) -> Floats:
        """The optimizer's state of this rank, if it is not offloaded."""
        is_here = self.table.offload == OffloadCode.NONE
        return np.where(is_here, self.state_bytes * self.padding / self.state_shards, 0.0)

    @cached_property
    def embedding_alone(self) -> Floats:
        """Parameters of an embedding that FSDP gathers for its own passes; 0 where it is part of the root."""
        return self._alone(self.costs.embedding_parameters[self.costs.key] * self.stage.is_first)

    @cached_property
    def head_alone(self) -> Floats:
        """Parameters of a head that FSDP gathers for its own passes; 0 where it is part of the root."""
        return self._alone(self.costs.head_parameters[self.costs.key] * self.stage.is_last)

    def _alone(self, end: Floats) -> Floats:
        framework, model = self.framework, self.workload.model
        if not framework.data_parallel.wraps_embedding_and_head or model.tied_embeddings:
            return np.zeros(len(self.table))
        is_alone = self.is_fsdp & (self.table.pp == 1) & (end >= self.block_parameters)
        return np.where(is_alone, end, 0.0)

    def gathered_bytes(self, *, num_blocks: int, end: Floats | float = 0.0) -> Floats:
        """Return what ZeRO has gathered while `num_blocks` blocks and the parameters of an `end` alone are in use.

        Frozen weights are gathered as they are stored. FSDP's stages 1 and 2 gather all for a step; stage 3 blocks as
        they are used, what is left for a whole pass. Other ZeRO-3 gathers the largest unit and its successor, and lets
        go of what exceeds a limit.
        """
        root = self.root_parameters - self.embedding_alone - self.head_alone
        units = root + end + num_blocks * self.block_parameters * self.workload.training.gathered_share
        if not self.framework.data_parallel.uses_fsdp:
            units = np.maximum(
                2 * np.maximum(self.block_parameters, self.root_parameters),
                self.framework.data_parallel.max_live_elements,
            )
        live = np.minimum(units, self.parameters)
        gathers_all = self.is_fsdp & (self.table.zero_stage < 3)
        is_sharded = self.is_fsdp | (self.table.zero_stage == 3)
        every = self.root_parameters + (self.parameters - self.root_parameters) * self.workload.training.gathered_share
        trained = np.where(gathers_all, every, live) * self.compute_bytes
        block = self.costs.largest_block_frozen_bytes[self.costs.key] * num_blocks
        some = gathered_frozen_bytes(self.workload, block, self.root_frozen_bytes)
        frozen = np.minimum(np.where(gathers_all, np.inf, some), self.frozen_bytes)
        return np.where(is_sharded, trained + frozen, 0.0)

    def copied_bytes(self, *, in_forward: bool) -> Floats:
        """Return the 16-bit copies of fp32 weights that autocast makes for each pass and its backward pass.

        Where blocks run again a forward pass drops those of the blocks at its end, and a backward pass has one block's.
        """
        if not (self.framework.storage.autocast_copy_bytes and self.is_mixed):
            return np.zeros(len(self.table))
        copied = self.costs.copied_parameters
        blocks = self.stage.sum(self.costs, copied)
        head = self.costs.head_copied_parameters[self.costs.key] * self.stage.is_last
        one_block = blocks if in_forward else np.minimum(blocks, self.block_parameters)
        of_all = self.stage.sum_in_flight(self.costs, copied, self.chunks_in_flight)
        kept = np.where(run_again(self.workload, self.table), one_block, of_all) + head * self.head_in_flight
        return np.where(self.table.zero_stage == 0, kept * self.framework.storage.autocast_copy_bytes, 0.0)

    @cached_property
    def activation_bytes(self) -> Floats:
        """Activations of the blocks and what stands before them, of all micro-batches in flight."""
        return kept_activations(self.table, self.costs, self.stage, self.chunks_in_flight)

    @cached_property
    def kept_bytes(self) -> Floats:
        """Those of them that are on the GPU."""
        return on_gpu(self.workload, self.costs, self.activation_bytes)

    @cached_property
    def passed_bytes(self) -> Floats:
        """Buffers of a pipeline: what is received, and what is kept of what was sent.

        DeepSpeed's engine has three for one boundary each: what comes in, its gradient, and that of what went out.
        """
        boundary = self.costs.boundary_bytes[self.costs.key]
        neighbours = (~self.stage.is_first).astype(float) + ~self.stage.is_last
        if self.framework.pipeline.keeps_both_boundaries:
            return np.where(self.table.pp > 1, (neighbours * self.in_flight + 3) * boundary, 0.0)
        if not self.framework.pipeline.allocates_every_receive:
            return np.where(self.table.pp > 1, 2 * boundary, 0.0)
        received = neighbours * self.table.num_microbatches
        return np.where(self.table.pp > 1, (received + self.in_flight * ~self.stage.is_last) * boundary, 0.0)

    @cached_property
    def num_logits(self) -> Floats:
        """Logits of one micro-batch on this rank: 0 away from the last stage."""
        tokens = self.table.tokens(self.workload.training.seq_length)
        logits = tokens * self.workload.model.vocabulary * self.stage.is_last
        return np.asarray(logits if self.framework.loss.gathers_logits else logits / self.table.tp)

    @cached_property
    def head_kept_bytes(self) -> Floats:
        """What the head keeps of all micro-batches in flight, without what the loss keeps of the logits."""
        kept = self.costs.head_saved_bytes[self.costs.key] * self.stage.is_last
        return np.asarray(kept * self.head_in_flight)

    def gradient_bytes(self, *, at_end: bool) -> Floats:
        """Return the gradients while the last micro-batch's backward pass begins, or at its end.

        Gradients that are freed after a step do not exist before the first backward pass. DDP's buckets do, and
        micro-batches add up beside them until the last one is reduced in them. FSDP's stage 1 adds up whole gradients
        in fp32; the others reduce after every micro-batch, and what the last reduction reads, that of the root or of
        an embedding alone, stays until the next one.
        """
        framework = self.framework
        each = framework.storage.gradient_bytes if self.is_mixed else FP32
        full = self.full_bytes
        if self.accumulates_apart:
            each += HALF
        whole = self.parameters * each
        before = self.has_earlier_gradients & (not at_end)
        is_ddp = self.is_replica & framework.storage.frees_gradients & ~self.averages_flat_copies
        stands = before | at_end | (not framework.storage.frees_gradients)
        replicated = whole * (stands | is_ddp) + np.where(is_ddp & before, whole, 0.0)
        shard = whole * self.padding / self.shards
        last = np.where(self.embedding_alone > 0, self.embedding_alone, self.root_parameters - self.head_alone)
        kept = self.parameters * FP32 if framework.data_parallel.accumulates_whole else shard + last * full
        reduced = np.where(self.table.zero_stage == 1, whole, kept)
        fsdp = np.where(at_end, shard, np.where(before, reduced, 0.0))
        other = np.where(self.table.zero_stage >= 2, whole / self.shards, whole)
        # On their way to the host the shards of one unit at a time are here, which the reduction has anyway.
        sharded = np.where(self.offloads_parameters, 0.0, np.where(self.is_fsdp, fsdp, other))
        return np.where(self.table.zero_stage == 0, replicated, sharded)

    @cached_property
    def is_zero_bubble(self) -> Mask:
        """Plans whose backward passes are taken in halves."""
        return np.asarray((self.table.schedule == ScheduleCode.ZERO_BUBBLE) & (self.table.pp > 1))

    @cached_property
    def is_replica(self) -> Mask:
        """Plans of which several ranks hold the same whole gradients."""
        return np.asarray((self.table.dp * self.table.cp > 1) & (self.table.zero_stage == 0))

    @cached_property
    def averages_flat_copies(self) -> Mask:
        """Plans whose replicas the runtime averages itself: DDP's hooks know no chunks and no halves of a pass."""
        return np.asarray(
            self.is_zero_bubble | ((self.table.schedule == ScheduleCode.INTERLEAVED) & (self.table.pp > 1))
        )

    @cached_property
    def flat_average_bytes(self) -> Floats:
        """Flat copies of all gradients, in which the runtime averages those of replicas before a step."""
        copies = self.is_replica & self.averages_flat_copies & self.framework.storage.frees_gradients
        return np.where(copies, self.parameters * self.full_bytes, 0.0)

    @cached_property
    def splits_backward(self) -> Mask:
        """Plans whose rank makes the gradients of activations before those of weights: the first does both at once."""
        return np.asarray(self.is_zero_bubble & (self.stage.rank > 0))

    @cached_property
    def split_backward_bytes(self) -> Floats:
        """What one micro-batch keeps from the first to the second half of its backward pass: gradients of outputs.

        Beside those of matmuls and norms it is what the stage sends back, and what the first half has computed again,
        which the second reads too: with full recompute the 16-bit copies of all weights are among it.
        """
        if not self.splits_backward.any():
            return np.zeros(len(self.table))
        head = self.costs.head_output_gradient_bytes[self.costs.key] * self.stage.is_last
        blocks = self.stage.sum(self.costs, self.costs.output_gradient_bytes)
        sent = self.costs.boundary_bytes[self.costs.key]
        again = self.stage.sum(self.costs, self.costs.recomputed_bytes)
        if self.framework.storage.autocast_copy_bytes and self.is_mixed:
            copied = (
                self.stage.sum(self.costs, self.costs.copied_parameters) * self.framework.storage.autocast_copy_bytes
            )
            again = again + np.where(run_again(self.workload, self.table) & (self.table.zero_stage == 0), copied, 0.0)
        return np.where(self.splits_backward, blocks + head + sent + again, 0.0)

    @cached_property
    def waiting_bytes(self) -> Floats:
        """The same of all micro-batches that wait for their second half while another one's first half begins.

        Rank i puts off those of i micro-batches (ZB-H1, Qi et al. 2024, figure 3).
        """
        return np.asarray(np.minimum(self.stage.rank, self.table.num_microbatches - 1) * self.split_backward_bytes)

    @cached_property
    def unfinished_bytes(self) -> Floats:
        """The same, and the last second half's gradients of weights, which FSDP adds up in the next first half."""
        unadded = self.splits_backward & self.is_fsdp & self.has_earlier_gradients
        return np.asarray(self.waiting_bytes + np.where(unadded, self.parameters * self.compute_bytes, 0.0))

    @cached_property
    def makes_gradients(self) -> Mask:
        """Plans whose gradients do not exist before the backward pass that makes them."""
        is_alone = (self.table.dp * self.table.cp == 1) & ~self.has_earlier_gradients
        return np.asarray(is_alone & self.framework.storage.frees_gradients)

    def reduced_bytes(self, parameters: Floats) -> Floats:
        """Return the gradients of a unit of `parameters` while FSDP reduces them: as computed, and to be reduced."""
        return np.where(self.is_fsdp, parameters * (self.compute_bytes + self.full_bytes), 0.0)

    @cached_property
    def standing_workspace_bytes(self) -> Floats:
        """What a framework keeps through the whole step.

        Workspaces of matrix libraries, Transformer Engine's dummies, the scores' buffer of Megatron-LM's own attention,
        from ZeRO-2 on the bucket in which DeepSpeed gathers gradients to reduce, and what generates answers here.
        """
        framework, key = self.framework, self.costs.key
        dummies = self.costs.distinct_weight_parameters[key] * (HALF if framework.storage.keeps_dummy_gradients else 0)
        scores = self.costs.score_bytes[key] if framework.kernels.keeps_score_buffer else 0.0
        bucket = np.where(self.table.zero_stage >= 2, self.bucket_bytes, 0.0)
        generation = generation_of(self.workload)
        generates = generation.reserved_bytes if generation is not None and generation.is_shared else 0.0
        return np.asarray(matmul_workspace_bytes(self.workload) + dummies + scores + bucket + generates)

    @cached_property
    def bucket_bytes(self) -> Floats:
        """One bucket of a framework that sends gradients, or parameters, in buckets of a fixed size."""
        elements = np.minimum(self.framework.data_parallel.bucket_elements, self.parameters)
        return np.where(self.table.zero_stage >= 1, elements * self.compute_bytes, 0.0)

    @cached_property
    def accumulates_apart(self) -> bool:
        """Whether gradients are accumulated in fp32 beside those that backward passes make."""
        framework = self.framework
        return framework.storage.accumulates_separately and self.is_mixed and framework.storage.gradient_bytes == FP32

    @cached_property
    def flat_step_bytes(self) -> Floats:
        """Flat copies of this rank's share of the gradients that a step makes, unless these are flat already."""
        each = 0.0 if self.accumulates_apart else self.framework.storage.flat_step_bytes
        return np.asarray(self.parameters / self.state_shards * each)

    def candidate(
        self, *, parameters: Floats, gradients: Floats, activations: Floats, workspace: Floats
    ) -> StageMemory:
        """Return a peak candidate: beside what it names, the weights, the optimizer's state and what stands always."""
        return StageMemory(
            parameter_bytes=self.weight_bytes + parameters,
            gradient_bytes=gradients,
            optimizer_state_bytes=self.optimizer_bytes,
            activation_bytes=activations,
            workspace_bytes=self.standing_workspace_bytes + workspace,
        )
