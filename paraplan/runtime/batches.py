"""The batch of one step: checked, and cut into micro-batches of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paraplan.errors import UsageError


@dataclass(frozen=True)
class MicroBatch:
    """Inputs and targets of one forward pass, as tensors or nests of them."""

    inputs: Any
    targets: Any


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Return `model` of `inputs`: a dict gives keyword arguments, a tuple or list positional ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def batch_size(inputs: Any, targets: Any) -> int:
    """Return the number of sequences of a batch: the first dimension, the same in every tensor of it."""
    sizes = {
        leaf.shape[0] if leaf.ndim else 0
        for leaf in pytree.tree_leaves((inputs, targets))
        if isinstance(leaf, torch.Tensor)
    }
    if len(sizes) != 1 or 0 in sizes:
        raise UsageError(
            f"the tensors of a batch must share one first dimension, found {sorted(sizes) or 'no tensor'}",
            hint="give engine.step inputs and targets with the batch first",
        )
    return sizes.pop()


def split_batch(inputs: Any, targets: Any, *, count: int) -> list[MicroBatch]:
    """Cut a batch into `count` micro-batches of one size. Equal sizes make the mean of their means the batch's mean.

    Raises `UsageError` where the batch does not divide.
    """
    size = batch_size(inputs, targets)
    share, rest = divmod(size, count)
    if rest or not share:
        raise UsageError(
            f"a batch of {size} sequences does not divide into num_microbatches={count} of one size",
            hint=f"give each rank a multiple of {count} sequences for a step",
        )

    def piece(index: int) -> MicroBatch:
        def cut(leaf: Any) -> Any:
            return leaf[index * share : (index + 1) * share] if isinstance(leaf, torch.Tensor) else leaf

        return MicroBatch(inputs=pytree.tree_map(cut, inputs), targets=pytree.tree_map(cut, targets))

    return [piece(index) for index in range(count)]


def to_device(tree: Any, device: torch.device) -> Any:
    """Return `tree` with its tensors on `device`; what is no tensor stays as it is."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(move, tree)
