"""Calls in a block's code that write sizes of whole tensors down, and run on the parts that a rank has.

Code that says `view(batch, tokens, 12, 64)` for twelve heads does not run on some of them. Where such a call stands,
and what of it is divided by the ranks, is found without values (`lockstep`); while the block runs, the same places are
rewritten in the same way. The tensors are plain ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import CodeType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paraplan.runtime.shards.group import TensorGroup, copy_to_region
from paraplan.runtime.shards.sharding import Sharding

Site = tuple[CodeType, int]
"""A call in code: its function, and the place in that."""
Path = tuple[Any, ...]
"""Where an argument stands in `(args, kwargs)`: indices, keys, and names of the bounds of a slice."""

_OF_TORCH = frozenset({"torch.overrides", "torch.functional", "torch.nn.functional", torch.Tensor.split.__module__})
_BOUNDS = ("start", "stop", "step")


def site_of_call() -> Site:
    """Return where the code stands that called a torch function, from within a mode that was handed the call."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") in _OF_TORCH and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Return what arguments nest, with its paths: bounds of slices too."""
    if isinstance(tree, (list, tuple)):
        for place, entry in enumerate(tree):
            yield from leaves(entry, (*path, place))
    elif isinstance(tree, dict):
        for name, entry in tree.items():
            yield from leaves(entry, (*path, name))
    elif isinstance(tree, slice):
        for name in _BOUNDS:
            yield (*path, name), getattr(tree, name)
    else:
        yield path, tree


def changed(tree: Any, path: Path, value: Any) -> Any:
    """Return a nest with `value` at `path`."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(tree, slice):
        return slice(*(value if name == step else getattr(tree, name) for name in _BOUNDS))
    if isinstance(tree, dict):
        return {**tree, step: changed(tree[step], rest, value)}
    entries = list(tree)
    entries[step] = changed(entries[step], rest, value)
    return entries if isinstance(tree, list) else tuple(entries)


def _at(tree: Any, path: Path) -> Any:
    for step in path:
        tree = getattr(tree, step) if isinstance(tree, slice) else tree[step]
    return tree


@dataclass(frozen=True)
class Cut:
    """A whole operand of which a call on parts reads this rank's part by `sharding`, each entry `repeats` times."""

    path: Path
    sharding: Sharding
    repeats: int = 1

    def part(self, whole: torch.Tensor, group: TensorGroup, *, copies: bool) -> torch.Tensor:
        """Return this rank's part of `whole`; it `copies`: gradients of the whole are summed over the ranks."""
        dim, sharding = self.sharding.dim, self.sharding
        if copies and whole.requires_grad and torch.is_grad_enabled():
            whole = copy_to_region(whole, group)
        if self.repeats > 1:
            whole = whole.repeat_interleave(self.repeats, dim=dim)
        if whole.shape[dim] != sharding.length:  # another batch, which heads follow one another of
            sharding = replace(sharding, repeats=whole.shape[dim] // sum(sharding.segments))
        return sharding.part(whole, group.index)


@dataclass(frozen=True)
class Sign:
    """A part among the arguments of a call: of how many dimensions, and how long the split one is of the whole."""

    path: Path
    ndim: int
    sharding: Sharding

    def part_in(self, given: Any) -> torch.Tensor | None:
        """Return the part in the arguments `given`; None where another tensor stands there."""
        try:
            found = _at(given, self.path)
        except (LookupError, AttributeError, TypeError):
            return None
        return found if isinstance(found, torch.Tensor) and found.ndim == self.ndim else None


@dataclass(frozen=True)
class Rewrite:
    """A call of `func` rewritten for parts: numbers that are `divided` by the ranks, and operands that are cut.

    A number that code computed from one of a part is left `open`: the other sizes tell it. Other whole operands are
    `copied` into the region of a rank. `sign` is the first part, by which calls at one place are told apart where
    others come there too. `module` is the one whose code calls it, by its name in the block.
    """

    func: Callable[..., Any]
    sign: Sign
    divided: tuple[Path, ...] = ()
    open: tuple[Path, ...] = ()
    cuts: tuple[Cut, ...] = ()
    copied: tuple[Path, ...] = ()
    is_alone: bool = True
    module: str = ""

    @property
    def changes_sizes(self) -> bool:
        """Whether the call does not run on parts as it is."""
        return bool(self.divided or self.open or self.cuts)

    def meets(self, given: Any) -> bool:
        """Whether a call is of this kind."""
        part, cut = self.sign.part_in(given), self.sign.sharding
        return part is not None and part.shape[cut.dim] * cut.size == cut.length

    def spares(self, given: Any) -> bool:
        """Whether it leaves a call as it is, which has parts alone."""
        return not self.divided and not self.open and not any(self._is_cut(cut, given) for cut in self.cuts)

    def _is_cut(self, cut: Cut, given: Any) -> bool:
        """Whether an operand is whole; it may be a part already, as keys that blocks share are, or sums in a loop."""
        part, whole = self.sign.part_in(given), self.sign.sharding.length
        assert part is not None
        own_length = part.shape[self.sign.sharding.dim] * cut.sharding.length // whole
        return bool(_at(given, cut.path).shape[cut.sharding.dim] * cut.repeats != own_length)

    def applied(self, given: Any, group: TensorGroup, *, copies: bool) -> Any:
        """Return the arguments `given` of a call as they are for parts."""
        for path in self.divided:
            given = changed(given, path, _at(given, path) // group.size)
        for path in self.open:
            given = changed(given, path, -1)
        for cut in self.cuts:
            if self._is_cut(cut, given):
                given = changed(given, cut.path, cut.part(_at(given, cut.path), group, copies=copies))
        for path in self.copied if copies and torch.is_grad_enabled() else ():
            whole = _at(given, path)
            if whole.requires_grad:
                given = changed(given, path, copy_to_region(whole, group))
        return given


Sites = Mapping[Site, tuple[Rewrite, ...]]


def sites_by_module(sites: Sites) -> dict[str, Sites]:
    """Return the sites in the code of each module that has some."""
    names = dict.fromkeys(one.module for found in sites.values() for one in found)
    return {
        name: {site: own for site, found in sites.items() if (own := tuple(one for one in found if one.module == name))}
        for name in names
    }


class RunOnParts(TorchFunctionMode):
    """Rewrites the calls at `sites` in its context; it `copies` where no region was entered before."""

    def __init__(self, sites: Sites, group: TensorGroup, *, copies: bool) -> None:
        super().__init__()
        self._sites, self._group, self._copies = sites, group, copies
        self._functions = frozenset(one.func for found in sites.values() for one in found)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._functions:
            for one in self._sites.get(site_of_call(), ()):
                if one.func is func and (one.is_alone or one.meets((args, kwargs))):
                    args, kwargs = one.applied((args, kwargs), self._group, copies=self._copies)
                    break
        return func(*args, **kwargs)

    def cuts(self, func: Callable[..., Any]) -> bool:
        """Whether code gives calls of `func` whole operands beside parts."""
        return any(one.func is func and one.cuts for one in chain.from_iterable(self._sites.values()))

    def parts_for(self, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a call of `func` as they are for parts, for what stands in the place of that."""
        for one in chain.from_iterable(self._sites.values()):
            if one.func is func and one.cuts and one.meets((args, {})):
                parts: tuple[Any, ...] = one.applied((args, {}), self._group, copies=self._copies)[0]
                return parts
        return args
