"""Low-rank adapters beside linear layers (LoRA, Hu et al. 2021): how a pair of thin layers goes with a split one.

Where the layer beside them has some of the outputs on every rank, the first layer of a pair works as it is, on whatever
tokens the rank has, and the second has the same outputs: r numbers a token travel. Where the layer has some of the
inputs, so has the first of the pair, and the second works on what the ranks have summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from paraplan.runtime.split.layers import is_linear, linear_sizes


@dataclass(frozen=True)
class Adapters:
    """The pairs in a block by the names of their layers.

    `downs` maps the second to the first, `bases` each to the layer beside it, `holders` all of them to the module that
    stands where that layer was.
    """

    downs: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)
    holders: Mapping[str, str] = field(default_factory=dict)

    def is_down(self, name: str) -> bool:
        """Whether a layer is the first of a pair."""
        return name in self.bases and name not in self.downs


def find_adapters(block: nn.Module) -> Adapters:
    """Return the pairs in `block`: of a module whose linear layers are one and pairs around fewer numbers beside it."""
    downs: dict[str, str] = {}
    bases: dict[str, str] = {}
    holders: dict[str, str] = {}
    for path, holder in block.named_modules():
        sizes = {
            f"{path}.{name}": linear_sizes(layer) for name, layer in holder.named_modules() if name and is_linear(layer)
        }
        if not path or len(sizes) < 3 or len(sizes) % 2 == 0:
            continue
        for base, (inputs, outputs) in sizes.items():
            pairs = _pairs({name: size for name, size in sizes.items() if name != base}, inputs, outputs)
            if pairs:
                downs |= pairs
                bases |= dict.fromkeys((*pairs, *pairs.values()), base)
                holders |= dict.fromkeys(sizes, path)
                break
    return Adapters(downs, bases, holders)


def _pairs(sizes: Mapping[str, tuple[int, int]], inputs: int, outputs: int) -> dict[str, str]:
    """Return the pairs that all of the layers make around a layer of `inputs` and `outputs`; none where they do not."""
    least = min(inputs, outputs)
    first = [(name, size[1]) for name, size in sizes.items() if size[0] == inputs and size[1] < least]
    second = [(name, size[0]) for name, size in sizes.items() if size[1] == outputs and size[0] < least]
    if len(first) + len(second) != len(sizes) or sorted(rank for _, rank in first) != sorted(r for _, r in second):
        return {}
    ranked_first, ranked_second = (sorted(found, key=lambda one: one[1]) for found in (first, second))
    return {up: down for (down, _), (up, _) in zip(ranked_first, ranked_second, strict=True)}
