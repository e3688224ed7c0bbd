"""Numbers of 16 bits: in which passes they are computed with, and fp16's loss scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from paraplan.plan.training import TrainingPrecision


def compute_context(precision: TrainingPrecision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass with its loss: autocast to 16 bits, or nothing for fp32."""
    dtype = half_type(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def half_type(precision: TrainingPrecision) -> torch.dtype | None:
    """Return the 16-bit type of a mixed precision, None for fp32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def shard_precision(precision: TrainingPrecision) -> MixedPrecisionPolicy:
    """Return what sharded parameters are gathered in, and what their gradients are reduced in.

    In mixed precision the parameters travel in 16 bits and the gradients are summed in 32, so that no rank's share is
    lost. Inputs of blocks keep their type: `compute_context` casts where an operation gains from it, as under DDP.
    """
    dtype = half_type(precision)
    if dtype is not None:
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy()


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
