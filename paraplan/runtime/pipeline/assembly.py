"""From a whole model to the pipeline stages of one rank: cut, split, sharded or replicated, and run by a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from paraplan.runtime.data_parallel.wrapping import Wrapping, never_sharded, reductions_of
from paraplan.runtime.pipeline.execution import LocalStage, PipelineExecution, find_ties, tied_gradients
from paraplan.runtime.pipeline.schedules import MULTI
from paraplan.runtime.pipeline.stages import CutStage, StageList, StageModule, check_stages, cut_stage
from paraplan.runtime.rank_part import ModelSplit, ParallelContext, RankPart, divide, wrap_module
from paraplan.runtime.recompute.blocks import AttentionSeen, no_attention
from paraplan.runtime.recompute.policy import RecomputedBlocks
from paraplan.runtime.shards.group import Shardings
from paraplan.runtime.split.context_check import take_tokens
from paraplan.runtime.structure.copies import copy_of
from paraplan.runtime.structure.model_structure import BlockChain, ModelStructure


@dataclass(frozen=True)
class Stages:
    """The chain of a model's blocks, and the first and the last but one of each stage."""

    chain: BlockChain
    bounds: tuple[tuple[int, int], ...]


def find_stages(structure: ModelStructure, plan: ParallelPlan, again: RecomputedBlocks) -> Stages:
    """Return where a model, which is whole, is cut; `again` are the blocks that run again in the backward pass.

    Raises `UnsupportedPlanError` where it cannot be.
    """
    structure.check_has_blocks(f"pp={plan.pp}", "to cut between")
    chain = structure.chain
    bounds = stage_bounds(stage_blocks(plan, len(structure.stack)))
    check_stages(chain, bounds, num_ranks=plan.pp)
    if any(chain.carried) and plan.tp * plan.cp > 1:
        raise UnsupportedPlanError(
            f"pp={plan.pp} beside tp={plan.tp}, cp={plan.cp}: blocks return more than their hidden state for the next, "
            "of which ranks would have parts",
            hint="use pp with dp alone, or tp or cp without pp, for this model",
        )
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
    models = [model, *(copy_of(model, held) for _ in indices[1:])]
    stages = [_cut(part, whole, index, split, parallel) for part, index in zip(models, indices, strict=True)]
    holders = Counter(parameter for stage in stages for parameter in stage.parameters.values())
    shared = (parameter for parameter, count in holders.items() if count > 1)
    unsharded = frozenset(shared).union(*(never_sharded(stage.module, plan) for stage in stages))
    by_schedule = plan.pipeline_schedule in MULTI
    for stage in stages:
        first, end = bounds[stage.index]
        wrapping = Wrapping(stage.blocks, unsharded, experts=stage.experts, replicates=not by_schedule)
        stage.called = wrap_module(stage.module, wrapping, parallel, again=split.again, first=first)
        if split.context is not None and parallel.loss.context is not None:
            take_tokens(stage.module.model, chain.stack.names[first:end], split.context, parallel.loss.context)
        averaged = by_schedule and plan.zero_stage == 0 and mesh.replica_group is not None
        apart = unsharded | stage.experts.apart
        stage.averaged = tuple(one for one in stage.parameters.values() if one not in apart) if averaged else ()
    return _rank_part(stages, whole, parallel, unsharded)


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


def _cut(model: nn.Module, whole: Stages, index: int, split: ModelSplit, parallel: ParallelContext) -> LocalStage:
    chain, bounds = whole.chain, whole.bounds
    device = parallel.mesh.world.device
    start, end = bounds[index]
    has_last = index == len(bounds) - 1
    cut: CutStage = cut_stage(model, chain, start=start, end=end, device=device)
    names = {own: name for name, own in cut.names.items()}
    blocks = chain.stack.modules(model)[start:end]
    carried = chain.carried[end - 1] if not has_last else ()
    module = StageModule(model, cut.inject, parallel, carried)
    if carried:
        blocks[-1].register_forward_hook(module.keep_output)
    divided = divide(model, chain.stack.names[start:end], split, parallel, has_first=start == 0, has_last=has_last)
    return LocalStage(
        index=index,
        module=module,
        blocks=blocks,
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
    stages: Sequence[LocalStage], whole: Stages, parallel: ParallelContext, unsharded: frozenset[nn.Parameter]
) -> RankPart:
    mesh = parallel.mesh
    parameters = {name: held for stage in stages for name, held in stage.parameters.items()}
    ties = find_ties(whole.chain, whole.bounds, num_ranks=parallel.plan.pp)
    execution = PipelineExecution(
        stages,
        chain=whole.chain,
        bounds=whole.bounds,
        parallel=parallel,
        sums=gradient_sums(
            mesh,
            parallel.reduce_dtype,
            whole=[held for held in parameters.values() if held in unsharded],
            experts=[stage.experts for stage in stages],
            partial=[held for stage in stages for name, held in stage.parameters.items() if name in stage.partial],
        ),
        ties=tied_gradients(ties, parameters, mesh),
    )
    repeated = {tie.name for tie in ties if tie.ranks[0] != mesh.coordinate("pp")}
    modules = [stage.module for stage in stages]
    _share_buffers(stages)
    return RankPart(
        module=modules[0] if len(modules) == 1 else StageList(modules),
        model=modules[0].model,
        parameters=parameters,
        own_buffers=lambda: {name: value for stage in stages for name, value in stage.buffers.items()},
        execution=execution,
        repeated=frozenset(repeated & parameters.keys()),
        shardings=Shardings(
            {name: sharding for stage in stages for name, sharding in stage.shardings.tensor.items()},
            {name: sharding for stage in stages for name, sharding in stage.shardings.expert.items()},
        ),
        reductions=reductions_of(*(stage.called for stage in stages)),
        orders=orders_of(*modules),
        loads=tuple(stage.experts.load for stage in stages if parallel.plan.ep > 1),
    )


def _share_buffers(stages: Sequence[LocalStage]) -> None:
    """Let the stages of one rank hold one tensor for each buffer that several of them use: a checkpoint fills one."""
    first: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, buffer in stage.buffers.items():
            if first.setdefault(name, buffer) is not buffer:
                path, _, own = stage.buffer_names[name].rpartition(".")
                setattr(stage.module.model.get_submodule(path), own, first[name])
