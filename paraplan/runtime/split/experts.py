"""Mixtures of experts under tensor parallelism: every rank has some inner units of each expert.

Experts are a module with their weights stacked, [experts, outputs, inputs] or [experts, inputs, outputs], and no layers
in it. What goes in is whole on every rank, as is the routing; what comes out of the parts is summed once for all
experts, after it was weighed by the routing. Every rank computes with all experts, so that none waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paraplan.runtime.shards.group import (
    TensorGroup,
    all_gather,
    copy_to_region,
    reduce_from_region,
    reduce_scatter,
)
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import (
    SEQUENCE,
    SplitError,
    SplitTensor,
    split_operands,
)
from paraplan.runtime.split.layers import LayerRole
from paraplan.runtime.torch_private import pytree


@dataclass(frozen=True)
class ExpertWeights:
    """The stacked weights of experts: `enter` names those that make inner units of hidden features, `leave` the others.

    `enter_dim` and `leave_dim` are the dimensions of inner units, of which there are `inner`; weights that enter have
    `copies` of them (gate and up in one).
    """

    enter: tuple[str, ...]
    leave: str
    enter_dim: int
    leave_dim: int
    inner: int
    copies: int

    def segments(self, *, interleaved: bool) -> tuple[int, ...]:
        """Return what the inner units of `enter` consist of: gate before up, or each gate beside its up."""
        return (self.inner * self.copies,) if interleaved else (self.inner,) * self.copies


def expert_weights(module: nn.Module) -> ExpertWeights | None:
    """Return the stacked weights of `module`, None where it is no mixture of experts as above."""
    own = dict(module.named_parameters(recurse=False))
    stacked = {name: weight for name, weight in own.items() if weight.ndim == 3}
    has_layers = any(True for child in module.children() for _ in child.parameters())
    if not 2 <= len(stacked) <= 3 or has_layers or len({weight.shape[0] for weight in stacked.values()}) > 1:
        return None
    (*enter, leave) = stacked
    shapes = {tuple(stacked[name].shape) for name in enter}
    if len(shapes) > 1:
        return None
    _, first, second = shapes.pop()
    _, leave_first, leave_second = stacked[leave].shape
    is_transposed = first == leave_second and (second != leave_first or bool(getattr(module, "is_transposed", False)))
    units, inner = (second, leave_first) if is_transposed else (first, leave_second)
    fits = is_transposed or second == leave_first
    if not fits or units not in (inner, 2 * inner) or (len(enter) > 1 and units != inner):
        return None
    return ExpertWeights(
        enter=tuple(enter),
        leave=leave,
        enter_dim=2 if is_transposed else 1,
        leave_dim=1 if is_transposed else 2,
        inner=inner,
        copies=units // inner,
    )


def expert_shardings(module: nn.Module, role: LayerRole, size: int) -> dict[str, Sharding]:
    """Return how the parameters of experts in `role` are cut, by their names in the module; whole ones are left out."""
    weights = _weights(module)
    shardings = {name: Sharding(dim=weights.enter_dim, segments=role.segments, size=size) for name in weights.enter}
    biases = {f"{name}_bias": Sharding(dim=1, segments=role.segments, size=size) for name in weights.enter}
    shardings |= {name: sharding for name, sharding in biases.items() if getattr(module, name, None) is not None}
    return shardings | {weights.leave: Sharding(dim=weights.leave_dim, segments=(weights.inner,), size=size)}


def split_experts(module: nn.Module, role: LayerRole, group: TensorGroup, name: str) -> dict[str, Sharding]:
    """Leave this rank's inner units in the experts and make them work on these; return the cuts of their parameters."""
    shardings = expert_shardings(module, role, group.size)
    for parameter_name, sharding in shardings.items():
        whole = module.get_parameter(parameter_name)
        part = sharding.part(whole.detach(), group.index).clone(memory_format=torch.contiguous_format)
        setattr(module, parameter_name, nn.Parameter(part, requires_grad=whole.requires_grad))
    inner = module.forward

    def work(*args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs, tokens = enter_experts(args, kwargs, group, name)
        with _shared_by_ranks(module, shardings, group):
            partial = inner(*args, **kwargs)
        return leave_experts(partial, tokens, group)

    module.forward = work
    return shardings


def enter_experts(
    args: tuple[Any, ...], kwargs: dict[str, Any], group: TensorGroup, name: str
) -> tuple[tuple[Any, ...], dict[str, Any], SplitTensor | None]:
    """Return the arguments of experts as every rank needs them, and one whose tokens were split, None without any."""
    operands = split_operands(args, kwargs)
    for operand in operands:
        if operand.source != SEQUENCE:
            raise SplitError(f"{name} reads a split tensor", source=operand.source, is_mixed=True)

    def enter(leaf: Any) -> Any:
        if isinstance(leaf, SplitTensor):
            if leaf.is_floating_point():
                return all_gather(leaf.local, leaf.sharding, group)
            return group.gather(leaf.local, leaf.sharding)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and torch.is_grad_enabled():
            return copy_to_region(leaf, group)
        return leaf

    entered_args, entered_kwargs = pytree.tree_map(enter, (args, kwargs))
    return entered_args, entered_kwargs, operands[0] if operands else None


def leave_experts(partial: torch.Tensor, tokens: SplitTensor | None, group: TensorGroup) -> torch.Tensor:
    """Return the sum of what the ranks computed: whole, or this rank's tokens where those of `tokens` are split."""
    if tokens is None:
        return reduce_from_region(partial, group)
    if partial.ndim <= tokens.sharding.dim or partial.shape[tokens.sharding.dim] != tokens.sharding.length:
        raise SplitError("experts return their tokens in another shape", source=SEQUENCE)
    mine: torch.Tensor = SplitTensor(reduce_scatter(partial, tokens.sharding, group), tokens.sharding, group, SEQUENCE)
    return mine


@contextmanager
def _shared_by_ranks(module: nn.Module, shardings: dict[str, Sharding], group: TensorGroup) -> Iterator[None]:
    """Have the whole parameters of experts count once: gradients summed over the ranks, an added bias shared."""
    bias = f"{_weights(module).leave}_bias"
    whole = {name: value for name, value in module.named_parameters(recurse=False) if name not in shardings}
    shared = {name: copy_to_region(value, group) for name, value in whole.items()}
    if bias in shared:
        shared[bias] = shared[bias] / group.size
    # An attribute of the instance stands before the parameter of its name, which stays where it is.
    module.__dict__.update(shared)
    try:
        yield
    finally:
        for name in shared:
            module.__dict__.pop(name, None)


def _weights(module: nn.Module) -> ExpertWeights:
    weights = expert_weights(module)
    assert weights is not None
    return weights
