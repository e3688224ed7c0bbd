"""The part of a model that one rank holds, and the things that it depends on besides the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision, TrainingSpec
from paraplan.runtime.data_parallel.block_order import BlockOrder, watch_blocks
from paraplan.runtime.data_parallel.reached_shards import ReachedShards
from paraplan.runtime.data_parallel.replica_reduction import ReplicaReduction
from paraplan.runtime.data_parallel.wrapping import Wrapping, wrap_data_parallel
from paraplan.runtime.experts.layers import NO_EXPERTS, ExpertLayer, ExpertLoad, RankExperts
from paraplan.runtime.experts.share import share_experts
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.optimizers.several import RankParameters
from paraplan.runtime.precision import ReduceType
from paraplan.runtime.recompute.blocks import recompute_blocks
from paraplan.runtime.recompute.host_activations import offload_activations
from paraplan.runtime.recompute.policy import RecomputedBlocks, RecomputePolicy
from paraplan.runtime.recompute.tiles import find_feed_forward, run_in_tiles
from paraplan.runtime.shards.group import Shardings
from paraplan.runtime.split.context_check import ContextSplit, apply_split
from paraplan.runtime.split.forms import tensor_group
from paraplan.runtime.split.logits import VocabularyLogits, without_custom_functions
from paraplan.runtime.split.tensor_parallel import TensorSplit, apply_tensor_split
from paraplan.runtime.step.chunked_loss import compute_loss_in_chunks, find_heads
from paraplan.runtime.step.execution import Execution
from paraplan.runtime.step.global_batch import GlobalBatch
from paraplan.runtime.step.loss import LossFunction, StepLoss
from paraplan.runtime.structure.model_structure import ModelStructure


@dataclass(frozen=True)
class RankPart:
    """The part of the model that one rank holds: the module, its parameters and buffers by names in the whole model.

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
    """The mesh of a plan, a precision, and the loss that is trained.

    `find_unused` says that parameters may take no part in some steps; `recompute` refines what the plan says of it.
    `compile_backend` is what torch.compile compiles blocks by, None where it does not. Gradients travel between
    replicas in `reduce_dtype`. Of the `training` that the plan was made for options of the model's code are taken.
    Raises `UnsupportedPlanError` where they do not go with others.
    """

    mesh: Mesh
    precision: TrainingPrecision
    loss: StepLoss
    find_unused: bool = False
    recompute: RecomputePolicy | None = None
    compile_backend: str | None = None
    reduce_dtype: ReduceType = "fp32"
    training: TrainingSpec | None = None

    def __post_init__(self) -> None:
        if self.chunks_loss and self.find_unused:
            raise UnsupportedPlanError(
                "loss=chunked, find_unused=True: DDP looks for unused parameters by the logits, which are not there",
                hint="use a plan with the plain loss, or leave find_unused out",
            )
        if self.offloads_activations and self.compile_backend is not None:
            raise UnsupportedPlanError(
                f"offloads_activations=True, compile_backend={self.compile_backend}: what compiled blocks keep is the "
                "compiler's choice",
                hint="use a plan that keeps activations on the GPU, or one that is not compiled",
            )
        if self.mlp_tile is not None and self.compile_backend is not None:
            raise UnsupportedPlanError(
                f"mlp_tile={self.mlp_tile}, compile_backend={self.compile_backend}: tiles run again in the backward "
                "pass, which compiled blocks have compiled",
                hint="use a plan without tiles, or one that is not compiled",
            )

    @property
    def chunks_loss(self) -> bool:
        """Whether the loss is computed in chunks of tokens."""
        return self.training is not None and self.training.loss == "chunked"

    @property
    def mlp_tile(self) -> int | None:
        """In how many tokens at a time feed-forward layers work, None for all."""
        return None if self.training is None else self.training.stack.mlp_tile

    @property
    def offloads_activations(self) -> bool:
        """Whether those of blocks wait in the host's memory."""
        return self.training is not None and self.training.offloads_activations

    @property
    def plan(self) -> ParallelPlan:
        """The plan that is run."""
        return self.mesh.plan

    @property
    def logits(self) -> VocabularyLogits:
        """The logits of this rank under tp."""
        assert self.loss.logits is not None
        return self.loss.logits


