"""The gradient of a column layer's weight, made while that of its input travels.

A linear layer makes both gradients in one step, so that the sum over the ranks of the one would wait for the other,
which nobody else needs. Here the layer makes the gradient of its input alone; where that is summed, the sum is started,
the weight's gradient is made, and then the sum is waited for, as in Megatron-LM's
`LinearWithGradAccumulationAndAsyncCommunication`. Of several layers that read one tensor it is the first that does so:
its backward pass comes last, when the others have added theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses

from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.torch_private import without_base


class LateWeight:
    """The weight of a linear layer whose gradient is made late; `outputs_first`: it is [outputs, inputs]."""

    def __init__(self, weight: torch.Tensor, *, outputs_first: bool) -> None:
        self.weight = weight
        self.outputs_first = outputs_first
        self.is_entered = False
        """Whether what the layer reads goes through `copy_beside` or `gather_beside`, which take the gradient."""
        self._make: Callable[[], torch.Tensor] | None = None

    def put(self, make: Callable[[], torch.Tensor]) -> None:
        """Keep what makes the gradient."""
        self._make = make

    def take(self) -> torch.Tensor | None:
        """Return the gradient, once; None where no gradient came to the layer."""
        make, self._make = self._make, None
        return None if make is None else make()


def can_be_late(weight: torch.Tensor, given: torch.Tensor, group: TensorGroup) -> bool:
    """Whether the gradient of a plain weight can be made while that of `given` travels."""
    return (
        group.overlaps
        and group.handle is not None
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.requires_grad
        and given.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def copy_beside(given: torch.Tensor, late: LateWeight, group: TensorGroup) -> torch.Tensor:
    """Return `given`, which every rank has; see `group.copy_to_region`."""
    late.is_entered = True
    result: torch.Tensor = _CopyBeside.apply(given, late.weight, late, group)  # type: ignore[no-untyped-call]
    return result


def gather_beside(local: torch.Tensor, sharding: Sharding, late: LateWeight, group: TensorGroup) -> torch.Tensor:
    """Return the whole of what the ranks hold; see `group.all_gather`."""
    late.is_entered = True
    result: torch.Tensor = _GatherBeside.apply(local, late.weight, sharding, late, group)  # type: ignore[no-untyped-call]
    return result


def late_linear(given: torch.Tensor, bias: torch.Tensor | None, late: LateWeight) -> torch.Tensor:
    """Return what a linear layer makes of `given`, which has been entered beside its weight."""
    result: torch.Tensor = _LateLinear.apply(given, late.weight.detach(), bias, late)  # type: ignore[no-untyped-call]
    return result


class _CopyBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, _: torch.Tensor, late: LateWeight, group: TensorGroup) -> torch.Tensor:
        ctx.late, ctx.group = late, group
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        total, work = ctx.group.start_sum(gradients[0])
        of_weight = ctx.late.take()
        work.wait()
        return total, of_weight, None, None


class _GatherBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, _: torch.Tensor, sharding: Sharding, late: LateWeight, group: TensorGroup
    ) -> torch.Tensor:
        ctx.late, ctx.sharding, ctx.group = late, sharding, group
        return group.gather(local, sharding)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        mine, work = ctx.group.start_reduce_scatter(gradients[0], ctx.sharding)
        of_weight = ctx.late.take()
        work.wait()
        return mine, of_weight, None, None, None


class _LateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, late: LateWeight
    ) -> torch.Tensor:
        ctx.late, ctx.has_bias = late, bias is not None
        kind = given.device.type
        if torch.is_autocast_enabled(kind):  # its own cache of weights is for those that have a gradient here
            lower = torch.get_autocast_dtype(kind)
            given, weight, bias = given.to(lower), weight.to(lower), None if bias is None else bias.to(lower)
        ctx.save_for_backward(given, weight)
        with torch.autocast(kind, enabled=False):
            if late.outputs_first:
                made = F.linear(given, weight, bias)
            elif bias is None:
                made = given @ weight
            else:
                made = torch.addmm(bias, given.flatten(0, -2), weight).view(*given.shape[:-1], -1)
            return without_base(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given, weight = ctx.saved_tensors
        (gradient,) = gradients
        rows, of_rows = given.flatten(0, -2), gradient.flatten(0, -2)
        if ctx.late.outputs_first:
            ctx.late.put(lambda: of_rows.t() @ rows)
        else:
            ctx.late.put(lambda: rows.t() @ of_rows)
        of_given = gradient @ (weight if ctx.late.outputs_first else weight.t())
        return of_given, None, of_rows.sum(0) if ctx.has_bias else None, None
