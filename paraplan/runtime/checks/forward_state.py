"""Buffers that a model writes in its forward pass: running statistics, moving averages, counters.

In one process they see the whole batch, once for each step. Where a plan divides the batch they would see its parts,
so that this is refused unless the user asks for it; then they stay the same on all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.batch_norm import batch_norms
from paraplan.runtime.checks.trials import gathered_numbers, state_of
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.structure.weights import is_quantized

BatchStatistics = Literal["global", "local"]
Buffers = dict[str, torch.Tensor]
WeightSums = dict[str, tuple[float, float]]


class ForwardState:
    """The buffers that the forward pass of one rank's `module` writes in training, by their names in it."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._module = module
        self._mesh = mesh
        self._written: list[str] = []
        self.is_written = False

    def buffers(self) -> Buffers:
        """Return copies of what a forward pass may write."""
        return {name: _local(one).clone() for name, one in state_of(self._module).items()}

    def is_anywhere(self) -> bool:
        """Return whether a forward pass may write something on any rank. Every rank calls it."""
        return any(row[0] for row in gathered_numbers([float(bool(state_of(self._module)))], self._mesh))

    def find(
        self, before: Buffers, after: Sequence[Buffers], plan: ParallelPlan, *, statistics: BatchStatistics
    ) -> None:
        """Find out which buffers are written.

        They were as `before`, and as `after` says after either of two sequences, and after the first one with
        `other_weights`, if there is such a pass: a moving average of weights starts as these. Every rank calls it.
        Raises `UnsupportedPlanError` on every rank where buffers are written from a part of a batch in the place of it
        all, or more than once in a step.
        """
        first, second, *others = after
        written = [name for name in before if not all(_same(one[name], before[name]) for one in (first, *others))]
        by_data = [name for name in written if not _same(first[name], second[name])]
        normalized = [
            f"{name}.{buffer}"
            for name, one in batch_norms(self._module).items()
            for buffer, _ in one.named_buffers(recurse=False, remove_duplicate=False)
        ]
        self._written = [*written, *(name for name in normalized if name in before)]
        self.is_written = any(row[0] for row in gathered_numbers([float(len(self._written))], self._mesh))
        # What depends on no data is as in one process where it is written once in a step.
        wrong = written if plan.num_microbatches > 1 else by_data
        if statistics == "global":
            self._refuse(wrong, plan)

    def share(self) -> None:
        """Give all replicas the buffers of the first one."""
        group = self._mesh.replica_group
        if group is None:
            return
        held = state_of(self._module)
        for name in self._written:
            if isinstance(held[name], DTensor):
                continue  # each rank has its own part
            dist.broadcast(held[name].data, group=group, group_src=0)

    def _refuse(self, wrong: Sequence[str], plan: ParallelPlan) -> None:
        rows = gathered_numbers([float(len(wrong))], self._mesh)
        ranks = [rank for rank, (count,) in enumerate(rows) if count]
        if not ranks:
            return
        name = wrong[0].removeprefix("model.") if wrong else f"a buffer of rank {ranks[0]}"
        raise UnsupportedPlanError(
            f"the model writes {name} in its forward pass, and dp={plan.dp} x num_microbatches={plan.num_microbatches} "
            "divides a batch: what it writes would not be that of one process",
            hint="use a plan of one rank of dp and one micro-batch, or job.prepare(batch_statistics='local') to write "
            "it from micro-batches",
        )


_BITS = {
    torch.float64: (torch.int64, 1 << 49),
    torch.float32: (torch.int32, 1 << 20),
    torch.float16: (torch.int16, 1 << 7),
    torch.bfloat16: (torch.int16, 1 << 4),
}
"""Integers as wide as numbers of a type, and the bit that makes a number up to an eighth larger or smaller."""


@contextmanager
def other_weights(module: nn.Module) -> Iterator[None]:
    """Have trained weights differ by up to an eighth in this context, and be the same to the bit after it.

    Not under ZeRO, where a forward pass may compute with what was gathered before.
    """
    is_sharded = any(isinstance(one, FSDPModule) for one in module.modules())
    trained = [one for one in module.parameters() if one.requires_grad and one.dtype in _BITS and not is_quantized(one)]
    held = [] if is_sharded else [_local(one) for one in trained]

    def change() -> None:
        for one in held:
            integers, bit = _BITS[one.dtype]
            one.view(integers).bitwise_xor_(bit)

    change()
    try:
        yield
    finally:
        change()


def weight_sums(module: nn.Module) -> WeightSums:
    """Return two numbers for each parameter of `module` that `state_of` leaves out: others once it is written.

    None under ZeRO: forward passes write into copies, which are let go.
    """
    if any(isinstance(one, FSDPModule) for one in module.modules()):
        return {}
    known = state_of(module)
    tables = {
        f"{name}.weight".lstrip(".")
        for name, one in module.named_modules()
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.max_norm is not None  # see check_written_tables
    }
    held = {
        name: _local(one)
        for name, one in module.named_parameters()
        if name not in known and name not in tables and not is_quantized(one) and one.is_floating_point()
    }
    numbers = [
        torch.stack([one.sum(dtype=torch.float64), torch.linalg.vector_norm(one, dtype=torch.float64)])
        for one in held.values()
    ]
    if not numbers:
        return {}
    pairs = torch.stack([one.to(numbers[0].device) for one in numbers]).tolist()
    return {name: (first, second) for name, (first, second) in zip(held, pairs, strict=True)}


def check_weights_stay(sums: Sequence[WeightSums], mesh: Mesh) -> None:
    """Raise `UnsupportedPlanError` on every rank where a forward pass has written weights anew.

    `sums` are those before a pass and after each of some. What the first one wrote (a weight that is clamped) and the
    others left alone is the same on all ranks.
    """
    written = [name for one, other in pairwise(sums[1:]) for name in one if _differ(one[name], other[name])]
    rows = gathered_numbers([float(bool(written))], mesh)
    ranks = [rank for rank, (is_written,) in enumerate(rows) if is_written]
    if ranks and mesh.world.size > 1:
        raise written_weights(written[0] if written else f"a parameter of rank {ranks[0]}")


def _differ(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and not any(map(math.isnan, one))


def written_weights(name: str) -> UnsupportedPlanError:
    """Return what is said of a parameter that a forward pass writes."""
    return UnsupportedPlanError(
        f"the model writes {name.removeprefix('model.')}, which is trained, in its forward pass: ranks would not write "
        "what one process does",
        hint="write weights between steps (engine.on_step), or keep what is written in a buffer",
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
