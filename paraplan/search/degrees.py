"""The products of axes over a number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from paraplan.plan.parallel import AXES, MEGATRON_RANK_ORDER, Axis, Degree


@dataclass(frozen=True)
class Degrees:
    """One product of axes, and over how many of the ranks of dp and cp experts go."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int = 1
    tensor_experts: int = 1
    """Ranks of tp that have experts of their own beside each other: all of them, or 1 where they divide each."""

    @property
    def sizes(self) -> dict[Axis, int]:
        """The axes by name."""
        return {axis: getattr(self, axis) for axis in MEGATRON_RANK_ORDER}

    @property
    def named(self) -> dict[Degree, int]:
        """All degrees by name."""
        return {axis.name: getattr(self, axis.name) for axis in AXES}

    @property
    def options(self) -> dict[Degree, int]:
        """All degrees as options name them: `--ep` counts every rank that has experts of its own."""
        return self.named | {"ep": self.ep * self.tensor_experts}


def all_degrees(num_gpus: int, *, num_experts: int = 1, whole_experts: bool = False) -> Iterator[Degrees]:
    """Yield each product of the axes of ranks that equals `num_gpus`, with every ep that suits it and the experts.

    `whole_experts` says that those of a mixture go over the ranks of tp too.
    """
    is_whole = whole_experts and num_experts > 1
    inner = [axis.name for axis in AXES if axis.multiplies_ranks and axis.name != "dp"]
    for sizes in _products(num_gpus, len(inner)):
        named: dict[str, int] = dict(zip(inner, sizes, strict=True))
        named["dp"] = num_gpus // prod(sizes)
        beside = max(1, num_experts // named["tp"]) if is_whole else num_experts
        for ep in divisors(gcd(named["dp"] * named["cp"], beside)):
            yield Degrees(**named, ep=ep, tensor_experts=named["tp"] if is_whole else 1)


def _products(number: int, num_factors: int) -> Iterator[tuple[int, ...]]:
    """Yield all that many numbers whose product divides `number`."""
    if not num_factors:
        yield ()
        return
    for first in divisors(number):
        for rest in _products(number // first, num_factors - 1):
            yield first, *rest


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, from 1 up."""
    small = [candidate for candidate in range(1, int(number**0.5) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})
