"""Data parallelism: whole replicas (DDP), or optimizer state, gradients and parameters sharded over `dp` (ZeRO).

ZeRO-1, 2 and 3 (Rajbhandari et al. 2020) are one mechanism here, FSDP2's `fully_shard`, at three settings: each rank
keeps a shard of every parameter with its optimizer state, and
- ZeRO-1 gathers the parameters once for a step and reduces the gradients once, after the last micro-batch;
- ZeRO-2 gathers once and reduces the gradients into shards after every micro-batch;
- ZeRO-3 gathers each block for its forward and again for its backward pass, and frees it between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from paraplan.errors import ModelError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.sharding import sharded_dimension
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.data_parallel.reached_shards import ReachedShards, watch_shards
from paraplan.runtime.data_parallel.replica_reduction import ReplicaReduction
from paraplan.runtime.experts.layers import NO_EXPERTS, RankExperts
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import ReduceType, shard_precision
from paraplan.runtime.structure.blocks import sharded_alone
from paraplan.runtime.structure.meta import give_storage
from paraplan.runtime.structure.weights import is_quantized
from paraplan.runtime.torch_private import (
    MIXED_TENSORS,
    ignore_in_replicas,
)


@contextmanager
def gradient_sync(module: nn.Module, *, zero_stage: int, is_last: bool) -> Iterator[None]:
    """Surround the passes of a micro-batch through `module`, as `wrap_data_parallel` returned it.

    Under DDP and ZeRO-1 gradients travel in the last one of a step, under ZeRO-2 and 3 in each.
    """
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(is_last)
        if zero_stage == 1:
            module.set_requires_gradient_sync(is_last)
        if zero_stage < 3:
            module.set_reshard_after_backward(is_last)
    if not isinstance(module, DistributedDataParallel):
        yield
    elif not is_last:
        with module.no_sync():
            yield
    else:
        reductions = reductions_of(module)
        for reduction in reductions:
            reduction.begin()
        yield
        for reduction in reductions:
            reduction.complete()


@dataclass(frozen=True)
class Wrapping:
    """How a module of a rank is replicated or sharded.

    `blocks` are the modules inside it that are gathered one by one under ZeRO, and `ends` are layers around them that
    are too. The parameters `unsharded` stay whole under ZeRO; without `replicates` there is no DDP. The caller sums the
    gradients of both, and under DDP those of the `experts` that ranks share out; ZeRO shards these over the ranks that
    hold the same. `find_unused`: some parameters take no part in some steps, and these need not be the same on every
    rank. Gradients are summed in `reduce_dtype`.
    """

    blocks: Sequence[nn.Module]
    unsharded: frozenset[nn.Parameter] = frozenset()
    ends: Sequence[nn.Module] = ()
    experts: RankExperts = NO_EXPERTS
    replicates: bool = True
    find_unused: bool = False
    reduce_dtype: ReduceType = "fp32"


def wrap_data_parallel(module: nn.Module, wrapping: Wrapping, *, mesh: Mesh, precision: TrainingPrecision) -> nn.Module:
    """Move `module` to this rank's device and return what is to be called in its place.

    That is `module` itself, whole or sharded in place, or DDP around it.
    """
    plan, device = mesh.plan, mesh.world.device
    if plan.zero_stage:
        return _shard(module, wrapping, mesh, shard_precision(precision, wrapping.reduce_dtype))
    give_storage(module, device)
    module.to(device)
    if plan.devices_per_process > 1:
        return share_among_devices(module, range(plan.devices_per_process))
    is_trained = any(one.requires_grad for one in {*module.parameters()} - wrapping.experts.apart)
    if mesh.replica_mesh is None or not wrapping.replicates or not is_trained:
        return module
    return _replicate(module, wrapping, mesh)


def _shard(module: nn.Module, wrapping: Wrapping, mesh: Mesh, policy: MixedPrecisionPolicy) -> nn.Module:
    plan, device, experts = mesh.plan, mesh.world.device, wrapping.experts
    frees_parameters = plan.zero_stage == 3
    assert mesh.shard_mesh is not None
    options: dict[str, Any] = {
        "mesh": mesh.shard_mesh,
        "mp_policy": policy,
        "ignored_params": wrapping.unsharded | experts.absent,
    }
    if plan.tp == 1:  # the parts of a parameter that is split over tp are found by their rows
        options["shard_placement_fn"] = _placement(mesh.shard_mesh.size(-1))
    if plan.offload == "parameters":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    if mesh.expert_mesh is not None:
        copies = mesh.expert_mesh["copies"]
        of_experts = options | {"mesh": copies}
        if plan.tp == 1:
            of_experts["shard_placement_fn"] = _placement(copies.size())
        for expert in experts.modules:
            fully_shard(expert, reshard_after_forward=frees_parameters, **of_experts)
    for block in sharded_alone(module, wrapping.blocks):
        if any(True for _ in block.parameters()):
            fully_shard(block, reshard_after_forward=frees_parameters, **options)
    for end in wrapping.ends:
        # A head opens the backward pass: nothing is gained by freeing it before, as little as the rest of the root.
        fully_shard(end, reshard_after_forward=frees_parameters and isinstance(end, nn.Embedding), **options)
    fully_shard(module, reshard_after_forward=False, **options)
    # Backward passes in halves (zero bubble) go around what watches gradients.
    is_watched = wrapping.find_unused or plan.pp == 1
    _sum_gradients(module, with_unused=is_watched)
    if is_watched:
        watch_shards(module, mesh.replica_group, device, find_unused=wrapping.find_unused)
    give_storage(module, torch.device("cpu") if plan.offload == "parameters" else device)
    if plan.offload != "parameters":
        return module.to(device)
    for whole in (*module.buffers(), *wrapping.unsharded):
        whole.data = whole.to(device)
    return module


def _sum_gradients(module: nn.Module, *, with_unused: bool) -> None:
    """Have FSDP sum gradients, where by itself it takes their mean: the weights of micro-batches add up to 1.

    Where a rank lacks some it sums zeros (`with_unused`): others would be sent other sizes, of which gloo aborts the
    process.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
            if with_unused and hasattr(part, "set_reduce_scatter_unused_params"):  # torch 2.13
                part.set_reduce_scatter_unused_params(True, recurse=False)


