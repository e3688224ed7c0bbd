"""The gradients of a step between the backward pass and the optimizer: brought to their size, and clipped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import LossScale
from paraplan.runtime.shards.group import Shardings
from paraplan.runtime.structure.weights import local_shard
from paraplan.runtime.torch_private import multiply_all


@dataclass(frozen=True)
class GradientClipping:
    """Multiplies, unscales and clips the gradients of one rank. They are read once for their norm and written once.

    `repeated` names those that an earlier pipeline stage counts in the norm, `shardings` those that ranks hold
    parts of. `has_values` is False where tensors have none.
    """

    mesh: Mesh
    max_norm: float | None
    scale: LossScale | None
    repeated: Collection[str] = ()
    shardings: Shardings = field(default_factory=Shardings)
    has_values: bool = True

    def finish(
        self, gradients: Mapping[str, torch.Tensor], factor: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, bool]:
        """Return the norm of the whole model's gradient before clipping, and whether the step can be done.

        Both are the same on every rank; the norm is None where nothing needs it. `factor` is what the gradients lack.
        """
        by: torch.Tensor | float | None = factor
        if self.scale is not None:
            by = 1.0 / self.scale.scale if factor is None else factor / self.scale.scale
        if self.max_norm is None and self.scale is None:
            if by is not None:
                scale_gradients(gradients.values(), by)
            return None, True
        counted = {name: gradient for name, gradient in gradients.items() if name not in self.repeated}
        norm = global_norm(counted, self.mesh, shardings=self.shardings)
        if by is not None:
            norm = norm * by
        if self.scale is not None and self.has_values:
            # The norm of the whole model's gradient is finite where every part of it is, on every rank.
            overflowed = not bool(norm.isfinite())
            self.scale.update(overflowed=overflowed)
            if overflowed:
                return norm, False
        if self.max_norm is not None:
            clip = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
            by = clip if by is None else clip * by
        if by is not None:
            scale_gradients(gradients.values(), by)
        return norm, True


def global_norm(gradients: Mapping[str, torch.Tensor], mesh: Mesh, shardings: Shardings) -> torch.Tensor:
    """Return the 2-norm of the gradient of the whole model, the same on every rank, as a scalar tensor.

    `gradients` are this rank's by the names of their parameters. What is cut is summed: shards (DTensors) and experts
    over `dp` and `cp`, parts of layers over `tp`, and all over the stages of the pipeline. A gradient that several
    stages hold must be given by one of them only.
    """

    def square_of(*, is_split: bool, is_sharded: bool, is_expert: bool) -> torch.Tensor:
        chosen = [
            gradient.to_local() if isinstance(gradient, DTensor) else gradient
            for name, gradient in gradients.items()
            if (name in shardings.tensor, isinstance(gradient, DTensor), name in shardings.expert)
            == (is_split, is_sharded, is_expert)
        ]
        return _squared_norm(chosen, mesh.world.device)

    def of_parts(*, is_sharded: bool, is_expert: bool = False) -> torch.Tensor:
        """Return the square of what ranks of `tp` hold whole, and that of what they hold parts of."""
        return torch.stack(
            [square_of(is_split=part, is_sharded=is_sharded, is_expert=is_expert) for part in (False, True)]
        )

    def summed(square: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        if group is not None:
            dist.all_reduce(square, group=group)
        return square

    # Both squares travel together: over dp and cp those of shards, and over tp those of parts.
    has_shards = any(isinstance(gradient, DTensor) for gradient in gradients.values())  # alike on the ranks of a group
    shards = of_parts(is_sharded=True)
    if mesh.expert_mesh is not None:
        has_shards = True
        shards += of_parts(is_sharded=True, is_expert=True)
        shards += of_parts(is_sharded=False, is_expert=True) / mesh.expert_mesh.size(0)
    sharded = summed(shards, mesh.shard_group if has_shards else None)
    whole, part = sharded + of_parts(is_sharded=False)
    return summed(whole + summed(part.clone(), mesh.group("tp")), mesh.group("pp")).sqrt()


def scale_gradients(gradients: Iterable[torch.Tensor], by: torch.Tensor | float) -> None:
    """Multiply gradients by a number, in place, all in one call for each of their devices and types."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        local = local_shard(gradient)
        groups.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), alike in groups.items():
        multiply_all(alike, by.to(device) if isinstance(by, torch.Tensor) else by)


def _squared_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(tensors).to(device, torch.float32).square()
