"""A batch on one rank: what belongs to its sequences, and how a step cuts it into micro-batches."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.ranks import RankGrid
from paraplan.runtime.data.packed_rows import as_the_model_takes_them, with_rows_packed
from paraplan.runtime.torch_private import pytree, tensors_in

IGNORED_TARGET = -100
"""The target that torch's cross-entropy leaves out by default."""

TargetCount = Callable[[Any], "torch.Tensor | float"]


@dataclass(frozen=True)
class MicroBatch:
    """Inputs and targets of one forward pass, as tensors or nests of them, of `num_sequences` (0 for a piece of zeros).

    `weight` is what its loss counts in the loss of the global batch: its share of the targets.
    """

    inputs: Any
    targets: Any
    num_sequences: int
    weight: torch.Tensor | float = 1.0


@dataclass(frozen=True)
class Division:
    """How a step is cut on every rank: `count` micro-batches of `size` sequences, None for any one size."""

    count: int
    size: int | None


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Return `model` of `inputs`: a dict gives keyword arguments, a tuple or list positional ones."""
    inputs = as_the_model_takes_them(inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def is_of_batch(leaf: Any) -> bool:
    """Whether a leaf of a batch has an entry for each sequence: a tensor that is no single number."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0


def with_rows_repeated(inputs: Any, targets: Any) -> Any:
    """Return `inputs`, in which tensors of one row stand for all sequences: positions [1, tokens], say.

    Rows that are no sequences are those of the sequences they belong to, where a processor says to which.
    """
    first = next(filter(is_of_batch, pytree.tree_leaves((targets, inputs))), None)
    if first is not None:
        inputs = with_rows_packed(inputs, len(first))
    sizes = {leaf.shape[0] for leaf in pytree.tree_leaves((inputs, targets)) if is_of_batch(leaf)}
    if len(sizes) != 2 or 1 not in sizes:
        return inputs
    size = max(sizes)

    def repeated(leaf: Any) -> Any:
        return leaf.expand(size, *leaf.shape[1:]) if is_of_batch(leaf) and leaf.shape[0] == 1 else leaf

    return pytree.tree_map(repeated, inputs)


def batch_size(inputs: Any, targets: Any) -> int:
    """Return the number of sequences of a batch: the first dimension, the same in every tensor of it.

    Single numbers belong to the whole batch, and so do tensors of one row among inputs (`with_rows_repeated`).
    """
    sizes: set[int] = {leaf.shape[0] for leaf in pytree.tree_leaves((inputs, targets)) if is_of_batch(leaf)}
    if len(sizes) != 1:
        raise UsageError(
            f"the tensors of a batch must share one first dimension, found {sorted(sizes) or 'no tensor'}",
            hint="give engine.step inputs and targets with the batch first; runtime.pack_rows says which rows of an "
            "input belong to which sequence",
        )
    return sizes.pop()


