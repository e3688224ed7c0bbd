"""Gradients of whole replicas of a pipeline stage, summed over `dp` once the last micro-batch has gone through it.

DDP does this by hooks on the accumulation of gradients. A schedule that takes the backward pass in two halves (zero
bubble) goes around these hooks, and a parameter that two stages of one rank hold cannot belong to two replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.experts.layers import RankExperts
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import ReduceType
from paraplan.runtime.torch_private import FakeTensor

_BUCKET_BYTES = 25 * 2**20  # that of DDP


@dataclass
class _Travelling:
    """A bucket on its way: the gradients of `parameters`, and behind them how many replicas have each."""

    work: dist.Work
    flat: torch.Tensor
    parameters: list[nn.Parameter]
    missing: list[bool]


@dataclass
class ReplicaGradients:
    """Sums the gradients of `parameters` over `group`; without a group there is one replica and nothing to do.

    `started` ones travel while other stages compute. A gradient that one replica lacks counts as 0 there; one that all
    lack stays away, as in one process: an optimizer would decay its parameter. They travel in `reduce_dtype`.
    """

    group: dist.ProcessGroup | None
    reduce_dtype: ReduceType = "fp32"
    parameters: Sequence[nn.Parameter] = ()
    _travelling: list[_Travelling] = field(default_factory=list)

    def sum(self) -> None:
        """Put the sums of the gradients in place, and of those that were started before."""
        self.start(self.parameters)
        self.finish()

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Send the gradients of `parameters`, which are complete on this rank."""
        if self.group is None:
            return
        for bucket in _buckets([parameter for parameter in parameters if parameter.requires_grad]):
            missing = [parameter.grad is None for parameter in bucket]
            parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
            there = torch.ones(len(bucket), dtype=parts[0].dtype, device=parts[0].device)
            for place in (place for place, is_missing in enumerate(missing) if is_missing):
                there[place] = 0
            flat = torch.cat([*(part.reshape(-1) for part in parts), there])
            if self.reduce_dtype == "bf16":
                flat = flat.to(torch.bfloat16)
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            assert work is not None
            self._travelling.append(_Travelling(work, flat, bucket, missing))

    def finish(self) -> None:
        """Wait for what was sent and put the sums in place."""
        for bucket in self._travelling:
            bucket.work.wait()
            *sums, there = torch.split(bucket.flat, [*(one.numel() for one in bucket.parameters), len(bucket.missing)])
            for place, (parameter, total) in enumerate(zip(bucket.parameters, sums, strict=True)):
                if parameter.grad is not None:
                    parameter.grad.copy_(total.view_as(parameter))
                elif has_some(there[place]):  # read only where this replica has none
                    parameter.grad = total.view_as(parameter).clone()
        self._travelling.clear()


def expert_gradients(
    experts: Iterable[RankExperts], plan: ParallelPlan, mesh: Mesh, reduce_dtype: ReduceType
) -> ReplicaGradients:
    """Return what sums the gradients of experts over the ranks that hold the same; under ZeRO FSDP does."""
    held = [] if plan.zero_stage else [parameter for one in experts for parameter in one.parameters]
    return ReplicaGradients(mesh.expert_copies_group, reduce_dtype, held)


def has_some(count: torch.Tensor) -> bool:
    """Whether a count is more than 0; where tensors have no values it is taken for more."""
    return isinstance(count, FakeTensor) or bool(count)


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
