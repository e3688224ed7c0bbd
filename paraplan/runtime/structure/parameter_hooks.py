"""Code that hangs on parameters: hooks on their gradients, and layers that write their own weights in a forward pass.

A plan changes what a hook sees: a part of a parameter, the gradient of some of the batch, or nothing, where another
tensor stands in the parameter's place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.torch_private import accumulation_hooks, gradient_hooks

_ROUNDING = 1e-4
_LARGEST_TRIAL = 2**28  # elements


def check_hooks(model: nn.Module, plan: ParallelPlan) -> None:
    """Raise `UnsupportedPlanError` where a hook on a parameter would not do under `plan` what it does in one process.

    Hooks on gradients that are linear (a mask, a factor) may run for each part of a batch: they are called three times
    with numbers to find that out.
    """
    divides = plan.dp * plan.cp * plan.num_microbatches > 1
    replaces = plan.zero_stage > 0 or plan.tp > 1
    if not divides and not replaces and plan.world_size == 1:
        return
    for name, parameter in model.named_parameters():
        hooks = gradient_hooks(parameter)
        if accumulation_hooks(parameter):
            kind = "register_post_accumulate_grad_hook"
        elif hooks and replaces:
            kind = "register_hook"
        elif hooks and divides and not all(_is_linear(hook, parameter) for hook in hooks):
            kind = "register_hook, not linear in the gradient"
        else:
            continue
        raise UnsupportedPlanError(
            f"{name} has a hook on its gradient ({kind}), which '{plan.describe()}' would call with a part of the "
            "gradient, or not at all",
            hint="change gradients between engine.backward and engine.update, clip them by max_grad_norm, or use a "
            "plan of one rank and one micro-batch",
        )


def _is_linear(hook: Callable[..., Any], parameter: torch.Tensor) -> bool:
    """Whether what `hook` makes of a sum is the sum of what it makes of each; it may look, and change nothing."""
    if parameter.is_meta or parameter.numel() > _LARGEST_TRIAL:
        return False
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator).to(parameter)

    def of(gradient: torch.Tensor) -> torch.Tensor:
        given = gradient.clone()
        returned = hook(given)
        return given if returned is None else returned

    first, second = drawn(), drawn()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            apart, together = of(first) + of(second), of(first + second)
        except RuntimeError:  # a mask on another device than the weights have before the plan
            return False
    scale = max(float(together.abs().max()), 1e-30)
    return float((apart - together).abs().max()) <= _ROUNDING * scale


def check_written_tables(model: nn.Module, plan: ParallelPlan) -> None:
    """Raise `UnsupportedPlanError` where an embedding scales the rows that it looks up (max_norm), on some ranks alone.

    Ranks look up other rows, and under ZeRO they write into a copy. There its gradient may not be sparse either.
    """
    for name, module in model.named_modules() if plan.zero_stage else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedPlanError(
                f"zero_stage={plan.zero_stage}: {name} has sparse=True, and FSDP sums no sparse gradients",
                hint="make it without sparse=True, or use zero_stage=0 (DDP)",
            )
    if plan.dp * plan.cp == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UnsupportedPlanError(
                f"{name} has max_norm={module.max_norm:g}: it writes the rows of its weight that it looks up, and "
                f"ranks of dp={plan.dp} x cp={plan.cp} look up others",
                hint="scale the weight between steps instead, or use a plan with dp=1 and cp=1",
            )
