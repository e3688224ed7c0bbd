"""State that a rank of a pipeline stage holds from step to step, and the part that ZeRO gathers for its use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from paraplan.cost.blocks.costs import BlockCosts
from paraplan.cost.communication.data_parallel import frozen_expert_bytes, sharded_parameters
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.memory.optimizers import OptimizerStates, optimizer_states
from paraplan.cost.memory.overheads import gathered_frozen_bytes, optimizer_shards, root_frozen_bytes, shard_padding
from paraplan.cost.memory.parts import FP32, HALF
from paraplan.cost.pipeline.stages import StageBlocks, chunk_in_flight, mean_in_flight, one_chunk_in_flight
from paraplan.cost.plan_table import Floats, Mask, OffloadCode, PlanTable, ScheduleCode
from paraplan.cost.workload import Workload


@dataclass(frozen=True, eq=False)
class RankState:
    """Weights, their shards and the optimizer's state. Bytes of one rank, one entry a plan.

    `chunks_in_flight` is `[V, N]`, the micro-batches of each virtual chunk whose activations a rank keeps, `in_flight`
    their mean, and `head_in_flight` those of the last chunk, where the head is.
    `parameters` and `root_parameters` count the stage's that train and those outside of blocks; `frozen_bytes` and
    `root_frozen_bytes` are the bytes of those that do not, `frozen_shard_bytes` those of a rank's shard, where ZeRO
    makes any. `state_bytes` is the whole optimizer state, `state_shards` the ranks over which it is divided, and
    `padding` how much larger than an even share the shards of the first rank are.
    """

    workload: Workload
    table: PlanTable
    costs: BlockCosts
    stage: StageBlocks
    states: OptimizerStates
    parameters: Floats
    root_parameters: Floats
    frozen_bytes: Floats
    frozen_shard_bytes: Floats
    root_frozen_bytes: Floats
    state_bytes: Floats
    shards: Floats
    state_shards: Floats
    chunks_in_flight: Floats
    in_flight: Floats
    head_in_flight: Floats
    padding: Floats

    @classmethod
    def of(cls, workload: Workload, table: PlanTable, costs: BlockCosts, stage: StageBlocks) -> Self:
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
        frozen = np.asarray(stage.sum(costs, costs.frozen_bytes) + ends)
        return cls(
            workload=workload,
            table=table,
            costs=costs,
            stage=stage,
            states=states,
            parameters=np.asarray(blocks + embedding + head),
            root_parameters=np.asarray(embedding + head - costs.tower_parameters[key] * stage.is_first),
            frozen_bytes=frozen,
            frozen_shard_bytes=sharded_parameters(table, frozen, frozen_expert_bytes(table, costs, stage)),
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
        is_pure = self.workload.training.precision == "bf16-pure"
        return HALF if is_pure else FP32

    @cached_property
    def is_fsdp(self) -> Mask:
        """Plans whose shards FSDP gathers, at any ZeRO stage."""
        return np.asarray((self.table.zero_stage >= 1) & self.framework.data_parallel.sharding.is_fsdp)

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
        whole = self.parameters * each + self.frozen_bytes
        shard = (self.parameters * each / self.shards + self.frozen_shard_bytes) * self.padding
        own = np.where(is_sharded, np.where(self.offloads_parameters, 0.0, shard), whole)
        return np.asarray(own + self.reference_bytes)

    @cached_property
    def reference_bytes(self) -> Floats:
        """A reference model beside the one that trains, in the type that matmuls compute in; ZeRO-3 shards it too."""
        if not self.workload.training.copies_reference:
            return np.zeros(len(self.table))
        trained = self.parameters * self.compute_bytes
        shard = trained / self.shards + self.frozen_shard_bytes
        return np.where(self.table.zero_stage == 3, shard, trained + self.frozen_bytes)

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
        """Parameters of embeddings that FSDP gathers for their own passes; 0 where they are part of the root.

        Where the head's matrix is one of them it stays in the root, and others (of positions) may not.
        """
        end = self.costs.embedding_parameters[self.costs.key] * self.stage.is_first
        if self.workload.model.tied_embeddings:
            end = np.maximum(end - self.costs.tied_parameters[self.costs.key], 0.0)
        return self._alone(end)

    @cached_property
    def head_alone(self) -> Floats:
        """Parameters of a head that FSDP gathers for its own passes; 0 where it is part of the root."""
        head = self.costs.head_parameters[self.costs.key] * self.stage.is_last
        return self._alone(np.where(self.workload.model.tied_embeddings, 0.0, head))

    def _alone(self, end: Floats) -> Floats:
        if not self.framework.data_parallel.wraps_embedding_and_head:
            return np.zeros(len(self.table))
        is_alone = self.is_fsdp & (self.table.pp == 1) & (end >= self.block_parameters)
        return np.where(is_alone, end, 0.0)

    @cached_property
    def gathered_root_bytes(self) -> Floats:
        """The bytes that ZeRO has gathered while no block is in use, nor an end that is gathered alone."""
        return self.gathered_bytes(num_blocks=0)

    @cached_property
    def gathered_head_bytes(self) -> Floats:
        """Bytes of gathered parameters while the head is in use."""
        return self.gathered_bytes(num_blocks=0, end=self.head_alone)

    @cached_property
    def gathered_embedding_bytes(self) -> Floats:
        """Bytes of gathered parameters while the embedding is in use."""
        return self.gathered_bytes(num_blocks=0, end=self.embedding_alone)

    @cached_property
    def gathered_blocks_bytes(self) -> Floats:
        """Bytes of gathered parameters while a block is in use, beside which the next one is gathered."""
        return self.gathered_bytes(num_blocks=2)

    def gathered_bytes(self, *, num_blocks: int, end: Floats | float = 0.0) -> Floats:
        """Return what ZeRO has gathered while `num_blocks` blocks and the parameters of an `end` alone are in use.

        Frozen weights are gathered as they are stored. FSDP's stages 1 and 2 gather all for a step; stage 3 blocks as
        they are used, what is left for a whole pass. Other ZeRO-3 gathers the largest unit and its successor, and lets
        go of what exceeds a limit.
        """
        root = self.root_parameters - self.embedding_alone - self.head_alone
        units = root + end + num_blocks * self.block_parameters * self.workload.training.gathered_share
        if not self.framework.data_parallel.sharding.is_fsdp:
            units = np.maximum(
                2 * np.maximum(self.block_parameters, self.root_parameters),
                self.framework.data_parallel.sharding.max_live_elements,
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
