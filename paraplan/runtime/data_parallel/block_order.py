"""Whether ranks that compute every block together run the same blocks, in the same order.

Under ZeRO all ranks gather a block together, under tp and cp they compute it together. A rank that leaves a block out
(layer drop by its own random numbers), or takes another one (a choice by its own data), would have the weights or sums
of another block. The first passes in training are compared block by block, before anything is gathered; later ones by
a number that travels with the next call of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.runtime.data_parallel.reached_shards import ReachedShards
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.torch_private import FakeTensor, is_compiler_loaded

_COMPARED_PASSES = 4  # which wait for the device at every block
_MODULUS = 2**61 - 1


class BlockOrder:
    """The blocks that a rank enters in the forward passes of `module`, its model or a pipeline stage."""

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh) -> None:
        self._plan = plan = mesh.plan
        self._device = mesh.world.device
        groups = (mesh.group("tp"), mesh.replica_group if plan.zero_stage or plan.ep > 1 else mesh.group("cp"))
        self._groups = [group for group in groups if group is not None]
        self._is_inside = False
        self._num_left = _COMPARED_PASSES
        self._digest = 0
        sharded = [part for part in module.modules() if isinstance(part, FSDPModule) and part is not module]
        parts = list(dict.fromkeys([*blocks, *sharded]))
        paths = {id(part): path for path, part in module.named_modules()}
        # A stage of a pipeline holds the model as its `model`.
        own = [paths[id(part)].removeprefix("model." if plan.pp > 1 else "") for part in parts]
        self._names = ["none of the blocks that are left", *own]
        disabled: Any = torch.compiler.disable if is_compiler_loaded() else lambda hook: hook
        for place, part in enumerate(parts, 1):
            part.register_forward_pre_hook(disabled(partial(self._enter, place)), prepend=True)  # before that of FSDP
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end, always_call=True, prepend=True)  # before what refuses a rank's own pass

    def restart(self) -> None:
        """Compare block by block in the passes that follow: trials before had the same data on all ranks."""
        self._num_left = _COMPARED_PASSES

    def take_digest(self) -> int:
        """Return a number for the blocks entered since this was last called: the same for the same ones."""
        digest, self._digest = self._digest, 0
        return digest

    def _begin(self, module: nn.Module, _: Any) -> None:
        self._is_inside = True
        self._num_left -= module.training and torch.is_grad_enabled()

    def _enter(self, place: int, *_: Any) -> None:
        if not self._is_inside:  # a block that runs again in the backward pass
            return
        self._digest = (self._digest * 1_000_003 + place) % _MODULUS
        if self._num_left >= 0:
            self._compare(place)

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        was_inside, self._is_inside = self._is_inside, False
        if was_inside and self._num_left >= 0 and output is not None:  # None: it has raised
            self._compare(0)

    def _compare(self, place: int) -> None:
        """Raise `UnsupportedPlanError` on every rank where one is at another place; done in the first passes."""
        bounds = torch.tensor([place, -place], device=self._device)
        if isinstance(bounds, FakeTensor):
            return
        for group in self._groups:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        last, first = bounds.tolist()
        if last != -first:
            raise _other_blocks(
                self._plan, f"in one forward pass ranks enter {self._names[-first]} and {self._names[last]}"
            )


class BlockOrders:
    """All that one rank enters and reaches, compared with those that compute the same blocks with it."""

    def __init__(self, orders: Sequence[BlockOrder | ReachedShards], mesh: Mesh) -> None:
        self._orders = orders
        self._plan = plan = mesh.plan
        axes: list[Axis] = ["pp"] if plan.zero_stage or plan.ep > 1 else ["pp", "dp"]
        places = [mesh.grid.coordinates(rank) for rank in range(mesh.world.size)]
        self._first: dict[tuple[int, ...], int] = {}
        self._with = [
            self._first.setdefault(tuple(place[axis] for axis in axes), rank) for rank, place in enumerate(places)
        ]

    def take_digest(self) -> int:
        """Return a number for the blocks that this rank has entered since this was last called."""
        return sum(order.take_digest() for order in self._orders) % _MODULUS

    def check(self, digests: Sequence[int]) -> None:
        """Raise `UnsupportedPlanError` where ranks that run together have other numbers; all ranks have `digests`."""
        for rank, (first, digest) in enumerate(zip(self._with, digests, strict=True)):
            if digest != digests[first]:
                raise _other_blocks(
                    self._plan, f"ranks {first} and {rank} have run other blocks in the last call, or trained others"
                )


def _other_blocks(plan: ParallelPlan, found: str) -> UnsupportedPlanError:
    axes = [f"zero_stage={plan.zero_stage}"] if plan.zero_stage else []
    axes += [f"{axis}={size}" for axis, size in (("tp", plan.tp), ("cp", plan.cp), ("ep", plan.ep)) if size > 1]
    return UnsupportedPlanError(
        f"{found}, and with {', '.join(axes)} they compute every block together",
        hint="turn off what leaves blocks out (layerdrop) or chooses them by a rank's own data or random numbers, use "
        "a plan of dp alone with zero_stage=0 (DDP), or job.prepare(find_unused=True) for layers inside of blocks",
    )


def watch_blocks(module: Any, blocks: Sequence[nn.Module], mesh: Mesh) -> None:
    """Have `orders_of` find what `module` enters, where other ranks are to enter the same."""
    plan = mesh.plan
    if (plan.zero_stage and plan.dp * plan.cp > 1) or plan.tp * plan.cp * plan.ep > 1:
        module.block_order = BlockOrder(module, blocks, mesh)


def orders_of(*modules: nn.Module) -> tuple[BlockOrder, ...]:
    """Return what watches those of `modules` that are watched."""
    found = [getattr(module, "block_order", None) for module in modules]
    return tuple(one for one in found if isinstance(one, BlockOrder))
