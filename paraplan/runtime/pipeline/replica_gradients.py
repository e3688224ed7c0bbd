"""Gradients of whole replicas of a pipeline stage, summed over `dp` once the last micro-batch has gone through it.

DDP does this by hooks on the accumulation of gradients. A schedule that takes the backward pass in two halves (zero
bubble) goes around these hooks, and a parameter that two stages of one rank hold cannot belong to two replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

_BUCKET_BYTES = 25 * 2**20  # that of DDP


@dataclass
class ReplicaGradients:
    """Sums the gradients of parameters over `group`; without a group there is one replica and nothing to do.

    `started` ones travel while other stages compute. A missing gradient counts as 0, so that all replicas send alike.
    """

    group: dist.ProcessGroup | None
    _travelling: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Send the gradients of `parameters`, which are complete on this rank."""
        if self.group is None:
            return
        for bucket in _buckets([parameter for parameter in parameters if parameter.requires_grad]):
            gradients = [_gradient(parameter) for parameter in bucket]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            assert work is not None
            self._travelling.append((work, flat, gradients))

    def finish(self) -> None:
        """Wait for what was sent and put the sums in place."""
        for work, flat, gradients in self._travelling:
            work.wait()
            sums = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, sums, strict=True):
                gradient.copy_(total.view_as(gradient))
        self._travelling.clear()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    by_type: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_type.setdefault(parameter.dtype, []).append(parameter)
    for same in by_type.values():
        bucket: list[nn.Parameter] = []
        for parameter in same:
            bucket.append(parameter)
            if sum(held.numel() * held.element_size() for held in bucket) >= _BUCKET_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
