"""Random numbers that belong to a sequence: the same whether it is computed alone or beside others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paraplan.runtime.seeds import seed_generators
from paraplan.runtime.torch_private import TorchDispatchMode, pytree, schema_of

_HALVES = (torch.bfloat16, torch.float16)


class FixedNoise(TorchDispatchMode):
    """A context in which functions that draw do so by sequence, for a batch of those with these `numbers`.

    What has no entry for each sequence (a step of diffusion for all of them) is drawn alike for any batch. Seed torch's
    generator before each pass: draws follow from its state, so that recomputed blocks draw again what they drew.
    `draws` says whether anything was drawn, and `has_halves` whether anything was computed in 16 bits.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = numbers
        self.draws = self.has_halves = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, for each sequence by itself where it draws and its operands have an entry for each."""
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            found = func(*args, **given)
            self.has_halves |= isinstance(found, torch.Tensor) and found.dtype in _HALVES
            return found
        self.draws = True
        base = int(torch.randint(2**31, ()))
        after = torch.get_rng_state()
        try:
            return self._drawn(func, args, given, base)
        finally:
            torch.set_rng_state(after)

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: int) -> Any:
        count = len(self._numbers)
        rows = _leading_size(args, kwargs)
        if rows is None or rows % count:
            return _seeded(func, args, kwargs, base)
        size = rows // count

        def part(index: int) -> Callable[[Any], Any]:
            def cut(leaf: Any) -> Any:
                if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == rows:
                    return leaf[index * size : (index + 1) * size]
                return [size, *leaf[1:]] if _is_shape(leaf) and leaf[0] == rows else leaf

            return cut

        found = []
        for index, number in enumerate(self._numbers):
            one = pytree.tree_map(part(index), (args, kwargs), is_leaf=_is_shape)
            found.append(_seeded(func, one[0], one[1], base + 2**31 * (number + 1)))
        if schema_of(func).is_mutable:
            return args[0]
        leaves = [pytree.tree_flatten(one) for one in found]
        joined = [
            torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].ndim else parts[0]
            for parts in zip(*(one[0] for one in leaves), strict=True)
        ]
        return pytree.tree_unflatten(joined, leaves[0][1])


def _seeded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int) -> Any:
    seed_generators(seed)
    generator = kwargs.get("generator")
    if generator is not None:  # one of the user's, which is left as it is
        kwargs = kwargs | {"generator": torch.Generator(generator.device).manual_seed(seed)}
    return func(*args, **kwargs)


def _leading_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the first dimension of what `args` draw: that of their first tensor, else that of the shape they name."""
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=_is_shape)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    shapes = [leaf for leaf in leaves if _is_shape(leaf)]
    if tensors:
        return int(tensors[0].shape[0])
    return int(shapes[0][0]) if shapes else None


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, (list, tuple)) and bool(leaf) and all(type(one) is int for one in leaf)
