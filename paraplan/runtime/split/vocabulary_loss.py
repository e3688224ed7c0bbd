"""Cross-entropy of logits of which every rank of a `tp` group has the part of some classes.

No rank holds all logits: the largest one, the sum of the exponentials and the target's logit of each row travel
(Shoeybi et al. 2019, section 3, "we fuse the output of the parallel GEMM with the cross entropy loss").
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding

_NAMES = (
    *("input", "target", "weight", "size_average", "ignore_index"),
    *("reduce", "reduction", "label_smoothing"),
)
_DEFAULTS: dict[str, Any] = {
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


def split_cross_entropy(
    args: tuple[Any, ...], kwargs: dict[str, Any], sharding: Sharding, group: TensorGroup
) -> torch.Tensor | None:
    """Return what torch.nn.functional.cross_entropy returns for whole logits; None where it is not computed in parts.

    That is for class weights, probabilities as targets, and logits that are not split along their classes. `sharding`
    is that of the logits.
    """
    given = _DEFAULTS | dict(zip(_NAMES, args, strict=False)) | kwargs
    logits, target = given["input"], given["target"]
    classes = 1 if logits.ndim > 1 else 0
    if sharding.dim != classes or target.is_floating_point():
        return None
    if not given["weight"] is given["size_average"] is given["reduce"] is None:
        return None
    rows = logits.movedim(classes, -1)
    losses = _RowLosses.apply(  # type: ignore[no-untyped-call]
        rows.reshape(-1, rows.shape[-1]),
        target.reshape(-1),
        given["ignore_index"],
        given["label_smoothing"],
        group,
        sharding,
    )
    return _reduced(losses, target, ignored=given["ignore_index"], reduction=given["reduction"])


def _reduced(losses: torch.Tensor, target: torch.Tensor, *, ignored: int, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return losses.reshape(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignored).sum()


class _RowLosses(torch.autograd.Function):
    """The loss of each row of local logits `[rows, classes of this rank]`, in fp32; 0 for rows that are ignored."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignored: int,
        smoothing: float,
        group: TensorGroup,
        sharding: Sharding,
    ) -> torch.Tensor:
        first, _, num_classes = sharding.pieces(group.index)[0]
        local = target - first
        is_mine = (local >= 0) & (local < num_classes)
        local = local.clamp(0, num_classes - 1)
        largest = logits.amax(dim=-1).float()
        if group.handle is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group.handle)
        copied = logits.clone() if logits.dtype is torch.float32 else logits.float()
        shifted = copied.sub_(largest[:, None])
        of_target = shifted.gather(1, local[:, None]).squeeze(1) * is_mine
        means = [shifted.sum(dim=-1) / sharding.length] if smoothing else []
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), of_target, *means])
        total, of_target, *means = group.sum(sums, in_place=True).unbind(0)
        counts = target != ignored
        ctx.save_for_backward(exponentials.div_(total[:, None]), local, is_mine, counts)
        ctx.smoothing, ctx.num_classes, ctx.dtype = smoothing, sharding.length, logits.dtype
        losses = total.log() - (1 - smoothing) * of_target
        if smoothing:
            losses -= smoothing * means[0]
        return torch.where(counts, losses, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        softmax, local, is_mine, counts = ctx.saved_tensors
        of_row = torch.where(counts, gradients[0], 0.0)
        # d loss / d logit = softmax - (1 - smoothing) [is target] - smoothing / classes, in place of the softmax: torch
        # refuses a second backward pass.
        of_logits = softmax.scatter_add_(1, local[:, None], (-(1 - ctx.smoothing) * is_mine.float())[:, None])
        if ctx.smoothing:
            of_logits -= ctx.smoothing / ctx.num_classes
        of_logits *= of_row[:, None]
        return of_logits.to(ctx.dtype), None, None, None, None, None