def step_loss(loss_fn: LossFunction, mesh: Mesh) -> StepLoss:
    """Return the loss of steps by `loss_fn`, which sees split outputs under tp and cp."""
    plan = mesh.plan
    logits = VocabularyLogits(tensor_group(mesh)) if plan.tp > 1 else None
    loss_fn = without_custom_functions(loss_fn) if plan.tp * plan.cp > 1 else loss_fn
    loss = StepLoss(loss_fn, mesh.world.device, GlobalBatch(mesh), logits)
    loss.num_stages = plan.pp
    return loss


def find_chunked(structure: ModelStructure, parallel: ParallelContext) -> tuple[str, ...]:
    """Return the names of the feed-forward layers that work in tiles, and of the heads whose loss is in chunks."""
    names = structure.stack.names if structure.has_blocks else ()
    tiled = () if parallel.mlp_tile is None else find_feed_forward(structure, parallel.mlp_tile)
    return (*tiled, *(find_heads(structure.meta_model, names) if parallel.chunks_loss else ()))


@dataclass(frozen=True)
class ModelSplit:
    """How a model, which is whole, is to be divided: found before anything of it changes.

    `again` are the blocks that run again in the backward pass, `tensor` says how layers are split over `tp`, `context`
    how blocks run over `cp`, `layers` which experts ranks of `ep` share out, `chunked` what `find_chunked` has found.
    """

    again: RecomputedBlocks
    tensor: TensorSplit | None = None
    context: ContextSplit | None = None
    layers: Mapping[str, ExpertLayer] = field(default_factory=dict)
    chunked: Sequence[str] = ()


@dataclass(frozen=True)
class Divided:
    """The parts left to a rank: cuts of parameters by their names, its experts, and the parameters in `partial`.

    Gradients of these are computed in part by every rank of `tp`.
    """

    shardings: Shardings
    experts: RankExperts
    partial: frozenset[str]


def divide(
    model: nn.Module,
    names: Sequence[str],
    split: ModelSplit,
    parallel: ParallelContext,
    *,
    has_first: bool = True,
    has_last: bool = True,
) -> Divided:
    """Leave this rank's parts in `model`, or in a stage of it that holds the blocks `names` and these ends."""
    experts, plan = NO_EXPERTS, parallel.plan
    if split.layers:
        experts = share_experts(model, split.layers, parallel.mesh, are_gathered=plan.zero_stage > 0)
    in_halves = plan.pipeline_schedule == "zero_bubble"
    group = tensor_group(parallel.mesh, keeps_products=split.again.keeps is not None, in_halves=in_halves)
    shardings, partial = {}, frozenset[str]()
    if split.tensor is not None:
        shardings = apply_tensor_split(model, split.tensor, names, group, parallel.logits)
        partial = split.tensor.partial(names)
    inside = tuple(f"{name}." for name in names)
    for name in split.chunked:
        module = model.get_submodule(name)
        if name.startswith(inside) and parallel.mlp_tile is not None:
            run_in_tiles(module, parallel.mlp_tile, group if plan.sequence_parallel else None)
        elif isinstance(module, nn.Linear):  # in the last stage
            compute_loss_in_chunks(module, parallel.loss)
    if split.context is not None and parallel.loss.context is not None:
        ends = {"has_first": has_first, "has_last": has_last}
        shared = group if plan.sequence_parallel else None
        apply_split(
            model, names, split.context, parallel.loss.context, **ends, backend=parallel.compile_backend, group=shared
        )
    return Divided(Shardings(shardings, experts.shardings), experts, partial)


def wrap_module(
    module: nn.Module, wrapping: Wrapping, parallel: ParallelContext, *, again: RecomputedBlocks, first: int = 0
) -> nn.Module:
    """Return what is to be called in the place of `module`: the model or a stage of it, replicated or sharded.

    `again` says which of its blocks, the first of which has number `first`, run again in the backward pass.
    """
    plan, blocks = parallel.plan, wrapping.blocks
    in_halves = plan.pipeline_schedule == "zero_bubble"
    recompute_blocks(blocks, again, first=first, in_halves=in_halves, are_all=plan.pp == 1)
    if parallel.offloads_activations:
        offload_activations(blocks, parallel.mesh.world.device)
    wrapping = replace(wrapping, find_unused=parallel.find_unused, reduce_dtype=parallel.reduce_dtype)
    called = wrap_data_parallel(module, wrapping, mesh=parallel.mesh, precision=parallel.precision)
    watch_blocks(module, blocks, parallel.mesh)
    return called
