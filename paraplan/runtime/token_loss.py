"""The loss of trainings that are run for their cost or their equality, not for what they learn."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses


def token_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits [batch, tokens, vocabulary], or the mean of outputs of another shape."""
    logits = getattr(outputs, "logits", outputs)
    if isinstance(logits, (tuple, list)):
        logits = logits[0]
    if logits.dim() == 3 and logits.shape[:2] == targets.shape:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    mean: torch.Tensor = logits.float().mean()
    return mean
