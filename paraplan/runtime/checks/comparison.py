"""How far apart two runs of the same sequences are: the loss, gradients and buffers, by one set of tolerances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paraplan.runtime.exchange import gathered_numbers
from paraplan.runtime.mesh import Mesh

_LARGEST_SCALE = 1e-3  # a tensor below this share of the largest one is measured by that


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may be apart: of the loss, and of a tensor relative to its own size."""

    loss: float
    tensor: float


# Sums in another order are 1e-7 off in fp32, and 1e-6 in a gradient. In 16 bits products are rounded by 2**-8, many of
# which meet in a gradient. What is further off than ROUNDING is measured against the noise of a run, up to MOST.
ROUNDING = {True: Tolerance(loss=1e-3, tensor=3e-2), False: Tolerance(loss=1e-6, tensor=1e-5)}
MOST = {True: Tolerance(loss=2e-2, tensor=0.3), False: Tolerance(loss=2e-5, tensor=2e-4)}
"""By whether 16 bits are computed in."""
_OF_NOISE = 8.0
_FEW, _OF_FEW = 16, 10.0
"""A gradient of few elements may be this many times as far off: what they sum may nearly cancel in all of them."""
_KINDS = ("the loss", "the gradient", "buffer")
_OF_OTHERS = ("the loss", "the gradient of a parameter of rank {}", "a buffer of rank {}")


@dataclass(frozen=True)
class Difference:
    """The worst of what is apart on all ranks. `loss` and `expected` are those of the rank that has it."""

    name: str
    size: float
    loss: float
    expected: float

    def __str__(self) -> str:
        return f"{self.name} is {self.size:.1e} off"


@dataclass
class Comparison:
    """The result of one run on this rank beside another one."""

    loss: float = 0.0
    expected: float = 0.0
    _tensors: dict[str, tuple[float, float]] = field(default_factory=dict)
    _buffers: dict[str, float] = field(default_factory=dict)
    _few: set[str] = field(default_factory=set)
    _largest: float = 0.0

    @classmethod
    def of(
        cls,
        loss: float,
        expected: float,
        gradients: Mapping[str, torch.Tensor] | None = None,
        wanted: Mapping[str, torch.Tensor] | None = None,
    ) -> Comparison:
        """Return the comparison of two runs by their losses, and by their gradients where these are given."""
        found, gradients, wanted = cls(loss, expected), gradients or {}, wanted or {}
        for name in dict.fromkeys([*gradients, *wanted]):
            found.add(name, gradients.get(name), wanted.get(name))
        return found

    def add(self, name: str, found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
        """Compare two gradients; None stands for zeros."""
        size = self.measure(expected)
        if expected is not None and expected.numel() < _FEW:
            self._few.add(f"the gradient of {name}")
        if found is None or expected is None:
            self._tensors[name] = self._size(expected if found is None else found), size
        else:
            self._tensors[name] = self._size(found.float() - expected.to(found.device).float()), size

    def measure(self, expected: torch.Tensor | None) -> float:
        """Return the size of a gradient, and know it for how large the largest one is."""
        size = self._size(expected)
        self._largest = max(self._largest, size)
        return size

    def add_buffer(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare two buffers, of which entries that are infinite in both agree."""
        if found.shape != expected.shape:
            self._buffers[name] = math.inf
        elif found.numel():
            values = expected.double()
            scale = max(self._size(values.masked_fill(~values.isfinite(), 0.0)), 1e-3)
            self._buffers[name] = self._size((found.double() - values).masked_fill(found == expected, 0.0)) / scale

    @staticmethod
    def _size(tensor: torch.Tensor | None) -> float:
        return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())

    def gaps(self) -> dict[str, float]:
        """Return how far each is off, relative to its size; not a number where one is none."""
        least = max(_LARGEST_SCALE * self._largest, 1e-30)
        gaps = {"the loss": relative(self.loss, self.expected)}
        gaps |= {f"the gradient of {name}": off / max(size, least) for name, (off, size) in self._tensors.items()}
        return gaps | {f"buffer {name}": gap for name, gap in self._buffers.items()}

    def worst(self, allowed: Tolerance, mesh: Mesh, *, noise: Sequence[Comparison] = ()) -> Difference | None:
        """Return the worst of what is further off than `allowed` on any rank, the same on all; None where nothing is.

        `noise` compares runs that differ in their rounding alone: some times as much is allowed, up to `MOST`.
        """
        ratios, gaps, noises = {}, self.gaps(), [one.gaps() for one in noise]
        most = MOST[allowed in (ROUNDING[True], MOST[True])]
        for name, gap in gaps.items():
            least, largest = (allowed.loss, most.loss) if name == "the loss" else (allowed.tensor, most.tensor)
            least *= _OF_FEW if name in self._few else 1.0
            own = [of_noise.get(name, 0.0) for of_noise in noises]
            within = max([_OF_NOISE * one for one in own if one <= largest], default=0.0)  # the others are no noise
            within = min(max(least, within), largest)
            ratios[name] = math.inf if math.isnan(gap) else gap / within
        name = max(ratios, key=ratios.__getitem__)
        kind = next(place for place, start in enumerate(_KINDS) if name.startswith(start))
        rows = gathered_numbers([ratios[name], gaps[name], self.loss, self.expected, float(kind)], mesh.world)
        rank = max(range(len(rows)), key=lambda one: rows[one][0])
        ratio, size, loss, expected, of_rank = rows[rank]
        if not ratio > 1.0:
            return None
        if rank != mesh.world.rank and rows[mesh.world.rank][:2] != [ratio, size]:
            name = _OF_OTHERS[int(of_rank)].format(rank)
        return Difference(name, size, loss, expected)


def relative(one: float, other: float) -> float:
    """Return how far two losses are apart; nothing where both are not finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-3)
