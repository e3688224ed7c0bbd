"""State that a model writes in its forward pass: running statistics, moving averages, counters, and weights.

Where a plan divides a batch, buffers see its parts. They stay the same on all replicas: those of the first one.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.checks.trials import first_rank
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.structure.snapshots import state_of
from paraplan.runtime.structure.weights import is_quantized, local_shard

Buffers = dict[str, torch.Tensor]
WeightSums = dict[str, tuple[float, float]]


class ForwardState:
    """The buffers that the forward pass of one rank's `module` writes in training, by their names in it."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._module = module
        self._mesh = mesh
        self._written: dict[str, None] = {}
        self._sums: list[WeightSums] = []

    def buffers(self) -> Buffers:
        """Return copies of what a forward pass may write."""
        return {name: local_shard(one).clone() for name, one in state_of(self._module).items()}

    def note(self, before: Buffers) -> None:
        """Take note of what a pass has written, and of the weights."""
        now = {name: local_shard(one) for name, one in state_of(self._module).items() if name in before}
        self._written |= {name: None for name, one in now.items() if not _same(one, before[name])}
        if len(self._sums) == 1:
            self._sums.append(weight_sums(self._module))

    def watch_weights(self) -> None:
        """Begin to look at weights, which no pass but the first one behind this may write."""
        self._sums = [weight_sums(self._module)]

    def check_weights(self) -> None:
        """Raise `UnsupportedPlanError` on every rank where a forward pass has written weights anew.

        What the first one wrote (a weight that is clamped) and the others left alone is the same on all ranks.
        """
        if not self._sums:
            return
        before, self._sums, now = self._sums[-1], [], weight_sums(self._module)
        written = [name for name, one in before.items() if one != now[name] and not any(map(math.isnan, one))]
        rank = first_rank(bool(written), self._mesh)
        if rank is not None and self._mesh.world.size > 1:
            raise written_weights(written[0] if written else f"a parameter of rank {rank}")

    def named(self, *, counters: bool = False) -> str | None:
        """Return one of the buffers that are written from a batch, or one of `counters`; None without any."""
        held = state_of(self._module)
        known = (name for name in self._written if name in held)
        return next((name for name in known if held[name].is_floating_point() is not counters), None)

    def share(self) -> None:
        """Give all replicas the buffers of the first one."""
        group = self._mesh.replica_group
        if group is None or not self._written:
            return
        held = state_of(self._module)
        for name in self._written:
            if name in held and not isinstance(held[name], DTensor):  # else each rank has its own part
                dist.broadcast(held[name].data, group=group, group_src=0)


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
        name: local_shard(one)
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


def written_weights(name: str) -> UnsupportedPlanError:
    """Return what is said of a parameter that a forward pass writes."""
    return UnsupportedPlanError(
        f"the model writes {name.removeprefix('model.')}, which is trained, in its forward pass: ranks would not write "
        "what one process does",
        hint="write weights between steps (engine.on_step), or keep what is written in a buffer",
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
