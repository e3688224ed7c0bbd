"""From a whole model to the pipeline stages of one rank: cut, split, sharded or replicated, and run by a schedule."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.stages import stage_blocks, stage_bounds
from paraplan.runtime.data.batches import call_model
from paraplan.runtime.data_parallel.block_order import orders_of
from paraplan.runtime.data_parallel.gradient_sums import gradient_sums
from paraplan.runtime.data_parallel.wrapping import never_sharded, reductions_of
from paraplan.runtime.experts.layers import RankExperts
from paraplan.runtime.pipeline.execution import LocalStage, PipelineExecution, find_ties, tied_gradients
from paraplan.runtime.pipeline.schedules import MULTI
from paraplan.runtime.pipeline.stages import CutStage, StageList, StageModule, check_stages, cut_stage
from paraplan.runtime.rank_part import ModelSplit, ParallelContext, RankPart, divide, wrap_module
from paraplan.runtime.recompute.blocks import AttentionSeen, no_attention
from paraplan.runtime.recompute.policy import RecomputedBlocks
from paraplan.runtime.shards.group import Shardings
from paraplan.runtime.split.context_check import take_tokens
from paraplan.runtime.structure.model_structure import BlockChain, ModelStructure
from paraplan.runtime.structure.weights import lasting_buffers


@dataclass(frozen=True)
class Stages:
    """The chain of a model's blocks, and the first and the last but one of each stage."""

    chain: BlockChain
    bounds: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Piece:
    """A stage of this rank.

    `names` maps the names of its parameters in the whole model to those in the stage, and `buffer_names` those of the
    buffers that it uses.
    """

    index: int
    module: StageModule
    blocks: list[nn.Module]
    names: Mapping[str, str]
    buffer_names: Mapping[str, str]
    shardings: Shardings
    experts: RankExperts
    partial: AbstractSet[str]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the whole model; others once the stage is sharded."""
        held = dict(self.module.model.named_parameters())
        return {name: held[own] for name, own in self.names.items()}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of the model's state that this stage uses, by their names in the whole model.

        Others have not the values of one process: the stage may compute them from zeros.
        """
        held = lasting_buffers(self.module.model)
        return {name: held[own] for name, own in self.buffer_names.items() if own in held}


def find_stages(structure: ModelStructure, plan: ParallelPlan, again: RecomputedBlocks) -> Stages:
    """Return where a model, which is whole, is cut; `again` are the blocks that run again in the backward pass.

    Raises `UnsupportedPlanError` where it cannot be.
    """
    structure.check_has_blocks(f"pp={plan.pp}", "to cut between")
    chain = structure.chain
    bounds = stage_bounds(stage_blocks(plan, len(structure.stack)))
    check_stages(chain, bounds, num_ranks=plan.pp)
    _check_repeatable(chain, plan, again)
    if again.recompute == "selective":
        _check_attention(structure)
    return Stages(chain, tuple(bounds))


def wrap_stages(model: nn.Module, whole: Stages, split: ModelSplit, parallel: ParallelContext) -> RankPart:
    """Return this rank's stages of `model`, which is changed in place."""
    plan, mesh, chain, bounds = parallel.plan, parallel.mesh, whole.chain, whole.bounds
    indices = range(mesh.coordinate("pp"), len(bounds), plan.pp)
    # Stages of one rank share their parameters, and each has the modules around them for itself.
    held = {id(parameter): parameter for parameter in model.parameters()}
    models = [model, *(copy.deepcopy(model, dict(held)) for _ in indices[1:])]
    pieces = [
        _cut_piece(part, chain, bounds, index, split, parallel) for part, index in zip(models, indices, strict=True)
    ]
    holders = Counter(parameter for piece in pieces for parameter in piece.parameters.values())
    shared = (parameter for parameter, count in holders.items() if count > 1)
    unsharded = frozenset(shared).union(*(never_sharded(piece.module, plan) for piece in pieces))
    by_schedule = plan.pipeline_schedule in MULTI
    stages = []
    for piece in pieces:
        first, end = bounds[piece.index]
        called = wrap_module(
            piece.module,
            piece.blocks,
            parallel,
            again=split.again,
            first=first,
            unsharded=unsharded,
            experts=piece.experts,
            replicates=not by_schedule,
        )
        if split.context is not None and parallel.loss.context is not None:
            take_tokens(piece.module.model, chain.stack.names[first:end], split.context, parallel.loss.context)
        averaged = by_schedule and plan.zero_stage == 0 and mesh.replica_group is not None
        apart = unsharded | piece.experts.apart
        alone = tuple(one for one in piece.parameters.values() if one not in apart) if averaged else ()
        stages.append(LocalStage(index=piece.index, module=piece.module, called=called, averaged=alone))
    return _rank_part(pieces, stages, chain=chain, bounds=bounds, parallel=parallel, unsharded=unsharded)


