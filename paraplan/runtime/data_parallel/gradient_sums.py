"""Gradients that nothing else sums, added up over ranks once the last micro-batch has gone through.

DDP and FSDP sum by hooks on the accumulation of gradients. A schedule that takes the backward pass in two halves (zero
bubble) goes around these hooks, a parameter that two stages hold cannot belong to two replicas, and ranks of `tp`
compute some gradients in part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from paraplan.runtime.experts.layers import RankExperts
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import ReduceType
from paraplan.runtime.structure.weights import buckets, local_shard
from paraplan.runtime.torch_private import FakeTensor

_BUCKET_BYTES = 25 * 2**20  # that of DDP


@dataclass
class _Travelling:
    """A bucket on its way: the `gradients` of `parameters`, what is `local` of these, and how many ranks have each."""

    work: dist.Work
    flat: torch.Tensor
    parameters: list[nn.Parameter]
    gradients: list[torch.Tensor]
    local: list[torch.Tensor]


@dataclass
class GradientSum:
    """Sums the gradients of `parameters` over `group`; without a group there is one rank and nothing to do.

    Ranks hold the parameters whole, or the same shards of them. `started` ones travel while other stages compute. A
    gradient that one rank lacks counts as 0 there; one that all lack stays away, as in one process: an optimizer would
    decay its parameter. They travel in `reduce_dtype`.
    """

    group: dist.ProcessGroup | None
    reduce_dtype: ReduceType = "fp32"
    parameters: Sequence[nn.Parameter] = ()
    _travelling: list[_Travelling] = field(default_factory=list)

    def sum(self) -> None:
        """Put the sums of the gradients in place, and of those that were started before."""
        self.start(self.parameters)
        for bucket in self._travelling:
            bucket.work.wait()
            *sums, there = torch.split(bucket.flat, [*map(torch.numel, bucket.local), len(bucket.local)])
            for place, parameter in enumerate(bucket.parameters):
                # Read only where this rank has none; numbers without values are taken for more than 0.
                if parameter.grad is not None or isinstance(there, FakeTensor) or bool(there[place]):
                    bucket.local[place].copy_(sums[place].view_as(bucket.local[place]))
                    parameter.grad = bucket.gradients[place]
        self._travelling.clear()

    def start(self, parameters: Sequence[nn.Parameter]) -> None:
        """Send the gradients of `parameters`, which are complete on this rank."""
        if self.group is None:
            return
        for bucket in buckets([one for one in parameters if one.requires_grad], _BUCKET_BYTES):
            gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
            local = [one if type(one) is torch.Tensor else local_shard(one) for one in gradients]
            there = torch.ones(len(bucket), dtype=local[0].dtype, device=local[0].device)
            for place, parameter in enumerate(bucket):
                if parameter.grad is None:
                    there[place] = 0
            flat = torch.cat([*[one.reshape(-1) for one in local], there])
            if self.reduce_dtype == "bf16":
                flat = flat.to(torch.bfloat16)
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            assert work is not None
            self._travelling.append(_Travelling(work, flat, bucket, gradients, local))


def gradient_sums(
    mesh: Mesh,
    reduce_dtype: ReduceType,
    *,
    whole: Sequence[nn.Parameter],
    experts: Iterable[RankExperts],
    partial: Sequence[nn.Parameter],
) -> tuple[GradientSum, ...]:
    """Return the sums of a rank: of parameters that are `whole` under ZeRO, of experts, and of those in part over tp.

    Experts are summed over the ranks that hold the same; under ZeRO FSDP does so.
    """
    of_experts = [] if mesh.plan.zero_stage else [parameter for one in experts for parameter in one.parameters]
    return (
        GradientSum(mesh.replica_group, reduce_dtype, whole),
        GradientSum(mesh.expert_copies_group, reduce_dtype, of_experts),
        GradientSum(mesh.group("tp"), parameters=partial),
    )
