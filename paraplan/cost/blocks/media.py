"""Costs of towers for pictures and sound on the ranks that have the embedding: saved bytes and seconds."""

from __future__ import annotations

import numpy as np

from paraplan.cost.blocks.kernels import KernelTimes
from paraplan.cost.blocks.saved_tensors import Shardings, kept_sizes
from paraplan.cost.plan_table import Floats, RecomputeCode
from paraplan.model.spec import ModelSpec


def media_bytes(model: ModelSpec, times: KernelTimes) -> Floats:
    """Return what towers keep of one micro-batch: of layers that are computed again what they read."""
    shardings, total = times.shardings, np.zeros_like(times.shardings.tp)
    for block in model.media:
        if not block.has_backward:
            continue
        sizes = kept_sizes(block, times.training, shardings, fused_kernels=times.framework.kernels.fused, is_first=True)
        whole = sum((size for tensor, size in sizes if tensor.role != "layer_inputs"), np.zeros_like(total))
        inputs = [size for tensor, size in sizes if tensor.role == "layer_inputs"]
        total = total + np.where(_runs_again(shardings), inputs[0], whole) if inputs else total + whole
    return total


def media_s(model: ModelSpec, times: KernelTimes) -> Floats:
    """Return the seconds of both passes of the towers, and of what they compute again."""
    total = np.zeros_like(times.shardings.tp)
    for block in model.media:
        forward = times.block_s(block)
        again = _runs_again(times.shardings) * block.has_backward * forward
        total = total + forward + again + times.block_s(block, backward=True)
    return total


def _runs_again(shardings: Shardings) -> Floats:
    return np.asarray(shardings.recompute == RecomputeCode.FULL)
