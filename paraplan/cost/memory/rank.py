"""Memory held by one rank of a pipeline stage: the terms of each peak candidate."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from paraplan.cost.communication.exchanges import run_again
from paraplan.cost.generation import generation_of
from paraplan.cost.memory.activations import kept_activations, on_gpu
from paraplan.cost.memory.overheads import matmul_workspace_bytes
from paraplan.cost.memory.parts import FP32, HALF, StageMemory
from paraplan.cost.memory.state import RankState
from paraplan.cost.plan_table import Floats, Mask, OffloadCode, ScheduleCode


class RankMemory(RankState):
    """The terms of each peak candidate: beside the state, copies, activations, gradients and workspaces."""

    @cached_property
    def forward_copies_bytes(self) -> Floats:
        """The 16-bit copies of fp32 weights that autocast makes, at the end of a forward pass.

        Where blocks run again a forward pass drops those of the blocks at its end, and a backward pass has one block's.
        """
        return self._copied_bytes(in_forward=True)

    @cached_property
    def backward_copies_bytes(self) -> Floats:
        """16-bit copies of weights that a backward pass has."""
        return self._copied_bytes(in_forward=False)

    def _copied_bytes(self, *, in_forward: bool) -> Floats:
        if not (self.framework.storage.is_autocast and self.is_mixed):
            return np.zeros(len(self.table))
        copied = self.costs.copied_parameters
        blocks = self.stage.sum(self.costs, copied)
        head = self.costs.head_copied_parameters[self.costs.key] * self.stage.is_last
        one_block = blocks if in_forward else np.minimum(blocks, self.block_parameters)
        of_all = self.stage.sum_in_flight(self.costs, copied, self.chunks_in_flight)
        kept = np.where(run_again(self.workload, self.table), one_block, of_all) + head * self.head_in_flight
        return np.where(self.table.zero_stage == 0, kept * HALF, 0.0)

    @cached_property
    def activation_bytes(self) -> Floats:
        """Activations of the blocks and what stands before them, of all micro-batches in flight."""
        unscattered = np.where(run_again(self.workload, self.table), self.unscattered_bytes * self.in_flight, 0.0)
        return kept_activations(self.table, self.costs, self.stage, self.chunks_in_flight) + unscattered

    @cached_property
    def unscattered_bytes(self) -> Floats:
        """The bytes of an embedding that the model's code holds through its forward pass, beside the first block's.

        Of that sequence parallelism gives a rank its own tokens inside of the block: recompute keeps all.
        """
        if not self.framework.tensor_parallel.keeps_gathered_inputs:
            return np.zeros(len(self.table))
        return np.asarray(self.costs.unscattered_bytes[self.costs.key] * self.stage.is_first)

    @cached_property
    def kept_bytes(self) -> Floats:
        """Activations that are on the GPU."""
        return on_gpu(self.workload, self.costs, self.activation_bytes)

    @cached_property
    def passed_bytes(self) -> Floats:
        """Buffers of a pipeline: what is received, and what is kept of what was sent."""
        boundary = self.costs.boundary_bytes[self.costs.key]
        if not self.framework.pipeline.allocates_every_receive:
            return np.where(self.table.pp > 1, 2 * boundary, 0.0)
        neighbours = (~self.stage.is_first).astype(float) + ~self.stage.is_last
        received = neighbours * self.table.num_microbatches
        return np.where(self.table.pp > 1, (received + self.in_flight * ~self.stage.is_last) * boundary, 0.0)

    @cached_property
    def num_logits(self) -> Floats:
        """Logits of one micro-batch on this rank: 0 away from the last stage."""
        tokens = self.table.tokens(self.workload.training.seq_length)
        logits = tokens * self.workload.logits_per_token(self.table.tp) * self.stage.is_last
        return np.asarray(logits if self.framework.loss.gathers_logits else logits / self.table.tp)

    @cached_property
    def head_kept_bytes(self) -> Floats:
        """The bytes that the head keeps of all micro-batches in flight, without those of the loss."""
        kept = self.costs.head_saved_bytes[self.costs.key] * self.stage.is_last
        return np.asarray(kept * self.head_in_flight)

    @cached_property
    def gradient_bytes(self) -> Floats:
        """The gradients while the last micro-batch's backward pass begins.

        Gradients that are freed after a step do not exist before the first backward pass. DDP's buckets do, and
        micro-batches add up beside them until the last one is reduced in them. FSDP's stage 1 adds up whole gradients
        in fp32; the others reduce after every micro-batch, and what the last reduction reads, that of the root or of
        an embedding alone, stays until the next one. Experts that are spread over ranks are in no buckets of DDP.
        """
        return self._gradient_bytes(at_end=False)

    @cached_property
    def final_gradient_bytes(self) -> Floats:
        """The gradients at the end of the last backward pass."""
        return self._gradient_bytes(at_end=True)

    def _gradient_bytes(self, *, at_end: bool) -> Floats:
        framework = self.framework
        each = self.workload.gradient_bytes(self.table.zero_stage)
        full = self.full_bytes
        if self.accumulates_apart:
            each = each + HALF
        whole = self.parameters * each
        before = self.has_earlier_gradients & (not at_end)
        is_ddp = self.is_replica & framework.storage.frees_gradients & ~self.averages_flat_copies
        stands = before | at_end | (not framework.storage.frees_gradients)
        bucketed = whole - self.spread_experts * each
        replicated = whole * stands + bucketed * (is_ddp & ~stands) + np.where(is_ddp & before, bucketed, 0.0)
        shard = whole * self.padding / self.shards
        last = np.where(self.embedding_alone > 0, self.embedding_alone, self.root_parameters - self.head_alone)
        kept = self.parameters * FP32 if framework.data_parallel.accumulates_whole else shard + last * full
        reduced = np.where(self.table.zero_stage == 1, whole, kept)
        fsdp = np.where(at_end, shard, np.where(before, reduced, 0.0))
        other = np.where(self.table.zero_stage >= 2, whole / self.shards, whole)
        # On their way to the host the shards of one unit at a time are here, which the reduction has anyway.
        sharded = np.where(self.offloads_parameters, 0.0, np.where(self.is_fsdp, fsdp, other))
        return np.where(self.sends_gradients, 0.0, np.where(self.table.zero_stage == 0, replicated, sharded))

    @cached_property
    def sends_gradients(self) -> Mask:
        """Plans whose gradients go to the host in buckets, where the optimizer is."""
        follows = self.framework.data_parallel.sharding.keeps_gradients_with_optimizer
        return np.asarray((self.table.offload != OffloadCode.NONE) & follows)

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
        copies = self.is_replica & self.framework.storage.frees_gradients
        of_experts = np.where(self.table.dp * self.table.cp > self.table.ep, self.spread_experts, 0.0)
        return np.where(copies, np.where(self.averages_flat_copies, self.parameters, of_experts) * self.full_bytes, 0.0)

    @cached_property
    def spread_experts(self) -> Floats:
        """The parameters of experts of this rank, where ranks share them out."""
        return np.where(self.table.ep > 1, self.stage.sum(self.costs, self.costs.expert_parameters), 0.0)

    @cached_property
    def splits_backward(self) -> Mask:
        """Plans whose rank makes the gradients of activations before those of weights: the first does both at once."""
        return np.asarray(self.is_zero_bubble & (self.stage.rank > 0))

    @cached_property
    def split_backward_bytes(self) -> Floats:
        """The gradients of outputs that one micro-batch keeps between the two halves of its backward pass, in bytes.

        Beside those of matmuls and norms it is what the stage sends back, and what the first half has computed again,
        which the second reads too: with full recompute the 16-bit copies of all weights are among it.
        """
        if not self.splits_backward.any():
            return np.zeros(len(self.table))
        head = self.costs.head_output_gradient_bytes[self.costs.key] * self.stage.is_last
        blocks = self.stage.sum(self.costs, self.costs.output_gradient_bytes)
        sent = self.costs.boundary_bytes[self.costs.key]
        again = self.stage.sum(self.costs, self.costs.recomputed_bytes)
        if self.framework.storage.is_autocast and self.is_mixed:
            copied = self.stage.sum(self.costs, self.costs.copied_parameters) * HALF
            again = again + np.where(run_again(self.workload, self.table) & (self.table.zero_stage == 0), copied, 0.0)
        return np.where(self.splits_backward, blocks + head + sent + again, 0.0)

    @cached_property
    def waiting_bytes(self) -> Floats:
        """Bytes of all micro-batches that wait for their second half while another one's first half begins.

        Rank i puts off those of i micro-batches (ZB-H1, Qi et al. 2024, figure 3).
        """
        return np.asarray(np.minimum(self.stage.rank, self.table.num_microbatches - 1) * self.split_backward_bytes)

    @cached_property
    def unfinished_bytes(self) -> Floats:
        """`waiting_bytes`, and gradients of weights of the last second half, which FSDP adds up in the next first."""
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
        """The bytes that a framework keeps through the whole step.

        Workspaces of matrix libraries, Transformer Engine's dummies, from ZeRO-2 on the bucket in which DeepSpeed
        gathers gradients to reduce, and what generates answers here.
        """
        framework, key = self.framework, self.costs.key
        dummies = self.costs.distinct_weight_parameters[key] * (HALF if framework.kernels.engine else 0)
        bucket = np.where((self.table.zero_stage >= 2) | self.sends_gradients, self.bucket_bytes, 0.0)
        generation = generation_of(self.workload)
        generates = generation.reserved_bytes if generation is not None and generation.is_shared else 0.0
        return np.asarray(matmul_workspace_bytes(self.workload) + dummies + bucket + generates)

    @cached_property
    def bucket_bytes(self) -> Floats:
        """One bucket of a framework that sends gradients, or parameters, in buckets of a fixed size."""
        elements = np.minimum(self.framework.data_parallel.sharding.bucket_elements, self.parameters)
        return np.where((self.table.zero_stage >= 1) | self.sends_gradients, elements * self.compute_bytes, 0.0)

    @cached_property
    def accumulates_apart(self) -> bool:
        """Whether gradients are accumulated in fp32 beside those that backward passes make."""
        framework = self.framework
        return framework.storage.accumulates_separately and self.is_mixed and framework.storage.gradient_bytes == FP32

    @cached_property
    def flat_step_bytes(self) -> Floats:
        """Flat copies of this rank's share of the gradients that a step makes, unless these are flat already.

        None on the GPU where the host makes the step.
        """
        each = 0.0 if self.accumulates_apart else self.framework.data_parallel.sharding.flat_step_bytes
        is_here = self.table.offload == OffloadCode.NONE
        share = self.parameters / self.state_shards
        at_once = np.minimum(share, self.framework.data_parallel.sharding.flat_step_elements)
        return np.where(is_here, np.where(self.table.zero_stage == 3, at_once, share) * each, 0.0)

    def candidate(
        self, *, parameters: Floats, gradients: Floats, activations: Floats, workspace: Floats
    ) -> StageMemory:
        """Return a peak candidate: beside what it names, the weights, the optimizer's state and what stands always."""
        found = StageMemory(
            parameter_bytes=self.weight_bytes + parameters,
            gradient_bytes=gradients,
            optimizer_state_bytes=self.optimizer_bytes,
            activation_bytes=activations,
            workspace_bytes=self.standing_workspace_bytes + workspace,
        )
        if self.workload.memory_correction is None:
            return found
        return StageMemory(*(part * self.error_factors for part in found))

    @cached_property
    def error_factors(self) -> Floats:
        """The factors that measured runs give for peaks."""
        return self.workload.memory_factors(self.table)
