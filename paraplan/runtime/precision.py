"""Mixed precision: what runs in 16 bits, and what stays in 32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from paraplan.plan.training import TrainingPrecision


def compute_context(precision: TrainingPrecision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass with its loss: bf16 autocast, or nothing for fp32."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def shard_precision(precision: TrainingPrecision) -> MixedPrecisionPolicy:
    """Return what sharded parameters are gathered in, and what their gradients are reduced in.

    In bf16 the parameters travel in 16 bits and the gradients are summed in 32, so that no rank's share is lost.
    Inputs of blocks keep their type: `compute_context` casts where an operation gains from it, as under DDP.
    """
    if precision == "bf16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy()
