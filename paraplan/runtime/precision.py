"""Mixed precision: what runs in 16 bits, and what stays in 32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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