def never_sharded(module: nn.Module, plan: ParallelPlan) -> frozenset[nn.Parameter]:
    """Return the parameters of `module` that stay whole under ZeRO: single numbers, and complex ones.

    Single numbers have no dimension to cut, and FSDP gathers no other type beside that of a module's first parameter.
    """
    held = module.parameters() if plan.zero_stage else ()
    return frozenset(parameter for parameter in held if not parameter.ndim or parameter.is_complex())


def share_among_devices(
    module: nn.Module, devices: Sequence[int], *, wrapper: Callable[..., nn.Module] = DataParallel
) -> nn.Module:
    """Return `module`, which is on the first of these GPUs, with its batches divided over all of them by one process.

    DataParallel copies the model to the other GPUs in every forward pass, and gathers the outputs on the first.
    """
    return wrapper(module, device_ids=[*devices], output_device=devices[0])


def _placement(num_shards: int) -> Callable[[nn.Parameter], Shard]:
    def place(parameter: nn.Parameter) -> Shard:
        return Shard(sharded_dimension(parameter.shape, num_shards))

    return place


def _replicate(module: nn.Module, wrapping: Wrapping, mesh: Mesh) -> DistributedDataParallel:
    """Wrap `module` in DDP over `dp` and `cp`. Buffers are equal from the start and are not sent in forward passes.

    torch's replicate on FSDP2 (2.13) computes the same gradients in 15 to 26 % more CPU time (two ranks, 6 blocks), and
    sums nothing for a parameter that a rank leaves out, without a word.
    """
    experts = wrapping.experts
    quantized = [name for name, one in module.named_parameters() if is_quantized(one)]  # equal already; DDP copies
    apart = [name for name, one in module.named_parameters() if one in experts.apart]
    ignore_in_replicas(module, [*quantized, *apart])
    # torch 2.13 renamed the option and warns about the old name.
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers": False
    }
    replicated = DistributedDataParallel(
        module,
        process_group=mesh.replica_group,
        gradient_as_bucket_view=True,
        find_unused_parameters=wrapping.find_unused and mesh.plan.pp > 1,
        **buffers,
    )
    assert mesh.replica_group is not None
    replicas = [one for one in module.parameters() if one.requires_grad and one not in experts.apart]
    reduction = ReplicaReduction(replicas, mesh.replica_group, wrapping.reduce_dtype)
    # Without annotations: torch compares them with its classes, and here they are texts.
    replicated.register_comm_hook(reduction, lambda state, bucket: state.sum(bucket))
    replicated.reduction = reduction  # type: ignore[assignment]
    return replicated


def complete_reductions(
    reductions: Sequence[ReplicaReduction | ReachedShards], of_all_ranks: Callable[[int], list[int]]
) -> None:
    """Have the replicas of a rank sum what the last micro-batch of a step has left out.

    Raises `ModelError` where some are still incomplete: on every rank of which `of_all_ranks` returns the numbers.
    """
    for reduction in reductions:
        reduction.complete()
        reduction.tell()
    if any(of_all_ranks(sum(not one.is_complete for one in reductions))):
        raise ModelError(
            "some parameters are not used in the last micro-batch of a step, but in earlier ones, and the replicas of "
            "a pipeline stage wait for all of them",
            hint="turn them off with requires_grad_(False), or use job.prepare(find_unused=True)",
        )


def reductions_of(*modules: nn.Module) -> tuple[ReplicaReduction | ReachedShards, ...]:
    """Return what sums the gradients of those of `modules` that are in DDP, or watches those of FSDP."""
    kinds = (DistributedDataParallel, FSDPModule)
    found = [getattr(module, "reduction", None) for module in modules if isinstance(module, kinds)]
    return tuple(one for one in found if isinstance(one, (ReplicaReduction, ReachedShards)))


def reads_shards(error: Exception) -> bool:
    """Whether torch raised `error` because code has computed with a shard as if it were the parameter."""
    return MIXED_TENSORS in str(error)
