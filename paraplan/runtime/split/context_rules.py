"""What attention and losses do under context parallelism, where each rank of `cp` has some tokens of a sequence."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.context_heads import divides_heads, key_copies
from paraplan.runtime.split.cut import Cut
from paraplan.runtime.split.group import TensorGroup, sum_over_ranks
from paraplan.runtime.split.rank_randomness import own_random_numbers
from paraplan.runtime.split.split_tensor import CONTEXT, SplitError, SplitTensor, as_operand, is_of_sequence

_HEADS = 1  # their dimension, in [batch, heads, tokens, size]


def split_attention(_: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what scaled_dot_product_attention returns for whole sequences; None where heads are split, not tokens.

    Query, key and value are [batch, heads, tokens, size].
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given.pop(name) for name in names[:3])
    if not all(is_of_sequence(one) for one in (query, key, value)):
        return _with_own_keys(query, key, value, given)
    group, cut = query.group, query.cut
    if any(one.cut.dim != one.ndim - 2 or one.ndim != 4 or len(one.cut.segments) > 1 for one in (query, key, value)):
        raise SplitError("attention over tokens that are not in the last dimension but one", source=CONTEXT)
    heads = _split_heads(query, key, value)
    own = [one.local.local if heads is not None else one.local for one in (query, key, value)]
    copies = _check_heads(own, group)
    given["attn_mask"] = _own_mask(given.get("attn_mask"), heads, query.shape[1], group)
    if copies > 1:  # fewer groups of queries than ranks: several ranks attend to the same keys and values
        own[1:] = [one.repeat_interleave(copies, dim=_HEADS) for one in own[1:]]
    query, key, value = (_exchange(one, _HEADS, 2, group) for one in own)
    is_random = (given.get("dropout_p") or 0.0) > 0.0
    over_tp = nullcontext() if heads is None else own_random_numbers(heads.group, query.device, is_active=is_random)
    with over_tp, own_random_numbers(group, query.device, is_active=is_random):
        attended = F.scaled_dot_product_attention(query, key, value, **given)
    attended = _exchange(attended, 2, _HEADS, group)
    if heads is not None:
        attended = SplitTensor(attended, heads.cut, heads.group, heads.source)
    return SplitTensor(attended, cut, group, CONTEXT)


def _with_own_keys(query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    """Return attention of some heads of queries to keys that every rank of tp has whole; None where these are split."""
    if not isinstance(query, SplitTensor) or is_of_sequence(query) or query.cut.dim != query.ndim - 3:
        return None
    if isinstance(key, SplitTensor) or isinstance(value, SplitTensor):
        return None
    heads, groups = key.shape[-3], query.shape[-3] // key.shape[-3]
    if heads == 1:
        return None  # which all queries read
    own = []
    for one in (key, value):
        # Fewer heads than ranks: a rank reads those of its queries.
        whole = as_operand(one if heads % query.cut.size == 0 else one.repeat_interleave(groups, dim=-3), query)
        cut = Cut(dim=whole.ndim - 3, segments=(whole.shape[-3],), size=query.cut.size)
        own.append(SplitTensor(cut.part(whole, query.group.index), cut, query.group, query.source))
    return F.scaled_dot_product_attention(query, own[0], own[1], **options)


def _split_heads(*operands: SplitTensor) -> SplitTensor | None:
    """Return the first of query, key and value as the ranks of `tp` have split it by heads, None where none have."""
    inner = [one.local for one in operands]
    split = [one for one in inner if isinstance(one, SplitTensor)]
    if not split:
        return None
    if len(split) < len(inner) or any(one.cut.dim != _HEADS or one.cut.repeats > 1 for one in split):
        raise SplitError("attention over what the ranks of tp have not split by heads", source=CONTEXT)
    return split[0]


def _check_heads(operands: list[torch.Tensor], group: TensorGroup) -> int:
    """Return how many times the heads of keys and values are to be repeated, so that every rank gets as many."""
    queries, *others = (one.shape[_HEADS] for one in operands)
    shared = others[0]
    if not divides_heads(queries, shared, group.size) or others[1] != shared:
        shares = "" if queries == shared else f" that share {shared} of keys"
        raise UnsupportedPlanError(
            f"cp={group.size} does not divide the {queries} heads of queries{shares} that a rank of tp has",
            hint="use degrees of tp and cp whose product divides the attention heads, or cp=1",
        )
    return key_copies(shared, group.size)


def _own_mask(mask: Any, heads: SplitTensor | None, num_heads: int, group: TensorGroup) -> Any:
    """Return the part of a mask for the heads that this rank attends with."""
    if isinstance(mask, SplitTensor) and mask.source == CONTEXT:
        raise SplitError("the mask of attention has some tokens alone", source=CONTEXT)
    if mask is None or mask.ndim != 4 or mask.shape[_HEADS] == 1:
        return mask
    if isinstance(mask, SplitTensor):  # by heads, by the ranks of tp
        mask = mask.local
    elif heads is not None and mask.shape[_HEADS] == num_heads:
        mask = heads.cut.part(mask, heads.group.index)
    return Cut(dim=_HEADS, segments=(mask.shape[_HEADS],), size=group.size).part(mask, group.index)


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
    rows = logits.cut.at(logits.cut.dim - (logits.cut.dim > 1))  # the dimension of the classes is no more
    has_shares = target.is_floating_point()  # of every class, in the shape of the logits
    local = (logits.cut if has_shares else rows).part(target, logits.group.index)
    reduction, ignored = options.pop("reduction"), options["ignore_index"]
    losses = F.cross_entropy(
        logits.local, local, weight=weight, reduction="none" if reduction == "none" else "sum", **options
    )
    if reduction == "none":
        return SplitTensor(losses, rows, logits.group, CONTEXT)
    total = sum_over_ranks(losses, logits.group)
    if reduction == "sum":
        return total
    if has_shares:
        return total / (target.numel() // target.shape[min(1, target.ndim - 1)])
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