def divide_short(sizes: Sequence[int], *, micro_batch_size: int, multiple: int = 1) -> Division:
    """Return how ranks with shares of these sizes cut a batch that is not full: alike, in pieces that fit all of them.

    Collectives of ZeRO and schedules of pipelines need one number of micro-batches on every rank, and one size. It is
    a multiple of `multiple`; what a rank cannot fill counts nothing.
    """
    common = math.gcd(*sizes)
    size = next(size for size in range(min(common, micro_batch_size), 0, -1) if common % size == 0)
    count = max(1, max(sizes) // size)
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
            if start >= held:
                return leaf.new_zeros((size, *leaf.shape[1:]))
            # Each with a version of its own: a model may write into its input while others wait for their backward.
            return torch.unsafe_split(leaf, size)[index]

        counted = size if start < held else 0
        return MicroBatch(pytree.tree_map(cut, inputs), pytree.tree_map(cut, targets), num_sequences=counted)

    return [piece(index) for index in range(division.count)]


def counted_targets(targets: Any, *, ignored: int = IGNORED_TARGET) -> torch.Tensor | float:
    """Return over how many targets a mean loss goes: whole numbers other than `ignored`, without any the sequences."""
    classes = _classes(targets)
    if classes:
        return torch.stack([(leaf != ignored).sum() for leaf in classes]).sum()
    return next((float(leaf.shape[0]) for leaf in pytree.tree_leaves(targets) if is_of_batch(leaf)), 1.0)


def _classes(targets: Any) -> list[torch.Tensor]:
    """Return the tensors of whole numbers among targets."""
    return [leaf for leaf in tensors_in(targets) if not leaf.is_floating_point() and leaf.dtype != torch.bool]


def shifts_labels(model: Any) -> bool:
    """Whether a model of transformers computes its own loss by the function for causal models, which shifts the labels.

    Others have that function too and call it nowhere: encoder-decoders compute a cross-entropy by themselves.
    """
    if getattr(getattr(model, "loss_function", None), "__name__", "") != "ForCausalLMLoss":
        return False
    forwards = [inspect.unwrap(vars(one)["forward"]) for one in type(model).__mro__ if "forward" in vars(one)]
    names = {name for one in forwards for name in getattr(getattr(one, "__code__", None), "co_names", ())}
    return "loss_function" in names or "CrossEntropyLoss" not in names


@dataclass(frozen=True)
class TargetCounter:
    """Counts the targets of a micro-batch, over which the mean goes that `loss_fn` returns.

    That is what `given` says of its targets. Else it is the entries of `labels`, among its inputs or targets, or of all
    targets that are whole numbers, other than `ignored`; without any its sequences. A causal language model of
    transformers (`shifts`) has no use for the first label of a sequence.
    """

    given: TargetCount | None = None
    ignored: int = IGNORED_TARGET
    shifts: bool = False

    @classmethod
    def of(cls, given: TargetCount | None, loss_fn: Any, model: nn.Module) -> TargetCounter:
        """Return what counts the targets of `loss_fn`: its own `ignore_index`, or that of a partial, is left out."""
        named = loss_fn.keywords if isinstance(loss_fn, functools.partial) else vars(loss_fn).get
        ignored = named.get("ignore_index") if isinstance(named, dict) else named("ignore_index")
        shifts = next((shifts_labels(one) for one in model.modules() if hasattr(type(one), "loss_function")), False)
        return cls(given=given, ignored=ignored if isinstance(ignored, int) else IGNORED_TARGET, shifts=shifts)

    def count(self, inputs: Any, targets: Any) -> torch.Tensor | float:
        """Return the number of targets of some sequences, a tensor where values have to be looked at."""
        if self.given is not None:
            return self.given(targets)
        return counted_targets(self.labels(inputs, targets), ignored=self.ignored)

    def reads_values(self, inputs: Any, targets: Any) -> bool:
        """Whether more than the number of sequences decides what `count` returns."""
        return self.given is not None or bool(_classes(self.labels(inputs, targets)))

    def labels(self, inputs: Any, targets: Any) -> Any:
        """Return the targets that are counted: `labels` among inputs or targets, or all targets."""
        for tree in (inputs, targets):
            labels = tree.get("labels") if isinstance(tree, dict) else None
            if isinstance(labels, torch.Tensor) and _classes(labels):
                return labels[:, 1:] if tree is inputs and self.shifts and labels.ndim > 1 else labels
        return targets

    def counts(self, micro_batches: Sequence[MicroBatch], device: torch.device) -> torch.Tensor:
        """Return the number of targets of each micro-batch, as a vector; 0 for those that are zeros."""

        def one(micro_batch: MicroBatch) -> torch.Tensor:
            if not micro_batch.num_sequences:
                return torch.zeros((), device=device)
            count = self.count(micro_batch.inputs, micro_batch.targets)
            return torch.as_tensor(count, dtype=torch.float32, device=device)

        return torch.stack([one(micro_batch) for micro_batch in micro_batches])


def weigh(micro_batches: Sequence[MicroBatch], weights: torch.Tensor | Sequence[float]) -> list[MicroBatch]:
    """Return the micro-batches with these weights, one for each."""
    return [replace(micro_batch, weight=weights[index]) for index, micro_batch in enumerate(micro_batches)]


def to_device(tree: Any, device: torch.device) -> Any:
    """Return `tree` with its tensors on `device`; what is no tensor stays as it is."""
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(device, non_blocking=True), tree)


