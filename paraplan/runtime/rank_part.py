"""What one rank holds of a model, and what that depends on besides the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.data_parallel.block_order import BlockOrder, watch_blocks
from paraplan.runtime.data_parallel.reached_shards import ReachedShards
from paraplan.runtime.data_parallel.replica_reduction import ReplicaReduction
from paraplan.runtime.data_parallel.wrapping import wrap_data_parallel
from paraplan.runtime.experts.layers import NO_EXPERTS, ExpertLoad, RankExperts
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.optimizers.several import RankParameters
from paraplan.runtime.precision import ReduceType
from paraplan.runtime.recompute.blocks import recompute_blocks
from paraplan.runtime.recompute.policy import RecomputedBlocks, RecomputePolicy
from paraplan.runtime.shards.group import Shardings
from paraplan.runtime.split.forms import tensor_group
from paraplan.runtime.split.logits import VocabularyLogits, without_custom_functions
from paraplan.runtime.step.execution import Execution
from paraplan.runtime.step.global_batch import GlobalBatch
from paraplan.runtime.step.loss import LossFunction, StepLoss


@dataclass(frozen=True)
class RankPart:
    """What one rank holds of the model: the module, its parameters and buffers by their names in the whole model.

    `own_buffers` returns those that belong to the model's state. `repeated` names the parameters that an earlier
    pipeline stage holds too, and counts in the norm of the gradient. `shardings` names those of which
    ranks hold parts. `reductions` are those of DDP, which sums the gradients once every one of them is there.
    `orders` say which blocks are entered, where other ranks are to enter the same. `loads` are those of experts that
    ranks share out.
    """

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    own_buffers: Callable[[], dict[str, torch.Tensor]]
    execution: Execution
    repeated: frozenset[str] = frozenset()
    shardings: Shardings = field(default_factory=Shardings)
    reductions: tuple[ReplicaReduction | ReachedShards, ...] = ()
    orders: tuple[BlockOrder, ...] = ()
    model: nn.Module | None = None
    loads: tuple[ExpertLoad, ...] = ()

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers as they are now: code may have put others in their places."""
        return self.own_buffers()

    def optimized(self) -> RankParameters:
        """Return the parameters that an optimizer is made for.

        A rank that trains none of them (a stage of frozen blocks) has one without elements too, since optimizers refuse
        an empty list, and scripts give them those that need a gradient.
        """
        held = dict(self.parameters)
        if not any(parameter.requires_grad for parameter in held.values()):
            held[""] = nn.Parameter(torch.empty(0))
        return RankParameters(held)

    def forget_gradients(self) -> None:
        """Let go the gradients of all parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None


@dataclass(frozen=True)
class ParallelContext:
    """A plan on a mesh, in a precision, with the loss that is trained.

    `find_unused` says that parameters may take no part in some steps; `recompute` refines what the plan says of it.
    `compile_backend` is what torch.compile compiles blocks by, None where it does not. Gradients travel between
    replicas in `reduce_dtype`.
    """

    plan: ParallelPlan
    mesh: Mesh
    precision: TrainingPrecision
    loss: StepLoss
    find_unused: bool = False
    recompute: RecomputePolicy | None = None
    compile_backend: str | None = None
    reduce_dtype: ReduceType = "fp32"

    @classmethod
    def of(
        cls,
        plan: ParallelPlan,
        mesh: Mesh,
        precision: TrainingPrecision,
        loss_fn: LossFunction,
        *,
        find_unused: bool = False,
        recompute: RecomputePolicy | None = None,
        compile_backend: str | None = None,
        reduce_dtype: ReduceType = "fp32",
    ) -> ParallelContext:
        """Return the context of a training by `loss_fn`, which sees split outputs under tp and cp."""
        if plan.tp * plan.cp > 1:
            loss_fn = without_custom_functions(loss_fn)
        logits = VocabularyLogits(tensor_group(mesh)) if plan.tp > 1 else None
        loss = StepLoss(loss_fn, mesh.world.device, GlobalBatch(mesh), logits)
        loss.num_stages = plan.pp
        return cls(
            plan=plan,
            mesh=mesh,
            precision=precision,
            loss=loss,
            find_unused=find_unused,
            recompute=recompute,
            compile_backend=compile_backend,
            reduce_dtype=reduce_dtype,
        )

    @property
    def logits(self) -> VocabularyLogits:
        """The logits of this rank under tp."""
        assert self.loss.logits is not None
        return self.loss.logits


def wrap_module(
    module: nn.Module,
    blocks: list[nn.Module],
    parallel: ParallelContext,
    *,
    again: RecomputedBlocks,
    first: int = 0,
    unsharded: frozenset[nn.Parameter] = frozenset(),
    ends: Sequence[nn.Module] = (),
    experts: RankExperts = NO_EXPERTS,
    replicates: bool = True,
) -> nn.Module:
    """Return what is to be called in the place of `module`: the model or a stage of it, replicated or sharded.

    `again` says which of its `blocks`, the first of which has number `first`, run again in the backward pass. The
    parameters `unsharded` stay whole under ZeRO, and `ends` are gathered for themselves, as blocks are; so are the
    `experts` that ranks share out. Without `replicates` there is no DDP.
    """
    plan = parallel.plan
    recompute_blocks(
        [block for number, block in enumerate(blocks, first) if number in again.numbers],
        again.recompute,
        in_halves=plan.pipeline_schedule == "zero_bubble",
        are_all=plan.pp == 1,
        keeps=again.keeps,
        every_second=again.every_second,
    )
    called = wrap_data_parallel(
        module,
        blocks,
        plan=parallel.plan,
        mesh=parallel.mesh,
        precision=parallel.precision,
        unsharded=unsharded,
        ends=ends,
        experts=experts,
        replicates=replicates,
        find_unused=parallel.find_unused,
        reduce_dtype=parallel.reduce_dtype,
    )
    watch_blocks(module, blocks, plan, parallel.mesh)
    return called
