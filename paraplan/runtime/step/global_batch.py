"""Outputs and targets of the global batch on every rank, for losses that compare its sequences with each other."""

from __future__ import annotations

from typing import Any

import torch

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.data.batches import is_of_batch
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.shards.group import TensorGroup, all_gather
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.logits import classes_of
from paraplan.runtime.structure.outputs import map_outputs
from paraplan.runtime.torch_private import pytree


def check_gathers(plan: ParallelPlan) -> None:
    """Raise `UnsupportedPlanError` for a plan under which the outputs of a batch are never there together."""
    if plan.pp * plan.cp * plan.num_microbatches > 1:
        raise UnsupportedPlanError(
            f"batch_coupling='gather' needs the outputs of a whole step at once, and the plan has pp={plan.pp}, "
            f"cp={plan.cp} and num_microbatches={plan.num_microbatches}",
            hint="use pp=1, cp=1 and one micro-batch a step; recompute=full saves the memory that smaller ones would",
        )


class GlobalBatch:
    """Joins what the ranks of `dp` have, in their order, which is that of the sequences in the global batch."""

    def __init__(self, mesh: Mesh) -> None:
        self._group = TensorGroup.of(mesh, "dp")

    def join(self, outputs: Any, targets: Any, *, num_sequences: int) -> tuple[Any, Any]:
        """Return `outputs` and `targets` of all ranks of `dp`, which have `num_sequences` each.

        Gradients go back to the rank that an output is from, summed over the ranks. Tensors without an entry for each
        sequence stay as they are. Raises `UsageError` where no output has one.
        """
        if self._group.size == 1:
            return outputs, targets
        joined = 0

        def join_output(_: int, tensor: torch.Tensor) -> torch.Tensor:
            nonlocal joined
            if classes_of(tensor) is not None:
                raise UnsupportedPlanError(
                    "batch_coupling='gather', and the ranks of tp or cp hold a part each of what the model returns",
                    hint="return tensors that are whole (pooled embeddings, say), or use tp=1 and cp=1",
                )
            if not tensor.ndim or tensor.shape[0] != num_sequences:
                return tensor
            joined += 1
            return self._join(tensor)

        outputs = map_outputs(join_output, outputs)
        if not joined:
            raise UsageError(
                f"batch_coupling='gather', but the model returns no tensor with an entry for each of "
                f"{num_sequences} sequences",
                hint="return what loss_fn compares, with the batch first",
            )
        targets = pytree.tree_map(lambda leaf: self._join(leaf) if is_of_batch(leaf) else leaf, targets)
        return outputs, targets

    def _join(self, tensor: torch.Tensor) -> torch.Tensor:
        sharding = Sharding(dim=0, segments=(tensor.shape[0] * self._group.size,), size=self._group.size)
        if tensor.dtype == torch.bool:
            return all_gather(tensor.view(torch.uint8), sharding, self._group).view(torch.bool)
        return all_gather(tensor, sharding, self._group)
