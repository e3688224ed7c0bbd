"""What grouped convolutions (depthwise ones of state-space models) do to channels of which each rank has some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paraplan.runtime.split.cut import Cut
from paraplan.runtime.split.split_tensor import SplitError, SplitTensor, as_operand

_PARAMETERS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "conv1d": torch.conv1d,
    "conv2d": torch.conv2d,
    "conv3d": torch.conv3d,
}


def split_convolution(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the convolution of this rank's channels by their own filters; None where other dimensions are split.

    The weights are whole on every rank: their gradients are summed.
    """
    given: dict[str, Any] = dict(zip(_PARAMETERS, args, strict=False)) | kwargs
    split, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    num_groups = given.pop("groups", 1)
    if not isinstance(split, SplitTensor) or isinstance(weight, SplitTensor) or isinstance(bias, SplitTensor):
        return None
    if split.cut.dim != split.ndim - weight.ndim + 1:  # [batch, channels, ...] or [channels, ...]
        return None
    inputs, outputs = weight.shape[1], weight.shape[0] // num_groups  # channels of a group of filters
    share = inputs * split.cut.size
    if num_groups == 1 or any(segment % share for segment in split.cut.segments):
        raise SplitError(f"{name} brings channels together", source=split.source, is_mixed=True)
    cut = replace(split.cut, segments=tuple(segment // inputs * outputs for segment in split.cut.segments))
    own = [None if one is None else _own_filters(one, cut, split) for one in (weight, bias)]
    local = _FUNCTIONS[name](split.local, *own, groups=num_groups // cut.size, **given)
    return SplitTensor(local, cut, split.group, split.source)


def _own_filters(whole: torch.Tensor, cut: Cut, split: SplitTensor) -> torch.Tensor:
    return cut.at(0).part(as_operand(whole, split), split.group.index)
