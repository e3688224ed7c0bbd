"""Scaling of the loss in fp16, whose smallest gradients would otherwise be rounded to zero.

The loss is multiplied by a scale before the backward pass and the gradients are divided by it after. Where a gradient
has overflowed the step is left out and the scale shrinks; after many steps without that it grows (Micikevicius et al.
2018, section 3.2; the numbers are those of torch.amp.GradScaler).
"""

from __future__ import annotations

from dataclasses import dataclass

INITIAL_SCALE = 2.0**16
_GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0, 0.5, 2000


@dataclass
class LossScale:
    """The scale, the steps since it last changed, and how many steps were left out. The same on every rank."""

    scale: float = INITIAL_SCALE
    steady_steps: int = 0
    skipped_steps: int = 0

    def update(self, *, overflowed: bool) -> None:
        """Take note of a step whose gradients have overflowed, anywhere in the model, or not."""
        if overflowed:
            self.scale *= _BACKOFF
            self.steady_steps = 0
            self.skipped_steps += 1
            return
        self.steady_steps += 1
        if self.steady_steps == _GROWTH_INTERVAL:
            self.scale *= _GROWTH
            self.steady_steps = 0
