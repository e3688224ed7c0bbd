"""How far two sets of tensors are apart: gradients of a plan and of one process, of a whole batch and of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_LARGEST_SCALE = 1e-3  # a tensor below this share of the largest one is measured by that


@dataclass
class Gaps:
    """The largest difference of each of some tensors, relative to its own largest value."""

    _found: dict[str, tuple[float, float]] = field(default_factory=dict)
    _largest: float = 0.0

    def add(self, name: str, found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
        """Compare two tensors; None stands for zeros."""
        size = self.measure(expected)
        given = found if found is not None else expected
        if given is None or not given.numel():
            self._found[name] = 0.0, size
        elif found is None or expected is None:
            self._found[name] = float(given.abs().max()), size
        else:
            self._found[name] = float((found.float() - expected.to(found.device).float()).abs().max()), size

    def measure(self, expected: torch.Tensor | None) -> float:
        """Return the size of a tensor, and know it for how large the largest one is."""
        size = 0.0 if expected is None or not expected.numel() else float(expected.abs().max())
        self._largest = max(self._largest, size)
        return size

    def relative(self) -> dict[str, float]:
        """Return the gaps, not a number where one is."""
        least = max(_LARGEST_SCALE * self._largest, 1e-30)
        return {name: off / max(size, least) for name, (off, size) in self._found.items()}


def gaps_between(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return how far the tensors of two sets are apart, by name."""
    gaps = Gaps()
    for name in found | expected:
        gaps.add(name, found.get(name), expected.get(name))
    return gaps.relative()
