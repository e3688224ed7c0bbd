"""What attention and losses do under context parallelism, where each rank of `cp` has some tokens of a sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses

from paraplan.runtime.rank_randomness import own_random_numbers
from paraplan.runtime.split_tensor import CONTEXT, SplitError, SplitTensor
from paraplan.runtime.tensor_cut import Cut
from paraplan.runtime.tensor_group import TensorGroup, sum_over_ranks


def split_attention(_: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what scaled_dot_product_attention returns for whole sequences; None where heads are split, not tokens.

    Query, key and value are [batch, heads, tokens, size].
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given.pop(name) for name in names[:3])
    if not all(isinstance(one, SplitTensor) and one.source == CONTEXT for one in (query, key, value)):
        return None
    group, cut = query.group, query.cut
    if any(one.cut.dim != one.ndim - 2 or one.ndim != 4 or len(one.cut.segments) > 1 for one in (query, key, value)):
        raise SplitError("attention over tokens that are not in the last dimension but one", source=CONTEXT)
    for one in (query, key, value):
        if one.shape[1] % group.size:
            raise SplitError(f"cp={group.size} does not divide {one.shape[1]} heads", source=CONTEXT)
    mask = given.get("attn_mask")
    if isinstance(mask, SplitTensor):
        raise SplitError("the mask of attention has some tokens alone", source=CONTEXT)
    if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
        given["attn_mask"] = Cut(dim=1, segments=(mask.shape[1],), size=group.size).part(mask, group.index)
    query, key, value = (_exchange(one.local, 1, 2, group) for one in (query, key, value))
    is_random = (given.get("dropout_p") or 0.0) > 0.0
    with own_random_numbers(group, query.device, is_active=is_random):
        attended = F.scaled_dot_product_attention(query, key, value, **given)
    return SplitTensor(_exchange(attended, 2, 1, group), cut, group, CONTEXT)


def split_loss(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the mean or sum over all tokens of a tensor of which this rank has some; None where others are kept."""
    if len(args) > 1 or kwargs.keys() - {"dtype"} or args[0].source != CONTEXT:
        return None
    tensor: SplitTensor = args[0]
    total = sum_over_ranks(tensor.local.sum(), tensor.group)
    return total / tensor.numel() if name == "mean" else total


def split_row_losses(
    logits: SplitTensor, target: torch.Tensor, weight: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Return the cross-entropy of logits of which this rank has those of some tokens."""
    dim = logits.cut.dim - (logits.cut.dim > 1)  # a target has no dimension for the classes
    local = logits.cut.at(dim).part(target, logits.group.index)
    reduction, ignored = options.pop("reduction"), options["ignore_index"]
    losses = F.cross_entropy(
        logits.local, local, weight=weight, reduction="none" if reduction == "none" else "sum", **options
    )
    if reduction == "none":
        return SplitTensor(losses, logits.cut.at(dim), logits.group, CONTEXT)
    total = sum_over_ranks(losses, logits.group)
    if reduction == "sum":
        return total
    counts = target != ignored
    counted: torch.Tensor = counts if weight is None else weight[target * counts] * counts
    return total / counted.sum()


def _exchange(local: torch.Tensor, scatter: int, gather: int, group: TensorGroup) -> torch.Tensor:
    result: torch.Tensor = _Exchange.apply(local, scatter, gather, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """All-to-all: a rank hands out its parts along one dimension, and gets what the others have along another."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, scatter: int, gather: int, group: TensorGroup) -> torch.Tensor:
        ctx.scatter, ctx.gather, ctx.group = scatter, gather, group
        return _exchanged(local, scatter, gather, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _exchanged(gradients[0], ctx.gather, ctx.scatter, ctx.group), None, None, None


def _exchanged(local: torch.Tensor, scatter: int, gather: int, group: TensorGroup) -> torch.Tensor:
    parts = torch.stack(local.chunk(group.size, dim=scatter))
    received = torch.empty_like(parts)
    if group.handle is not None:
        dist.all_to_all_single(received, parts, group=group.handle)
    return torch.cat(received.unbind(0), dim=gather)
