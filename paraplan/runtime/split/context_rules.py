"""Rules of functions that see the tokens of other ranks of `cp`: attention, convolutions, products, positions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.context_heads import divides_heads, key_copies
from paraplan.runtime.shards.group import TensorGroup, all_gather, gather_from_region, reduce_from_region
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import (
    CONTEXT,
    SplitError,
    SplitTensor,
    as_operand,
    is_of_sequence,
)
from paraplan.runtime.split.randomness import own_random_numbers
from paraplan.runtime.split.size_rules import SIZE_RULES
from paraplan.runtime.torch_private import pytree

_HEADS = 1  # their dimension, in [batch, heads, tokens, size]


def split_attention(_: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what scaled_dot_product_attention returns for whole sequences; None where heads are split, not tokens.

    Query, key and value are [batch, heads, tokens, size].
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given.pop(name) for name in names[:3])
    if not any(is_of_sequence(one) for one in (query, key, value)):
        return _with_own_keys(query, key, value, given)
    if not all(is_of_sequence(one) for one in (query, key, value)):
        return _to_other_sequence(query, key, value, given)
    group, sharding = query.group, query.sharding
    if any(
        one.sharding.dim != one.ndim - 2 or one.ndim != 4 or len(one.sharding.segments) > 1
        for one in (query, key, value)
    ):
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
        attended = SplitTensor(attended, heads.sharding, heads.group, heads.source)
    return SplitTensor(attended, sharding, group, CONTEXT)


def _to_other_sequence(query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    """Return attention of this rank's tokens to a sequence that every rank has whole, that of an encoder."""
    if is_of_sequence(key) or is_of_sequence(value) or query.sharding.dim != query.ndim - 2:
        raise SplitError("queries of all tokens attend to keys of which each rank has some", source=CONTEXT)
    if options.pop("is_causal", False):
        raise SplitError("causal attention to another sequence", source=CONTEXT)
    mask = options.get("attn_mask")
    if isinstance(mask, torch.Tensor) and mask.ndim > 1 and mask.shape[-2] != 1:
        options["attn_mask"] = query.sharding.at(mask.ndim - 2).part(mask, query.group.index)
    is_random = (options.get("dropout_p") or 0.0) > 0.0
    with own_random_numbers(query.group, query.device, is_active=is_random):
        attended = F.scaled_dot_product_attention(query.local, key, value, **options)
    return SplitTensor(attended, query.sharding, query.group, CONTEXT)


