"""The exponential moving average of the parameters, each rank's of what it holds, under every plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from paraplan.errors import UsageError
from paraplan.runtime.structure.weights import free_gathered, local_shard
from paraplan.runtime.torch_private import lerp_all


class ParameterAverage:
    """The average a <- decay * a + (1 - decay) * p of every parameter p, as torch's `swa_utils.AveragedModel` has it.

    The first update takes the parameters as they are. `tensors` lie over the ranks as the parameters do, and take as
    much memory as they. `is_in_place` says that they stand in the place of the parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise UsageError(f"decay={decay} of an average of parameters", hint="give one from 0 to below 1, as 0.999")
        self.decay = decay
        self.num_updates = 0
        self.is_in_place = False
        self._parameters = dict(parameters)
        self.tensors = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters into the average."""
        if self.num_updates == 0:
            self.restart()
        else:
            lerp_all(_locals(self.tensors), _locals(self._parameters), 1.0 - self.decay)
        self.num_updates += 1

    @torch.no_grad()
    def restart(self) -> None:
        """Begin at the parameters as they are."""
        self.num_updates = 0
        for average, held in zip(_locals(self.tensors), _locals(self._parameters), strict=True):
            average.copy_(held)

    @contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """Have the averages in the place of the parameters of `module` in this context."""
        if self.is_in_place:
            raise UsageError("engine.averaged inside of engine.averaged", hint="leave the outer context first")
        self.is_in_place = True
        self._swap(module)
        try:
            yield
        finally:
            self._swap(module)
            self.is_in_place = False

    @torch.no_grad()
    def _swap(self, module: nn.Module) -> None:
        free_gathered(module)
        for average, held in zip(_locals(self.tensors), _locals(self._parameters), strict=True):
            kept = held.clone()
            held.copy_(average)
            average.copy_(kept)


def _locals(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [*map(local_shard, tensors.values())]
