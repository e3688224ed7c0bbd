"""One ring or line through GPUs, exact in a fixed time: by the sets of GPUs that a line may have passed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_GPUS = 16
"""GPUs up to which all sets of them are looked at, some ten milliseconds for 16."""


def find_chain(masks: Sequence[int], *, length: int, closes: bool) -> tuple[int, ...] | None:
    """Return `length` GPUs of which each reaches the next, and with `closes` the last the first; None if none do.

    `masks[g]` are the GPUs, as bits, that g reaches; at most `MAX_GPUS`. For every set of GPUs it is found at which of
    them a line through the whole set can end (Held and Karp, A dynamic programming approach to sequencing problems,
    1962); a ring is a line from the set's lowest GPU.
    """
    num_gpus = len(masks)
    sets = np.arange(1 << num_gpus, dtype=np.int64)
    sizes = sum((sets >> gpu) & 1 for gpu in range(num_gpus))
    ends = np.zeros_like(sets)
    ends[1 << np.arange(num_gpus)] = 1 << np.arange(num_gpus)
    for size in range(2, length + 1):
        layer = sets[sizes == size]
        for gpu in range(num_gpus):
            bit = 1 << gpu
            chosen = layer[(layer & bit) > 0]
            if closes:
                chosen = chosen[(chosen & (bit - 1)) > 0]
            reached = (ends[chosen ^ bit] & masks[gpu]) > 0
            ends[chosen[reached]] |= bit
    for passed in (int(each) for each in sets[(sizes == length) & (ends > 0)]):
        last = int(ends[passed])
        if closes:
            last &= masks[(passed & -passed).bit_length() - 1]
        if last:
            return _walk_back(passed, last, ends, masks)
    return None


def _walk_back(passed: int, last: int, ends: np.ndarray, masks: Sequence[int]) -> tuple[int, ...]:
    chain = []
    while True:
        gpu = (last & -last).bit_length() - 1
        chain.append(gpu)
        passed ^= 1 << gpu
        if not passed:
            return tuple(reversed(chain))
        last = int(ends[passed]) & masks[gpu]
