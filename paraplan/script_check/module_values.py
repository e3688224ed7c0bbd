"""Notes of the values between modules of a model in the first step: sums of them, or the whole, with gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paraplan.script_check.batches import sums_of, tensors_in
from paraplan.script_check.sources import Sources

_MOST_NOTED = 1 << 24
"""Numbers that are noted whole, with those of gradients."""


class ModuleValues:
    """Values that modules inside of models are given, and give, while gradients are recorded."""

    def __init__(self, sources: Sources, *, is_whole: bool) -> None:
        self.sources, self.is_whole = sources, is_whole
        self.sums: dict[str, tuple[float, float, float]] = {}
        """Sums of the squares, of the values and of their sizes, by module, in the order of the calls' ends."""
        self.tensors: dict[str, torch.Tensor] = {}
        """Values, and their gradients, by side, number of the call and module, in the order of time."""
        self._calls: dict[tuple[str, str], int] = {}
        self._num_noted = 0

    def given(self, name: str, value: Any) -> None:
        """Note what the module of this name is given."""
        self._note(name, "given", value)

    def gives(self, name: str, value: Any) -> None:
        """Note what the module of this name gives."""
        if torch.is_grad_enabled():
            with self.sources.inside(), torch.no_grad():
                sums = sums_of(value)
            before = self.sums.get(name, (0.0, 0.0, 0.0))
            self.sums[name] = (before[0] + sums[0], before[1] + sums[1], before[2] + sums[2])
        self._note(name, "gives", value)

    def _note(self, name: str, side: str, value: Any) -> None:
        """Note the first tensor of a value, and its gradient once a backward pass comes to it."""
        if not self.is_whole or not torch.is_grad_enabled() or self._num_noted > _MOST_NOTED:
            return
        with self.sources.inside(), torch.no_grad():
            tensor = next((one for _, one in tensors_in(value) if one.ndim and one.is_floating_point()), None)
            if tensor is None:
                return
            self._calls[side, name] = call = self._calls.get((side, name), 0) + 1
            self._num_noted += 2 * tensor.numel()
            self.tensors[f"{side}/{call}/{name}"] = _local(tensor)
            if tensor.requires_grad:
                note = functools.partial(self._note_gradient, f"back {side}/{call}/{name}")
                tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def _note_gradient(self, key: str, gradient: torch.Tensor) -> None:
        with self.sources.inside(), torch.no_grad():
            self.tensors.setdefault(key, _local(gradient))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of what this process has of a tensor."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().clone()
