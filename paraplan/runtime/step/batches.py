"""The batch of one step: checked, cut into micro-batches, each with its weight in the mean over the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paraplan.errors import UsageError
from paraplan.runtime.torch_private import pytree

IGNORED_TARGET = -100
"""The target that torch's cross-entropy leaves out by default."""

TargetCount = Callable[[Any], "torch.Tensor | float"]


@dataclass(frozen=True)
class MicroBatch:
    """Inputs and targets of one forward pass, as tensors or nests of them, of `num_sequences` (0 for a piece of zeros).

    `weight` is what its loss counts in the loss of the global batch, None where that shows when it is computed.
    """

    inputs: Any
    targets: Any
    num_sequences: int
    weight: torch.Tensor | float | None = None


@dataclass(frozen=True)
class Division:
    """How a step is cut on every rank: `count` micro-batches of `size` sequences, None for any one size."""

    count: int
    size: int | None


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Return `model` of `inputs`: a dict gives keyword arguments, a tuple or list positional ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def is_of_batch(leaf: Any) -> bool:
    """Whether a leaf of a batch has an entry for each sequence: a tensor that is no single number."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def batch_size(inputs: Any, targets: Any) -> int:
    """Return the number of sequences of a batch: the first dimension, the same in every tensor of it.

    Single numbers belong to the whole batch.
    """
    sizes: set[int] = {leaf.shape[0] for leaf in pytree.tree_leaves((inputs, targets)) if is_of_batch(leaf)}
    if len(sizes) != 1:
        raise UsageError(
            f"the tensors of a batch must share one first dimension, found {sorted(sizes) or 'no tensor'}",
            hint="give engine.step inputs and targets with the batch first",
        )
    return sizes.pop()


def divide_short(sizes: Sequence[int], *, micro_batch_size: int, min_count: int = 1, multiple: int = 1) -> Division:
    """Return how ranks with shares of these sizes cut a batch that is not full: alike, in pieces that fit all of them.

    Collectives of ZeRO and schedules of pipelines need one number of micro-batches on every rank, and one size. At
    least `min_count` are made, and a multiple of `multiple`; what a rank cannot fill counts nothing.
    """
    common = math.gcd(*sizes)
    size = next(size for size in range(min(common, micro_batch_size), 0, -1) if common % size == 0)
    count = max(min_count, max(sizes) // size)
    return Division(count=-(-count // multiple) * multiple, size=size)


def split_batch(inputs: Any, targets: Any, division: Division) -> list[MicroBatch]:
    """Cut a batch into micro-batches of one size; those that no sequence is left for are zeros.

    Raises `UsageError` where no size is given and the batch does not divide.
    """
    held = batch_size(inputs, targets)
    size, rest = (division.size, 0) if division.size is not None else divmod(held, division.count)
    if rest or not size:
        raise UsageError(
            f"a batch of {held} sequences does not divide into num_microbatches={division.count} of one size",
            hint=f"give each rank a multiple of {division.count} sequences for a step",
        )

    def piece(index: int) -> MicroBatch:
        start = index * size

        def cut(leaf: Any) -> Any:
            if not is_of_batch(leaf):
                return leaf
            return leaf[start : start + size] if start < held else leaf.new_zeros((size, *leaf.shape[1:]))

        counted = size if start < held else 0
        return MicroBatch(pytree.tree_map(cut, inputs), pytree.tree_map(cut, targets), num_sequences=counted)

    return [piece(index) for index in range(division.count)]


def counted_targets(targets: Any) -> torch.Tensor | float:
    """Return over how many targets a mean loss goes: whole numbers other than -100, without any the sequences."""
    leaves = [leaf for leaf in pytree.tree_leaves(targets) if isinstance(leaf, torch.Tensor)]
    classes = [leaf for leaf in leaves if not leaf.is_floating_point() and leaf.dtype != torch.bool]
    if not classes:
        return float(leaves[0].shape[0]) if leaves else 1.0
    return torch.stack([(leaf != IGNORED_TARGET).sum() for leaf in classes]).sum()


def count_micro_batches(micro_batches: Sequence[MicroBatch], count: TargetCount, device: torch.device) -> torch.Tensor:
    """Return how many targets each micro-batch brings into the mean, as a vector; 0 for those that are zeros."""

    def one(micro_batch: MicroBatch) -> torch.Tensor:
        if not micro_batch.num_sequences:
            return torch.zeros((), device=device)
        return torch.as_tensor(count(micro_batch.targets), dtype=torch.float32, device=device)

    return torch.stack([one(micro_batch) for micro_batch in micro_batches])


def weigh(micro_batches: Sequence[MicroBatch], weights: torch.Tensor | Sequence[float]) -> list[MicroBatch]:
    """Return the micro-batches with these weights, one for each."""
    return [replace(micro_batch, weight=weights[index]) for index, micro_batch in enumerate(micro_batches)]


def to_device(tree: Any, device: torch.device) -> Any:
    """Return `tree` with its tensors on `device`; what is no tensor stays as it is."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(move, tree)
