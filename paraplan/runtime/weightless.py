"""Models that are built without values, and parameters that get storage once they are cut and sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from paraplan.runtime.torch_private import FakeTensor, dtensor_like


@contextmanager
def without_weights() -> Iterator[None]:
    """Build modules whose parameters have shapes and no values, in this context; `job.prepare` then needs `weights=`.

    Parameters are on the meta device, and buffers, which code computes, are where they are otherwise.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta or isinstance(parameter, FakeTensor):
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # torch's says None
    try:
        yield
    finally:
        handle.remove()


def give_storage(module: nn.Module, device: torch.device) -> None:
    """Give the parameters of `module` that have none storage on `device`, shards that of shards; values are arbitrary.

    The parameters stay the same objects, so that what is tied stays tied.
    """
    for parameter in module.parameters():
        if parameter.is_meta:
            _replace(parameter, _empty(parameter, device))


def _empty(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return torch.empty_like(parameter, device=device, requires_grad=False)
    local = torch.empty_like(parameter.to_local(), device=device, requires_grad=False)
    return dtensor_like(local, parameter)


def give_random_values(module: nn.Module) -> None:
    """Give parameters of `module` without values random ones, the same in every process: to compare computations."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if parameter.is_meta:
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.1
            _replace(parameter, values)


def _replace(parameter: nn.Parameter, values: torch.Tensor) -> None:
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
