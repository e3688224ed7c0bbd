"""How a model is split, as data: a style for each layer, by patterns of names.

It is what a user gives as `split`, and what is said of a split that was found.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from paraplan.errors import PlanError
from paraplan.runtime.split.experts import expert_weights
from paraplan.runtime.split.layers import BlockSplit, LayerRole, is_linear, linear_sizes
from paraplan.runtime.split.search import sites_of
from paraplan.runtime.structure.model_structure import BlockCall

_STYLES = (
    "colwise, rowwise, packed(N), packed(A, B, ...), experts, experts(interleaved), vocabulary, whole, divide(NAME)"
)
_STYLE = re.compile(
    r"(?P<plain>colwise|rowwise|experts|vocabulary|whole)|(?P<named>packed|divide|experts(?=\(interleaved\)))\((?P<words>[^()]+)\)"
)


@dataclass(frozen=True)
class GivenSplit:
    """Styles of layers by patterns of their names in a model, in which `*` stands for one part of a name.

    `colwise` has some outputs on every rank, `rowwise` the inputs that go with them; `packed(3)` is colwise with three
    equal parts in one layer, `packed(64, 16, 16)` with parts of these lengths. `experts` are stacked weights, gate
    before up or interleaved; `vocabulary` is an embedding or a head. `divide(num_heads)` divides attributes of a module
    in which its code writes sizes. Layers that no pattern names stay whole.
    """

    styles: Mapping[str, str]

    @classmethod
    def of(cls, styles: Mapping[str, str], model: nn.Module) -> GivenSplit:
        """Return the split that `styles` names for `model`; raise `PlanError` for a pattern or a style unknown."""
        names = [name for name, _ in model.named_modules() if name]
        for pattern, style in styles.items():
            if _STYLE.fullmatch(style.strip()) is None:
                raise PlanError(f"split: {pattern!r} has the style {style!r}", hint=f"give one of {_STYLES}")
            if not any(_matches(pattern, name) for name in names):
                leaves = ", ".join(dict.fromkeys(re.sub(r"\.\d+", ".*", name) for name in names if "." in name))
                raise PlanError(f"split: no module of the model is named {pattern!r}", hint=f"it has {leaves}")
        return cls(dict(styles))

    def style_of(self, name: str) -> tuple[str, list[str]]:
        """Return the style of the module `name` of the model and its arguments, `whole` where none is given."""
        for pattern, style in self.styles.items():
            found = _STYLE.fullmatch(style.strip())
            if found is not None and _matches(pattern, name):
                return found["plain"] or found["named"], [one.strip() for one in (found["words"] or "").split(",")]
        return "whole", [""]

    def styles_in(self, block: nn.Module, name: str) -> dict[str, str]:
        """Return the styles of the modules of the block `name`, which tell blocks apart that split otherwise."""
        styles = {layer: self.style_of(f"{name}.{layer}") for layer, _ in block.named_modules() if layer}
        return {layer: f"{style} {words}" for layer, (style, words) in styles.items() if style != "whole"}

    @property
    def has_vocabulary(self) -> bool:
        """Whether it splits embeddings and heads."""
        return any(style.strip() == "vocabulary" for style in self.styles.values())

    def split_of(self, block: nn.Module, name: str, call: BlockCall, *, size: int) -> BlockSplit:
        """Return how the block `name`, which is on the meta device, is split over `size` ranks.

        Raises `PlanError` where it cannot be.
        """
        roles: dict[str, LayerRole] = {}
        divided: dict[str, tuple[str, ...]] = {}
        for layer, module in block.named_modules():
            style, words = self.style_of(f"{name}.{layer}" if layer else name)
            if style == "divide":
                divided[layer] = tuple(words)
            elif layer and style not in ("whole", "vocabulary"):
                roles[layer] = _role(f"{name}.{layer}", module, style, words)
        if not roles:
            raise PlanError(f"split: it names no layer of block {name}", hint="name its layers, or leave out split")
        called = _in_order_of_calls(block, call, roles)
        uncalled = {layer: role for layer, role in roles.items() if layer not in called}
        # By whose weights the code multiplies itself.
        read = {
            layer: replace(role, kind="read") if role.kind == "column" else role for layer, role in uncalled.items()
        }
        roles = {layer: roles[layer] for layer in called} | read
        sites = {} if divided else sites_of(block, call, roles, size=size)
        return BlockSplit(roles, {}, sites=sites, divided=divided)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _role(name: str, module: nn.Module, style: str, words: list[str]) -> LayerRole:
    if style == "experts":
        weights = expert_weights(module)
        if weights is None:
            raise PlanError(f"split: {name} holds no stacked weights of experts", hint="name the module that has them")
        return LayerRole("experts", weights.segments(interleaved=words == ["interleaved"]))
    if not is_linear(module):
        raise PlanError(f"split: {name} ({type(module).__name__}) is no linear layer", hint="name linear layers")
    inputs, outputs = linear_sizes(module)
    if style == "rowwise":
        return LayerRole("row", (inputs,))
    if style == "colwise":
        return LayerRole("column", (outputs,))
    numbers = [int(word) for word in words if word.isdecimal()]
    parts = (outputs // numbers[0],) * numbers[0] if len(numbers) == len(words) == 1 and numbers[0] else tuple(numbers)
    if len(numbers) != len(words) or sum(parts) != outputs:
        raise PlanError(
            f"split: packed({', '.join(words)}) does not make up the {outputs} outputs of {name}",
            hint="give the number of equal parts, or the outputs of each",
        )
    return LayerRole("column", parts)


def _in_order_of_calls(block: nn.Module, call: BlockCall, layers: Iterable[str]) -> list[str]:
    """Return those of `layers` that the block calls, in the order in which it does."""
    order: list[str] = []
    hooks = [
        block.get_submodule(layer).register_forward_pre_hook(lambda *_, layer=layer: order.append(layer))
        for layer in layers
    ]
    try:
        args, kwargs = copy.deepcopy((call.args, call.kwargs))  # caches are filled
        with torch.no_grad(), call.context():
            block.forward(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return list(dict.fromkeys(order))


def written_down(blocks: Mapping[str, BlockSplit], vocabulary: Iterable[str]) -> dict[str, str]:
    """Return the patterns and styles of a split that was found, which `GivenSplit.of` reads back."""
    found = dict.fromkeys(vocabulary, "vocabulary")
    for name, block in blocks.items():
        held = {layer: _style(role) for layer, role in block.roles.items()}
        held |= {layer: f"divide({', '.join(names)})" for layer, names in block.divided.items()}
        for layer, style in held.items():
            every = re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.{layer}".rstrip("."))
            found[every if found.get(every, style) == style else f"{name}.{layer}"] = style
    return found


def _style(role: LayerRole) -> str:
    if role.kind == "experts":
        return "experts" if len(role.segments) > 1 else "experts(interleaved)"
    if role.kind == "row":
        return "rowwise"
    if len(role.segments) == 1:
        return "colwise"
    is_even = len(set(role.segments)) == 1
    return f"packed({len(role.segments) if is_even else ', '.join(map(str, role.segments))})"
