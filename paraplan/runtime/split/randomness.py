"""Random numbers of code that ranks run on parts of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paraplan.runtime.shards.group import TensorGroup


@contextmanager
def own_random_numbers(group: TensorGroup, device: torch.device, *, is_active: bool) -> Iterator[None]:
    """Draw this rank's own random numbers in this context, and leave the common sequence one draw further."""
    if not is_active or group.handle is None or group.numbers.are_apart:
        yield
        return
    group.numbers.apart(device)
    try:
        yield
    finally:
        group.numbers.together()


DROPOUTS = frozenset({"dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout"})
DROPOUTS |= {"feature_dropout", "feature_dropout_", "dropout1d", "dropout2d", "dropout3d"}
"""Functions that draw one number for each element, or each part, of the tensor that they are given."""
