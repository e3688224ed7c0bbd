"""Rules of functions that know heads and channels: attention, einsum and convolutions of what `tp` has split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses

from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import SplitError, SplitTensor, as_operand


def split_attention(_: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return attention of some heads of queries to keys that every rank of tp has whole; None where these are split."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    options = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (options.pop(name) for name in names[:3])
    if not isinstance(query, SplitTensor) or query.sharding.dim != query.ndim - 3:
        return None
    if isinstance(key, SplitTensor) or isinstance(value, SplitTensor):
        return None
    heads, groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    if heads == 1:
        return None  # which all queries read
    own = []
    for one in (key, value):
        # Fewer heads than ranks: a rank reads those of its queries.
        whole = as_operand(one if heads % query.sharding.size == 0 else one.repeat_interleave(groups, dim=-3), query)
        sharding = Sharding(dim=whole.ndim - 3, segments=(whole.shape[-3],), size=query.sharding.size)
        own.append(SplitTensor(sharding.part(whole, query.group.index), sharding, query.group, query.source))
    return F.scaled_dot_product_attention(query, own[0], own[1], **options)


def split_einsum(_: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an einsum of factors that are split along one letter, which the result has; None where they are not."""
    equation, *factors = args
    factors = list(factors[0]) if len(factors) == 1 and isinstance(factors[0], (list, tuple)) else factors
    if kwargs or not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    terms = given.split(",")
    is_split = [isinstance(factor, SplitTensor) for factor in factors]
    first = factors[is_split.index(True)]
    letter = terms[is_split.index(True)][first.sharding.dim]
    if letter not in result:
        return None
    parts = []
    for term, factor, split in zip(terms, factors, is_split, strict=True):
        place = term.find(letter)
        if not split:
            whole = as_operand(factor, first)
            parts.append(whole if place < 0 else first.sharding.at(place).part(whole, first.group.index))
        elif factor.sharding == first.sharding.at(place):
            parts.append(factor.local)
        else:
            return None
    sharding = first.sharding.at(result.index(letter))
    return SplitTensor(torch.einsum(equation, *parts), sharding, first.group, first.source)


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
    if split.sharding.dim != split.ndim - weight.ndim + 1:  # [batch, channels, ...] or [channels, ...]
        return None
    inputs, outputs = weight.shape[1], weight.shape[0] // num_groups  # channels of a group of filters
    share = inputs * split.sharding.size
    if num_groups == 1 or any(segment % share for segment in split.sharding.segments):
        raise SplitError(f"{name} brings channels together", source=split.source, is_mixed=True)
    sharding = replace(
        split.sharding, segments=tuple(segment // inputs * outputs for segment in split.sharding.segments)
    )
    own = [None if one is None else _own_filters(one, sharding, split) for one in (weight, bias)]
    local = _FUNCTIONS[name](split.local, *own, groups=num_groups // sharding.size, **given)
    return SplitTensor(local, sharding, split.group, split.source)


def _own_filters(whole: torch.Tensor, sharding: Sharding, split: SplitTensor) -> torch.Tensor:
    return sharding.at(0).part(as_operand(whole, split), split.group.index)
