"""Numbers of 16 bits: in which passes they are computed with, and fp16's loss scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from paraplan.errors import PlanError, UsageError
from paraplan.plan.training import TrainingPrecision


def compute_context(precision: TrainingPrecision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass with its loss: autocast to 16 bits, or nothing for fp32."""
    dtype = None if _computes_exactly.get() else half_type(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Have contexts of forward passes cast nothing in this one, for trials whose rounding would hide what they show."""
    token = _computes_exactly.set(True)
    try:
        yield
    finally:
        _computes_exactly.reset(token)


_computes_exactly = ContextVar("computes_exactly", default=False)


def half_type(precision: TrainingPrecision) -> torch.dtype | None:
    """Return the 16-bit type of a mixed precision, None for fp32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


ReduceType = Literal["fp32", "bf16"]
"""In which type gradients are summed over replicas."""


def check_reduce_type(reduce_dtype: ReduceType, precision: TrainingPrecision) -> None:
    """Raise `UsageError` where gradients of a training in fp32 would be summed in 16 bits."""
    if reduce_dtype not in ("fp32", "bf16"):
        raise UsageError(
            f"reduce_dtype={reduce_dtype!r} is not a type to sum gradients in", hint="use 'fp32' or 'bf16'"
        )
    if reduce_dtype == "bf16" and half_type(precision) is None:
        raise UsageError(
            f"reduce_dtype='bf16' in a training with precision {precision}",
            hint="use it with precision bf16 or fp16, or leave it out",
        )


def shard_precision(precision: TrainingPrecision, reduce_dtype: ReduceType = "fp32") -> MixedPrecisionPolicy:
    """Return what sharded parameters are gathered in, and what their gradients are reduced in.

    In mixed precision the parameters travel in 16 bits and the gradients are summed in 32, so that no rank's share is
    lost, or where `reduce_dtype` says so in 16. Inputs of blocks keep their type: `compute_context` casts where an
    operation gains from it, as under DDP.
    """
    dtype = half_type(precision)
    if dtype is not None:
        reduced = torch.bfloat16 if reduce_dtype == "bf16" else torch.float32
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    return MixedPrecisionPolicy()


def check_stored_type(model: nn.Module, precision: TrainingPrecision) -> None:
    """Raise `PlanError` where the plan keeps the model in bf16 without fp32 masters, and the script made it otherwise.

    The smaller part may have another type: adapters that peft keeps in fp32, norms.
    """
    if precision != "bf16-pure":
        return
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    most = max(sizes, key=sizes.__getitem__, default=torch.bfloat16)
    if most != torch.bfloat16:
        raise PlanError(
            f"precision=bf16-pure keeps the model in bf16, and {sizes[most]:,} of its {sizes.total():,} parameters are "
            f"in {str(most).removeprefix('torch.')}",
            hint="call model.to(torch.bfloat16) before job.prepare, or use precision bf16, which has fp32 masters",
        )


INITIAL_SCALE = 2.0**16
_GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0, 0.5, 2000


@dataclass
class LossScale:
    """The scale, the steps since it last changed, and how many steps were left out. The same on every rank."""

    scale: float = INITIAL_SCALE
    steady_steps: int = 0
    skipped_steps: int = 0

    def update(self, *, overflowed: bool) -> None:
        """Take note of a step whose gradients have overflowed, anywhere in the model, or not."""
        if overflowed:
            self.scale *= _BACKOFF
            self.steady_steps = 0
            self.skipped_steps += 1
            return
        self.steady_steps += 1
        if self.steady_steps == _GROWTH_INTERVAL:
            self.scale *= _GROWTH
            self.steady_steps = 0
