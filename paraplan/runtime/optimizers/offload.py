"""Keeping what the optimizer needs in the host's memory: its state, and parameters to update there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paraplan.runtime.structure.weights import local_shard
from paraplan.runtime.torch_private import dtensor_like, version_of


def keep_on_host(optimizer: torch.optim.Optimizer) -> HostSteps:
    """Have `optimizer` do its steps on the host, on copies of its parameters and gradients (ZeRO-Offload).

    Its state lies on the host (Ren et al. 2021, section 4.1). Between steps `param_groups` and `state` are those of the
    parameters themselves, for schedulers and checkpoints. Gradients travel to the host and parameters back, each once a
    step. Returns what does so.
    """
    steps = HostSteps()
    optimizer.register_step_pre_hook(steps.enter)
    optimizer.register_step_post_hook(steps.leave)
    return steps


class HostSteps:
    """Puts copies on the host in the place of an optimizer's parameters while it does a step.

    Copies beside a GPU are pinned: they travel one behind the other, and the host waits once for all gradients.
    """

    def __init__(self) -> None:
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._versions: dict[nn.Parameter, int] = {}
        self._originals: list[list[nn.Parameter]] = []

    @property
    def copies(self) -> list[nn.Parameter]:
        """The copies on the host."""
        return list(self._copies.values())

    def enter(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Bring the gradients to the host and hand the optimizer what lies there."""
        self._originals = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                copy = self._copy_of(parameter)
                copy.grad = None if parameter.grad is None else self._gradient_of(parameter, parameter.grad)
                state = optimizer.state.pop(parameter, None)
                if state is not None:
                    optimizer.state[copy] = _state_on_host(state)
            group["params"] = [self._copies[parameter] for parameter in group["params"]]
        if any(parameter.is_cuda for parameters in self._originals for parameter in parameters):
            torch.cuda.current_stream().synchronize()

    def leave(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Bring the parameters back from the host."""
        for group, parameters in zip(optimizer.param_groups, self._originals, strict=True):
            for parameter in parameters:
                copy = self._copies[parameter]
                if copy.grad is not None:
                    local_shard(parameter).copy_(local_shard(copy), non_blocking=True)
                copy.grad = None
                self._versions[parameter] = version_of(local_shard(parameter))
                if copy in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(copy)
            group["params"] = parameters

    def _copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._copies:
            self._copies[parameter] = nn.Parameter(_on_host(parameter), requires_grad=parameter.requires_grad)
        elif self._versions[parameter] != version_of(local_shard(parameter)):  # a checkpoint was loaded since
            local_shard(self._copies[parameter]).copy_(local_shard(parameter))
        return self._copies[parameter]

    def _gradient_of(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        if parameter in self._gradients:
            local_shard(self._gradients[parameter]).copy_(local_shard(gradient), non_blocking=True)
        else:
            self._gradients[parameter] = _on_host(gradient)
        return self._gradients[parameter]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    held = local_shard(tensor)
    local = torch.empty_like(held, device="cpu", pin_memory=held.is_cuda)
    local.copy_(held, non_blocking=True)
    if not isinstance(tensor, DTensor):
        return local
    # Not DTensor.from_local, which would bring it back to the device of the mesh.
    return dtensor_like(local, tensor)


def _state_on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state of one parameter on the host, where it is after the first step."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or local_shard(value).device.type == "cpu":
            return value
        return _on_host(value)

    return {key: moved(value) for key, value in state.items()}
