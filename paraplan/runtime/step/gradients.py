"""The gradients of a step between the backward pass and the optimizer: brought to their size, and clipped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from paraplan.runtime.mesh import Mesh
from paraplan.runtime.step.clipping import clip_factor, global_norm, scale_gradients
from paraplan.runtime.step.loss_scale import LossScale


@dataclass(frozen=True)
class GradientFinish:
    """Multiplies, unscales and clips the gradients of one rank. They are read once for their norm and written once.

    `repeated` names those that an earlier pipeline stage counts in the norm, `split` those that ranks of `tp` hold
    parts of. `has_values` is False where tensors have none.
    """

    mesh: Mesh
    max_norm: float | None
    scale: LossScale | None
    repeated: Collection[str] = ()
    split: Collection[str] = ()
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
        norm = global_norm(counted, self.mesh, split=self.split)
        if by is not None:
            norm = norm * by
        if self.scale is not None and self.has_values:
            # The norm of the whole model's gradient is finite where every part of it is, on every rank.
            overflowed = not bool(norm.isfinite())
            self.scale.update(overflowed=overflowed)
            if overflowed:
                return norm, False
        if self.max_norm is not None:
            clip = clip_factor(norm, max_norm=self.max_norm)
            by = clip if by is None else clip * by
        if by is not None:
            scale_gradients(gradients.values(), by)
        return norm, True
