"""Random numbers that differ between the ranks of a `tp` group, where each drops out of its own part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paraplan.runtime.split.group import TensorGroup


@contextmanager
def own_random_numbers(group: TensorGroup, device: torch.device, *, is_active: bool) -> Iterator[None]:
    """Draw this rank's own random numbers in this context, and leave the common sequence one draw further.

    The seed is drawn from the sequence that all ranks of the group share, so that a recomputed block, which starts from
    the same state, draws the same again.
    """
    if not is_active or group.handle is None:
        yield
        return
    seed = int(torch.randint(2**48, ()))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed * group.size + group.index)
        yield
