"""Shards of ZeRO in a script's own code, with which torch would do otherwise than one process without a word.

FSDP2 goes on with the memory that it had where a script sets `parameter.data` or puts another parameter in its place,
and with the weights that a pass without gradients has gathered. Of DTensors `item()` of a norm is that of one shard,
and what is written into a row or a slice goes into a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paraplan.errors import UsageError
from paraplan.runtime.structure.weights import own_part
from paraplan.runtime.torch_private import (
    give_memory,
    set_shards_by,
    tell_numbers_of_shards_by,
    watch_views_of_copies,
)


class ScriptShards:
    """The `parameters` of `module` that FSDP2 divides, between the calls of an engine."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        names = {id(one): name for name, one in parameters.items() if isinstance(one, DTensor)}
        self._parts = [part for part in module.modules() if isinstance(part, FSDPModule)] if names else []
        self.free_gathered()
        self.are_in_hand = False
        """Whether a script has them, and not the engine."""
        self._places: list[tuple[nn.Module, str, torch.Tensor, str]] = [
            (owner, own_name, held, names[id(held)])
            for owner in (module.modules() if self._parts else ())
            for own_name, held in owner.named_parameters(recurse=False)
            if id(held) in names
        ]
        self.meshes = {held.device_mesh for *_, held, _ in self._places if isinstance(held, DTensor)}
        """Ranks that have parts of a parameter each."""
        if self._parts:
            module.register_forward_hook(lambda *_: self._end_pass())
            _LIVE.add(self)
            _attend()

    def _end_pass(self) -> None:
        if self.are_in_hand and not torch.is_grad_enabled():
            self.free_gathered()

    def free_gathered(self) -> None:
        """Let go what a pass without gradients has gathered: a script writes into shards."""
        for part in self._parts:
            part.reshard()

    def check(self) -> None:
        """Raise `UsageError` where a script has put another parameter in the place of a shard."""
        for owner, own_name, held, name in self._places:
            if getattr(owner, own_name, None) is not held:
                raise UsageError(
                    f"{name} is another object than in job.prepare: the optimizer and other ranks have that one",
                    hint="write into the parameter: with torch.no_grad(): parameter.copy_(values)",
                )

    def take(self, shard: DTensor) -> None:
        """Have FSDP gather `shard` from the memory that it has now."""
        for owner, _, held, _ in self._places:
            if held is shard:
                nn.Module.load_state_dict(owner, {}, strict=False)  # behind which FSDP looks for new memory


_LIVE: weakref.WeakSet[ScriptShards] = weakref.WeakSet()


@cache
def _attend() -> None:
    """Have torch ask what stands below, once in a process."""
    set_shards_by(_set)
    tell_numbers_of_shards_by(_check_number)
    watch_views_of_copies(_check_view)


@torch.no_grad()
def _set(shard: DTensor, values: torch.Tensor) -> None:
    """Do `shard.data = values`; these are shards alike, others, or whole."""
    if values.shape != shard.shape or values.dtype != shard.dtype:
        raise UsageError(
            f"data of {tuple(values.shape)} in {values.dtype} were given to a shard of {tuple(shard.shape)} in "
            f"{shard.dtype}",
            hint="give values of the same shape and type; the precision is chosen in job.prepare",
        )
    for one in _LIVE:
        one.free_gathered()
    give_memory(shard, own_part(values, shard).to(shard.device).contiguous())
    for one in _LIVE:
        one.take(shard)


def _check_number(number: DTensor) -> None:
    """Raise `UsageError` for a sum, a norm or an extreme over shards of which this rank has its part alone."""
    if any(placement.is_partial() for placement in number.placements):
        raise UsageError(
            "a number over a sharded tensor was read, and each rank has that of its shard alone",
            hint="call engine.whole(name, tensor) for the whole tensor first, on all ranks; the norm of all gradients "
            "is engine.grad_norm",
        )


def _check_view(mesh: DeviceMesh) -> None:
    """Raise `UsageError` where a script takes a part of a shard: a part of a copy, into which it may write."""
    if any(one.are_in_hand and mesh in one.meshes for one in _LIVE):
        raise UsageError(
            "rows or other parts were taken of a sharded tensor: torch copies it for that, and what is written is lost",
            hint="take them of engine.whole(name, tensor), on all ranks; engine.set_whole(name, values) writes",
        )
