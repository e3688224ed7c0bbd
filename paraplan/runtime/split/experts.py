"""Mixtures of experts under tensor parallelism: every rank has some inner units of each expert.

Experts are a module with their weights stacked, [experts, outputs, inputs] or [experts, inputs, outputs], and no layers
in it. What goes in is whole on every rank, as is the routing; what comes out of the parts is summed once for all
experts, after it was weighed by the routing. Every rank computes with all experts, so that none waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.layers import LayerRole


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


def _weights(module: nn.Module) -> ExpertWeights:
    weights = expert_weights(module)
    assert weights is not None
    return weights
