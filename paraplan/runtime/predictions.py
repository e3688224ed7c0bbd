"""What a model returns, whole on every rank that asks: joined over micro-batches, and gathered from where it lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.generation import Options, generate
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.rank_part import RankPart
from paraplan.runtime.split.outputs import map_outputs, numbered_outputs
from paraplan.runtime.split.split_tensor import SplitTensor
from paraplan.runtime.step.batches import MicroBatch, batch_size, is_of_batch, split_batch, to_device
from paraplan.runtime.step.execution import Execution
from paraplan.runtime.step.loss import LossRule
from paraplan.runtime.step.micro_batching import MicroBatching
from paraplan.runtime.torch_private import pytree


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Have `module` and its parts in evaluation mode in this context, and in their own modes behind it."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was_training in modes.items():
            part.training = was_training


class Predictor:
    """What the model of one engine returns, without a graph and without dropout, on every rank as in one process."""

    def __init__(self, part: RankPart, plan: ParallelPlan, mesh: Mesh, batches: MicroBatching) -> None:
        self._part = part
        self._plan = plan
        self._mesh = mesh
        self._batches = batches

    def predict(self, inputs: Any) -> Any:
        """Return what the model returns for `inputs`, which are the share of this rank; see `Engine.predict`."""
        division = self._batches.divider.divide_any(self._batches.meet("predict", batch_size(inputs, None)))
        pieces = split_batch(to_device(inputs, self._mesh.world.device), None, division)
        with evaluation_mode(self._part.module):
            return predict(self._part.execution, pieces, self._mesh)

    def generate(self, inputs: Any, options: Options) -> Any:
        """Return what the model's own `generate` returns for `inputs`; see `Engine.generate`."""
        splits_tokens = self._plan.sequence_parallel and self._plan.tp > 1
        return generate(
            self._part.model or self._part.module,
            self.predict,
            to_device(inputs, self._mesh.world.device),
            mesh=self._mesh,
            tokens_multiple=self._plan.cp * (self._plan.tp if splits_tokens else 1),
            options=options,
        )


def predict(execution: Execution, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> Any:
    """Return what the model returns for `micro_batches`, which are the share of this rank, on every rank of a pipeline.

    Tensors have the batch first where there are several micro-batches. Objects that are not tensors, numbers, texts or
    nests of them (caches) are None. Raises `UsageError` for tensors that cannot be joined.
    """
    found: dict[int, Any] = {}

    def keep(outputs: Any, number: int) -> torch.Tensor:
        found[number] = map_outputs(lambda _, tensor: whole_output(tensor), _plain_outputs(outputs))
        return torch.zeros((), device=mesh.world.device)

    pieces = [replace(piece, targets=number, weight=1.0) for number, piece in enumerate(micro_batches)]
    with execution.loss.replaced(keep, LossRule(kind="whole")):
        execution.evaluate(pieces)
    joined = _join([found[number] for number in sorted(found)], pieces) if found else None
    return joined if mesh.group("pp") is None else _from_the_last_stage(joined, mesh)


def whole_output(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of an output of which the ranks of `tp` and `cp` hold parts; all of them call it."""
    if isinstance(tensor, SplitTensor):
        return tensor.group.gather(whole_output(tensor.local).detach(), tensor.cut)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain_outputs(outputs: Any) -> Any:
    def plain(leaf: Any) -> Any:
        is_kept = isinstance(leaf, (torch.Tensor, bool, int, float, str)) or is_dataclass(leaf)
        return leaf if is_kept else None

    # Caches are leaves here, also those that transformers has taught torch to look into.
    return pytree.tree_map(plain, outputs, is_leaf=lambda node: not isinstance(node, (dict, list, tuple)))


def _join(outputs: Sequence[Any], pieces: Sequence[MicroBatch]) -> Any:
    """Return the outputs of all micro-batches as one; of those that no sequence is left for nothing."""
    if len(outputs) == 1 and pieces[0].num_sequences:
        return outputs[0]
    by_piece = [numbered_outputs(output) for output in outputs]

    def join(number: int, first: torch.Tensor) -> torch.Tensor:
        rows = next(leaf.shape[0] for leaf in pytree.tree_leaves(pieces[0].inputs) if is_of_batch(leaf))
        if not first.ndim or first.shape[0] != rows:
            raise UsageError(
                f"the model returns a tensor of shape {tuple(first.shape)} for {rows} sequences, and those of "
                f"{len(pieces)} micro-batches cannot be joined to one of all",
                hint="return tensors with the batch first, and no loss, or predict with one micro-batch",
            )
        parts = [tensors[number] for tensors, piece in zip(by_piece, pieces, strict=True) if piece.num_sequences]
        return torch.cat(parts) if parts else first[:0]

    return map_outputs(join, outputs[0])


def _from_the_last_stage(outputs: Any, mesh: Mesh) -> Any:
    """Return on every rank of a pipeline what its last rank has."""
    group = mesh.group("pp")
    assert group is not None
    source = dist.get_global_rank(group, mesh.size("pp") - 1)
    held = numbered_outputs(outputs) if mesh.is_last_stage else {}
    box: list[Any] = [None]
    if mesh.is_last_stage:
        box = [map_outputs(lambda _, tensor: torch.empty_like(tensor, device="meta"), outputs)]
    dist.broadcast_object_list(box, src=source, group=group, device=mesh.world.device)

    def receive(number: int, shape: torch.Tensor) -> torch.Tensor:
        given = held.get(number)
        values = torch.empty(shape.shape, dtype=shape.dtype, device=mesh.world.device)
        values = values if given is None else given.contiguous()
        dist.broadcast(values, src=source, group=group)
        return values

    return map_outputs(receive, box[0])