@dataclass(frozen=True)
class StepShape:
    """The batch of one step on one rank: `num_microbatches` of `micro_batch_size` sequences, None for any one size.

    A step that is not full has a multiple of `multiple`, as its schedule needs.
    """

    num_microbatches: int
    micro_batch_size: int | None
    multiple: int = 1

    @classmethod
    def of_plan(cls, plan: ParallelPlan, *, is_fixed: bool) -> StepShape:
        """Return the batch of a step of `plan`; `is_fixed` says that its sizes are binding."""
        # 1F1B and the schedules of several stages a rank run a micro-batch in every stage at once.
        return cls(
            num_microbatches=plan.num_microbatches,
            micro_batch_size=plan.micro_batch_size if is_fixed else None,
            multiple=plan.pp if plan.pipeline_schedule not in (None, "gpipe") else 1,
        )

    @property
    def share(self) -> int | None:
        """Sequences of one step on one rank, None where any number will do."""
        return None if self.micro_batch_size is None else self.micro_batch_size * self.num_microbatches


class StepDivider:
    """Cuts the steps of one engine. Every rank asks it with the sizes that all of them bring."""

    def __init__(self, shape: StepShape, grid: RankGrid) -> None:
        self._shape = shape
        self._grid = grid
        self._was_short = False

    def divide(self, sizes: list[int], *, is_step: bool) -> Division:
        """Return how shares of these sizes, by rank, are cut. `is_step` says that they are trained on.

        Raises `UsageError` on every rank for sizes that do not fit the plan or each other.
        """
        shape, planned = self._shape, self._shape.share
        self._check_copies(sizes)
        if not max(sizes):
            raise UsageError("this step has no sequence on any rank", hint="give engine.step a batch")
        if planned is None:
            is_even = len(set(sizes)) == 1
            return Division(count=shape.num_microbatches, size=None if is_even else max(sizes))
        if max(sizes) > planned:
            raise UsageError(
                f"this step has {max(sizes)} sequences on rank {sizes.index(max(sizes))}, but the plan takes "
                f"micro_batch_size={shape.micro_batch_size} x num_microbatches={shape.num_microbatches} = {planned}",
                hint="take the batches from job.shard, or make a plan for this batch",
            )
        is_short = min(sizes) < planned
        if is_short and self._was_short and is_step:
            raise UsageError(
                f"two steps in a row have fewer sequences than the plan's {planned} on a rank: {sizes}",
                hint="only the last batch of an epoch may be short; take the batches from job.shard, or make a plan "
                "for this batch",
            )
        if is_step:
            self._was_short = is_short
        if not is_short:
            return Division(count=shape.num_microbatches, size=shape.micro_batch_size)
        assert shape.micro_batch_size is not None
        return divide_short(sizes, micro_batch_size=shape.micro_batch_size, multiple=shape.multiple)

    def divide_any(self, sizes: list[int]) -> Division:
        """Return how shares of any sizes are cut that nothing is trained on, in pieces no larger than the plan's."""
        shape = self._shape
        self._check_copies(sizes)
        if not max(sizes):
            raise UsageError("this call has no sequence on any rank", hint="give the engine a batch")
        most = shape.micro_batch_size or -(-max(sizes) // shape.num_microbatches)
        return divide_short(sizes, micro_batch_size=most, multiple=shape.multiple)

    def _check_copies(self, sizes: list[int]) -> None:
        """Raise `UsageError` where ranks that hold parts of one copy of the model bring batches of different sizes."""
        by_copy: dict[int, int] = {}
        for rank, size in enumerate(sizes):
            copy = self._grid.coordinates(rank)["dp"]
            if by_copy.setdefault(copy, size) != size:
                raise UsageError(
                    f"rank {rank} has {size} sequences for this step, and another rank with parts of the same copy of "
                    f"the model has {by_copy[copy]}",
                    hint="ranks of one copy take the same batch; job.shard gives it to them",
                )
