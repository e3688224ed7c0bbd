"""Which parameters of a sharded model the backward passes of a step reach, on any rank."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class ReachedShards:
    """Takes away the zeros that FSDP sums for parameters that no rank has reached, as in one process.

    FSDP has zeros where a rank lacks a gradient, so that all ranks sum the same. It is one of `reductions_of`. Ranks
    tell each other what they have reached where they may differ (`find_unused`); else a number for it travels with the
    next call of the engine, as that for blocks does.
    """

    is_complete = True

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, device: torch.device, *, find_unused: bool) -> None:
        self._is_told = find_unused
        self._digest = 0
        self._parameters = dict(module.named_parameters())
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        self._names = {name: first[id(one)] for name, one in module.named_parameters(remove_duplicate=False)}
        self._places = {name: place for place, name in enumerate(self._parameters)}
        self._reached = bytearray(len(self._places))
        self._watched: dict[int, nn.Parameter] = {}
        self._complete: set[str] = set()
        self._group = group
        self._device = device
        for path, part in module.named_modules():
            if isinstance(part, FSDPModule) and isinstance(part, nn.Module):
                part.register_forward_pre_hook(lambda part, _, path=path: self._watch(part, path))

    def _watch(self, part: nn.Module, path: str) -> None:
        """Note when gradients reach the parameters that `part` has gathered; they stay the same objects."""
        if path in self._complete:
            return
        lacking = 0
        for name, parameter in part.named_parameters():
            lacking += isinstance(parameter, DTensor) and parameter.requires_grad
            if isinstance(parameter, DTensor) or not parameter.requires_grad or id(parameter) in self._watched:
                continue
            place = self._places[self._names[f"{path}.{name}".lstrip(".")]]
            hooked: Any = parameter  # torch's annotations lack the hook
            hooked.register_post_accumulate_grad_hook(lambda _, place=place: self._note(place))
            self._watched[id(parameter)] = parameter
        if not lacking:
            self._complete.add(path)

    def _note(self, place: int) -> None:
        self._reached[place] = 1

    def begin(self) -> None:
        """Forget what earlier steps have reached."""
        self._reached = bytearray(len(self._places))

    def complete(self) -> None:
        """Do nothing: FSDP has zeros for what the backward pass has not reached."""

    def leave_out(self, parameters: Collection[nn.Parameter]) -> None:
        """Do nothing: parameters that stages share are not sharded."""

    def tell(self) -> None:
        """Do nothing: ranks tell each other in `drop_unused`."""

    def drop_unused(self) -> None:
        """Take away the gradients of parameters that no rank has reached; every rank calls it."""
        reached = [*self._reached]
        if self._is_told:
            anywhere = torch.tensor(reached, dtype=torch.uint8, device=self._device)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._group)
            reached = anywhere.tolist()
        else:
            self._digest = zlib.crc32(self._reached, self._digest)
        for parameter, is_reached in zip(self._parameters.values(), reached, strict=True):
            if not is_reached:
                parameter.grad = None

    def take_digest(self) -> int:
        """Return a number for what this rank has reached since this was last called."""
        digest, self._digest = self._digest, 0
        return digest


def watch_shards(module: Any, group: dist.ProcessGroup | None, device: torch.device, *, find_unused: bool) -> None:
    """Have `reductions_of` find what `module`, which is sharded, reaches in a step."""
    if group is not None:
        module.reduction = ReachedShards(module, group, device, find_unused=find_unused)
