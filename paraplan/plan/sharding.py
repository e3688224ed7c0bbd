"""How FSDP divides one parameter over ranks; the runtime shards by it and the memory model counts by it."""

from __future__ import annotations

from collections.abc import Sequence

_LARGEST_WASTE = 1.125


def sharded_dimension(shape: Sequence[int], num_shards: int) -> int:
    """Return the dimension of a parameter of this shape that is divided into `num_shards`.

    That is the first one, as `fully_shard` does it, unless the fullest rank would then hold over an eighth more than
    an even share (stacked experts: 8 matrices over 32 ranks) and another dimension divides evenly, which
    `fully_shard` asks of every dimension but the first.
    """
    if len(shape) < 2 or padded_share(shape[0], num_shards) <= _LARGEST_WASTE:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % num_shards == 0), 0)


def padded_share(size: int, num_shards: int) -> float:
    """Return how much more than an even share of `size` rows the first of `num_shards` ranks holds, 1 for no more."""
    return -(-size // num_shards) * num_shards / max(size, 1)
