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
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses

from paraplan.runtime.shards.group import TensorGroup, all_gather, copy_to_region
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.torch_private import without_base


class LateGradient:
    """The factors of the gradient of a column layer's weight, once the layer has gone backward.

    `rows` are what it read, and `of_rows` the gradients of what it made of them. `outputs_first`: the weight is
    [outputs, inputs].
    """

    outputs_first = True
    rows: torch.Tensor | None = None
    of_rows: torch.Tensor | None = None


def enter_region(
    given: torch.Tensor,
    tokens: Sharding | None,
    first: Any,
    group: TensorGroup,
    *,
    for_products: bool = False,
) -> tuple[torch.Tensor, LateGradient | None]:
    """Return `given`, or where it has own `tokens` those of all ranks, for each rank to go its own way with.

    `first` is the column layer that reads it first, the gradient of whose weight is made late where it can be: see
    `late_linear`. `for_products` as in `copy_to_region`.
    """
    weight: Any = None if first is None or not group.overlaps or group.handle is None else first.weight
    if (
        type(weight) in (torch.Tensor, torch.nn.Parameter)
        and weight.requires_grad
        and given.requires_grad
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    ):
        late = LateGradient()
        late.outputs_first = isinstance(first, torch.nn.Linear)
        return _EnterBeside.apply(given, weight, tokens, late, group), late  # type: ignore[no-untyped-call]
    if tokens is not None:
        return all_gather(given, tokens, group), None
    return copy_to_region(given, group, for_products=for_products), None


class _EnterBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        _: torch.Tensor,
        tokens: Sharding | None,
        late: LateGradient,
        group: TensorGroup,
    ) -> torch.Tensor:
        ctx.tokens, ctx.late, ctx.group = tokens, late, group
        return given.view_as(given) if tokens is None else group.gather(given, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        work: Any
        if ctx.tokens is None:
            total = gradients[0].contiguous()
            work = dist.all_reduce(total, group=ctx.group.handle, async_op=True)
        else:
            total, work = ctx.group.reduce_scatter(gradients[0], ctx.tokens, async_op=True)
        rows, of_rows = ctx.late.rows, ctx.late.of_rows
        ctx.late.rows = ctx.late.of_rows = of_weight = None
        if rows is not None:  # a gradient has come to the layer
            of_weight = of_rows.t() @ rows if ctx.late.outputs_first else rows.t() @ of_rows
        work.wait()
        return total, of_weight, None, None, None


class _LateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        late: LateGradient,
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
            same: torch.Tensor = without_base(made, made.shape)
            return same

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_rows = gradient.flatten(0, -2)
        ctx.late.rows, ctx.late.of_rows = given.flatten(0, -2), of_rows
        of_given = gradient @ (weight if ctx.late.outputs_first else weight.t())
        return of_given, None, of_rows.sum(0) if ctx.has_bias else None, None


late_linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, LateGradient], torch.Tensor] = _LateLinear.apply
"""Returns what a linear layer makes of what has been entered.

`weight` is detached: its gradient comes where `given` was entered beside it.
"""