def _with_own_keys(query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    """Return attention of some heads of queries to keys that every rank of tp has whole; None where these are split."""
    if not isinstance(query, SplitTensor) or is_of_sequence(query) or query.sharding.dim != query.ndim - 3:
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


def _split_heads(*operands: SplitTensor) -> SplitTensor | None:
    """Return the first of query, key and value as the ranks of `tp` have split it by heads, None where none have."""
    inner = [one.local for one in operands]
    split = [one for one in inner if isinstance(one, SplitTensor)]
    if not split:
        return None
    if len(split) < len(inner) or any(one.sharding.dim != _HEADS or one.sharding.repeats > 1 for one in split):
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
        mask = heads.sharding.part(mask, heads.group.index)
    return Sharding(dim=_HEADS, segments=(mask.shape[_HEADS],), size=group.size).part(mask, group.index)


def split_loss(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the mean or sum over all tokens of a tensor of which this rank has some; None where others are kept."""
    if len(args) > 1 or kwargs.keys() - {"dtype"} or args[0].source != CONTEXT:
        return None
    tensor: SplitTensor = args[0]
    total = reduce_from_region(tensor.local.sum(), tensor.group)
    return total / tensor.numel() if name == "mean" else total


def split_row_losses(
    logits: SplitTensor, target: torch.Tensor, weight: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Return the cross-entropy of logits of which this rank has those of some tokens."""
    rows = logits.sharding.at(
        logits.sharding.dim - (logits.sharding.dim > 1)
    )  # the dimension of the classes is no more
    has_shares = target.is_floating_point()  # of every class, in the shape of the logits
    local = (logits.sharding if has_shares else rows).part(target, logits.group.index)
    reduction, ignored = options.pop("reduction"), options["ignore_index"]
    losses = F.cross_entropy(
        logits.local, local, weight=weight, reduction="none" if reduction == "none" else "sum", **options
    )
    if reduction == "none":
        return SplitTensor(losses, rows, logits.group, CONTEXT)
    total = reduce_from_region(losses, logits.group)
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


def split_index(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `tensor[index]`: of all tokens where numbers are looked up by tensors, or some tokens are taken out."""
    tensor, index = args
    if not _is_of_numbers(tensor):
        return SIZE_RULES["__getitem__"](name, args, kwargs)
    entries = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(entry, torch.Tensor) for entry in entries):
        try:
            return SIZE_RULES["__getitem__"](name, args, kwargs)
        except SplitError:
            pass
    return _whole(tensor)[_whole(index)]


def split_difference(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the differences between neighbouring numbers, of all tokens; None for other tensors."""
    if not _is_of_numbers(args[0] if args else kwargs["input"]):
        return None
    return torch.diff(*_whole(args), **_whole(kwargs))


def _is_of_numbers(value: Any) -> bool:
    if not isinstance(value, SplitTensor) or value.source != CONTEXT or isinstance(value.local, SplitTensor):
        return False
    return not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool


def _whole(tree: Any) -> Any:
    def whole(leaf: Any) -> Any:
        return gather_from_region(leaf.local, leaf.sharding, leaf.group) if isinstance(leaf, SplitTensor) else leaf

    return pytree.tree_map(whole, tree)


def split_product(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the rows of a matrix product for this rank's tokens; None where the factors do not bring tokens together.

    Attention that is written out multiplies queries by keys, and their weights by values, of all tokens: these are
    gathered, and every rank has the rows of its own queries (as Llama 3 does it, Grattafiori et al. 2024, section
    3.3.2). Heads need not divide.
    """
    left, right = args if len(args) == 2 else (None, None)
    if not (isinstance(left, SplitTensor) and isinstance(right, SplitTensor)) or kwargs:
        return None
    if left.source != CONTEXT or right.source != CONTEXT or min(left.ndim, right.ndim) < 2:
        return None
    if left.sharding.dim != left.ndim - 2 or right.sharding.dim < right.ndim - 2:
        return None
    rows = torch.matmul(left.local, gather_tokens(right))
    return SplitTensor(rows, left.sharding.at(rows.ndim - 2), left.group, CONTEXT)


def split_einsum(_: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an einsum of factors that are split along one letter, which the result has; None where they are not.

    Of two factors with some tokens each, along different letters, the tokens of the second are gathered.
    """
    equation, *factors = args
    factors = list(factors[0]) if len(factors) == 1 and isinstance(factors[0], (list, tuple)) else factors
    if kwargs or not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    terms = given.split(",")
    by_tokens = any(is_of_sequence(factor) for factor in factors)
    is_split = [isinstance(factor, SplitTensor) and is_of_sequence(factor) == by_tokens for factor in factors]
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
        elif by_tokens and all(is_split) and len(factors) == 2:
            parts.append(gather_tokens(factor))
        else:
            return None
    sharding = first.sharding.at(result.index(letter))
    return SplitTensor(torch.einsum(equation, *parts), sharding, first.group, first.source)


def gather_tokens(split: SplitTensor) -> torch.Tensor:
    """Return the tokens of all ranks of `cp`, for each to go its own way with; heads stay split as they are."""
    inner = split.local
    if not isinstance(inner, SplitTensor):
        return all_gather(inner, split.sharding, split.group)
    gathered: torch.Tensor = SplitTensor(
        all_gather(inner.local, split.sharding, split.group), inner.sharding, inner.group, inner.source
    )
    return gathered


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
