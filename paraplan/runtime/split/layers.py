"""Linear layers of which every rank of a `tp` group has a part, and what their parts are.

A column layer has some of the outputs: it reads the whole input. A row layer has the inputs that go with them, and sums
what the ranks have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn

from paraplan.runtime.shards.group import (
    TensorGroup,
)
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.sites import Sites
from paraplan.runtime.structure.float8 import float8_product, is_float8

_TOKENS = 1  # their dimension, in [batch, tokens, hidden]


@dataclass(frozen=True)
class LayerRole:
    """A layer's part in a split: a linear one holds some outputs (column) or inputs (row), cut by `segments`.

    Experts hold some inner units of each; the segments are those of the weights that make them. A layer that is `read`
    holds some outputs as a column layer does, for code that multiplies by its weight itself.
    """

    kind: Literal["column", "row", "read", "experts"]
    segments: tuple[int, ...]


@dataclass(frozen=True)
class BlockSplit:
    """The layers of a block that are split, by their names in it, and why others are left whole.

    `has_regions`: gradients are partial in the modules that hold column layers. Calls at `sites` in the block's code
    are rewritten, in which it writes sizes of whole tensors; or `divided` are attributes of modules that are such
    sizes, divided by the ranks. The gradients of the parameters in `summed` are sums over the ranks. `joins` are
    modules that have the tokens of all ranks under sequence parallelism, "" is the block. `draws`: the block draws
    random numbers in training.
    """

    roles: dict[str, LayerRole]
    whole: dict[str, str]
    has_regions: bool = False
    sites: Sites = field(default_factory=dict)
    joins: tuple[str, ...] = ()
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    draws: bool = False
    summed: tuple[str, ...] = ()


@dataclass(frozen=True)
class SequenceEnds:
    """Where a block finds its hidden state, and whether it is the first or last one with split tokens."""

    hidden_argument: int | str
    is_first: bool
    is_last: bool


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear layer: torch's, or transformers' with its weight as [inputs, outputs]."""
    is_torchs = isinstance(module, nn.Linear) and has_own_weight(module) and _returns_outputs(module)
    return is_torchs or is_transposed(module)


def has_own_weight(module: nn.Module) -> bool:
    """Whether the weight of a layer is a parameter, not computed from others (weight norm and the like)."""
    return any(name == "weight" for name, _ in module.named_parameters(recurse=False, remove_duplicate=False))


def has_own_code(module: nn.Module) -> bool:
    """Whether a linear layer is a subclass of torch's with a forward pass of its own."""
    return isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward


def _returns_outputs(module: nn.Linear) -> bool:
    """Whether a subclass with a forward pass of its own returns outputs alone, as a router of experts does not."""
    forward: Callable[..., Any] = type(module).forward
    if not has_own_code(module):
        return True
    try:
        with torch.no_grad():
            output = forward(module, module.weight.new_zeros(1, module.in_features))
    except RuntimeError:  # it reads inputs of another shape, as DeepSeek-V4's layer of groups does
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, module.out_features)


def is_transposed(module: nn.Module) -> bool:
    """Whether `module` is transformers' linear layer with its weight as [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and has_own_weight(module)


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """Return the number of inputs and of outputs of a linear layer."""
    outputs, inputs = weight_of(module).shape[:: -1 if is_transposed(module) else 1]
    return inputs, outputs


def weight_of(module: nn.Module) -> nn.Parameter:
    """Return the weight of a linear layer."""
    return cast("nn.Parameter", module.weight)


def parameter_shardings(module: nn.Module, role: LayerRole, size: int) -> dict[str, Sharding]:
    """Return how the parameters of a linear layer in `role` are cut, by their names in it; whole ones are left out."""
    outputs_first = not is_transposed(module)
    dim = int(outputs_first == (role.kind == "row"))
    shardings = {"weight": Sharding(dim=dim, segments=role.segments, size=size)}
    if role.kind in ("column", "read") and getattr(module, "bias", None) is not None:
        shardings["bias"] = Sharding(dim=0, segments=role.segments, size=size)
    return shardings


def take_parts(module: nn.Module, shardings: Mapping[str, Sharding], group: TensorGroup) -> None:
    """Leave this rank's parts of parameters in `module`."""
    for name, sharding in shardings.items():
        whole = module.get_parameter(name)
        part = sharding.part(whole.detach(), group.index).clone(memory_format=torch.contiguous_format)
        setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))


def product_of(module: nn.Module) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """Return what a linear layer computes of its input, its weight, or a part of it, and its bias."""
    if is_float8(module):
        return float8_product(module)
    return _transposed_product if is_transposed(module) else F.linear


def _transposed_product(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None:
        return given @ weight
    # One operation, as in the whole layer: autocast leaves a sum by itself in fp32, and all that follows it.
    return torch.addmm(bias, given.flatten(0, -2), weight).view(*given.shape[:-1], -1)