def _check_attention(structure: ModelStructure) -> None:
    """Raise where no block of the whole model has attention to run again; a stage may have none."""

    def attempt(tried: Any, _: object) -> bool:
        seen = AttentionSeen()
        with seen, torch.no_grad():
            call_model(structure.meta_model, tried)
        return seen.is_seen

    if not structure.run(attempt):
        raise no_attention(structure.stack.modules(structure.meta_model)[0])


def _check_repeatable(chain: BlockChain, plan: ParallelPlan, again: RecomputedBlocks) -> None:
    """Raise `UnsupportedPlanError` where blocks write what a second run of them, or ZeRO's hooks, would read."""
    if chain.writes_hidden and (plan.zero_stage or again.recompute != "none"):
        raise UnsupportedPlanError(
            f"blocks write in place into the hidden state that they are given, which zero_stage={plan.zero_stage} with "
            f"recompute={again.recompute} does not allow",
            hint="write hidden = hidden + change in the block, or use zero_stage=0 and recompute=none",
        )
    # A block that runs again has its own buffers as they were, and those alone.
    blocks = zip(chain.stack.names, chain.stack.modules(chain.meta_model), strict=True)
    own = {f"{name}.{buffer}" for name, block in blocks for buffer, _ in block.named_buffers()}
    foreign = chain.uses.written_inside - own
    if foreign and again.recompute == "full":
        raise UnsupportedPlanError(
            f"blocks write {min(foreign)}, which is not a buffer of theirs, and recompute=full would write it twice",
            hint="use recompute=none or selective",
        )


def _cut_piece(
    model: nn.Module,
    chain: BlockChain,
    bounds: Sequence[tuple[int, int]],
    index: int,
    split: ModelSplit,
    parallel: ParallelContext,
) -> _Piece:
    device = parallel.mesh.world.device
    start, end = bounds[index]
    has_last = index == len(bounds) - 1
    cut: CutStage = cut_stage(model, chain, start=start, end=end, device=device)
    names = {own: name for name, own in cut.names.items()}
    divided = divide(model, chain.stack.names[start:end], split, parallel, has_first=start == 0, has_last=has_last)
    module = StageModule(
        model,
        cut.inject,
        loss=parallel.loss,
        precision=parallel.precision,
        device=device,
    )
    return _Piece(
        index=index,
        module=module,
        blocks=chain.stack.modules(model)[start:end],
        names=cut.names,
        buffer_names=cut.buffers,
        shardings=Shardings(
            {names[own]: place for own, place in divided.shardings.tensor.items()},
            {names[own]: place for own, place in divided.shardings.expert.items()},
        ),
        experts=divided.experts,
        partial=cut.names.keys() & divided.partial,
    )


def _rank_part(
    pieces: Sequence[_Piece],
    stages: Sequence[LocalStage],
    *,
    chain: BlockChain,
    bounds: Sequence[tuple[int, int]],
    parallel: ParallelContext,
    unsharded: frozenset[nn.Parameter],
) -> RankPart:
    mesh = parallel.mesh
    parameters = {name: held for piece in pieces for name, held in piece.parameters.items()}
    ties = find_ties(chain, bounds, num_ranks=parallel.plan.pp)
    execution = PipelineExecution(
        stages,
        chain=chain,
        bounds=bounds,
        parallel=parallel,
        sums=gradient_sums(
            mesh,
            parallel.reduce_dtype,
            whole=[held for held in parameters.values() if held in unsharded],
            experts=[piece.experts for piece in pieces],
            partial=[held for piece in pieces for name, held in piece.parameters.items() if name in piece.partial],
        ),
        ties=tied_gradients(ties, parameters, mesh),
    )
    repeated = {tie.name for tie in ties if tie.ranks[0] != mesh.coordinate("pp")}
    modules = [piece.module for piece in pieces]
    _share_buffers(pieces)
    return RankPart(
        module=modules[0] if len(modules) == 1 else StageList(modules),
        model=modules[0].model,
        parameters=parameters,
        own_buffers=lambda: {name: value for piece in pieces for name, value in piece.buffers.items()},
        execution=execution,
        repeated=frozenset(repeated & parameters.keys()),
        shardings=Shardings(
            {name: sharding for piece in pieces for name, sharding in piece.shardings.tensor.items()},
            {name: sharding for piece in pieces for name, sharding in piece.shardings.expert.items()},
        ),
        reductions=reductions_of(*(stage.called for stage in stages)),
        orders=orders_of(*modules),
        loads=tuple(piece.experts.load for piece in pieces if parallel.plan.ep > 1),
    )


def _share_buffers(pieces: Sequence[_Piece]) -> None:
    """Let the stages of one rank hold one tensor for each buffer that several of them use: a checkpoint fills one."""
    first: dict[str, torch.Tensor] = {}
    for piece in pieces:
        for name, buffer in piece.buffers.items():
            if first.setdefault(name, buffer) is not buffer:
                path, _, own = piece.buffer_names[name].rpartition(".")
                setattr(piece.module.model.get_submodule(path), own, first[name])
