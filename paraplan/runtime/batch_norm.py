"""Batch normalisation over the global batch, of which each rank of `dp` has a share.

The mean and the variance of a channel are those of all ranks' entries, and so are their gradients (SyncBatchNorm, which
torch has for GPUs alone). Without it each rank would train by the statistics of its own share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import TensorGroup, sum_both_ways
from paraplan.runtime.structure.forwards import set_forward
from paraplan.runtime.torch_private import BatchNorm, check_batch_norm_input


def batch_norms(model: nn.Module) -> dict[str, BatchNorm]:
    """Return the layers of `model` that normalise by the statistics of a batch in training, by their names.

    Those that were put into evaluation (frozen) go by their running statistics.
    """
    return {name: one for name, one in model.named_modules() if isinstance(one, BatchNorm) and one.training}


def synchronize_batch_norms(model: nn.Module, mesh: Mesh) -> None:
    """Make the batch norms of `model` those of the global batch, which `batch_coupling="gather"` asks for."""
    group = TensorGroup.of(mesh, "dp")
    for module in batch_norms(model).values() if group.size > 1 else ():
        _synchronize(module, group)


def _synchronize(module: BatchNorm, group: TensorGroup) -> None:
    inner = module.forward

    def forward(given: torch.Tensor) -> torch.Tensor:
        return _normalized(module, given, group) if module.training else inner(given)

    set_forward(module, forward)


def _normalized(module: BatchNorm, given: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    check_batch_norm_input(module, given)
    own = given.float().movedim(1, -1).flatten(0, -2)  # [entries, channels]
    count = torch.full((1,), float(own.shape[0]), device=own.device)
    total = sum_both_ways(torch.cat([own.sum(0), count]), group)
    number = total[-1].detach()
    mean = total[:-1] / number
    # In two passes, as one process does it: the mean of squares less the square of the mean cancels digits.
    centered = own - mean
    squares = sum_both_ways(centered.square().sum(0), group)
    variance = squares / number
    _follow(module, mean.detach(), variance.detach() * number / (number - 1).clamp(min=1))
    normal = centered * torch.rsqrt(variance + module.eps)
    if module.affine:
        normal = normal * module.weight.float() + module.bias.float()
    shape = given.movedim(1, -1).shape
    normalized: torch.Tensor = normal.view(shape).movedim(-1, 1).to(given.dtype)
    return normalized


def _follow(module: BatchNorm, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Bring the running statistics one batch further, as torch.nn.BatchNorm does."""
    if not module.track_running_stats or module.running_mean is None or module.running_var is None:
        return
    momentum: Any = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if momentum is None:  # a plain average of all batches
            momentum = 1.0 / module.num_batches_tracked.float()
    with torch.no_grad():
        for running, now in ((module.running_mean, mean), (module.running_var, variance)):
            running.add_((now - running) * momentum)
