"""Weights a little beside what they are, for checks: what starts at zero hides all that lies behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paraplan.runtime.structure.weights import free_gathered, is_quantized, local_shard
from paraplan.runtime.torch_private import storage_key

_SHARE, _LEAST = 0.1, 0.02  # of the size of a tensor's values, and beside it: zero-initialised heads, gates and scales


@contextmanager
def shaken_weights(module: nn.Module) -> Iterator[None]:
    """Have trained weights of `module` differ in this context, alike on ranks that hold the same, and be put back."""
    free_gathered(module)  # else parameters may be what was gathered, which comes and goes
    held = _trained(module)
    kept = [one.to("cpu", copy=True) for one in held]
    shake(module)
    free_gathered(module)
    try:
        yield
    finally:
        for one, value in zip(held, kept, strict=True):
            one.copy_(value)
        free_gathered(module)


def shake(module: nn.Module) -> None:
    """Change what `module` holds of its trained weights a little, by the places of the values alone."""
    for one in _trained(module):
        places = torch.arange(one.numel(), dtype=torch.float32, device=one.device).view(one.shape)
        size = one.float().square().mean().sqrt() if one.numel() else 0.0
        one.add_((places * 1.7 + 0.3).sin_().mul_(_SHARE * size + _LEAST).to(one.dtype))


def _trained(module: nn.Module) -> list[torch.Tensor]:
    held = [local_shard(one) for one in module.parameters() if one.requires_grad and not is_quantized(one)]
    return [one for one in {storage_key(one): one for one in held}.values() if one.is_floating_point()]
