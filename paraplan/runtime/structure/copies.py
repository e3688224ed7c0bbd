"""Copies of modules: with values and without."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from paraplan.runtime.torch_private import tensors_in

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def copy_of(module: ModuleT, replaced: Mapping[int, Any] | None = None) -> ModuleT:
    """Return a deep copy of `module`, in which `replaced` stand for what has these ids.

    Tensors that modules keep from an earlier pass are copied as values, without the graph that they came from, which
    torch does not copy (`nn.utils.weight_norm` keeps the weight that it has computed).
    """
    memo = dict(replaced or {})
    for one in module.modules():
        for tensor in tensors_in([*vars(one).values()]):
            if not tensor.is_leaf:
                memo.setdefault(id(tensor), tensor.detach().clone())
    return copy.deepcopy(module, memo)


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of `model` without values, every floating-point parameter asking for a gradient; ties are kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        shape_only = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(shape_only, requires_grad=parameter.is_floating_point())
    for module in model.modules():
        # Buffers, and tensors kept as plain attributes.
        for tensor in [*module.buffers(recurse=False), *vars(module).values()]:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    return copy_of(model, memo)
