"""Gradients of which every rank of `tp` has computed some, summed once the last micro-batch has gone through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from paraplan.runtime.structure.weights import local_shard


@dataclass(frozen=True)
class PartialGradients:
    """Parameters that the ranks of `group` hold whole, or in the same shards over `dp`, and their gradients in part."""

    parameters: Sequence[nn.Parameter] = ()
    group: dist.ProcessGroup | None = None

    def sum(self) -> None:
        """Put the sums over the group in place; they travel together, by type."""
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                local = parameter.grad if type(parameter.grad) is torch.Tensor else local_shard(parameter.grad)
                by_type.setdefault(local.dtype, []).append(local)
        for gradients in by_type.values():
            flat = torch.cat([one.reshape(-1) for one in gradients])
            dist.all_reduce(flat, group=self.group)
            for one, total in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
                one.copy_(total.view_as(one))
