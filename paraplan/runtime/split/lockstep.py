"""A block run on parts beside itself whole, both without values: which dimension of each tensor is split, and where.

The calls of torch functions are the same in both runs, so that shapes tell what ranks hold of each tensor (`cuts`). A
call whose sizes are those of whole tensors is tried with one of its numbers divided by the ranks, or with whole
operands cut, until what it returns is the part of what it returns whole; `sites` keeps how. Where ranks would have to
bring their parts together, `SplitError` is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paraplan.runtime.shards.group import TensorGroup
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.cuts import (
    CONVOLUTIONS,
    Call,
    PartialResult,
    SplitError,
    entries_of,
    known_part,
    mark_made,
    mark_parts,
    part_of,
    shapes_in,
)
from paraplan.runtime.split.sites import Cut, Path, Rewrite, Sign, Site, Sites, leaves, site_of_call
from paraplan.runtime.torch_private import tensors_in

_LAST_DIMENSIONS = frozenset({"layer_norm", "rms_norm"})  # whose sizes they name
_ALONG = frozenset({"softmax", "log_softmax", "cumsum", "cumprod", "normalize", "sort", "argsort", "flip", "softmin"})
_WRITES = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})
DOES_NOT_RUN = (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError)


def function_name(func: Callable[..., Any]) -> str:
    """Return the name of a torch function, of a property its own."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":  # a property: shape, dtype and the like
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


class WholeRun(TorchFunctionMode):
    """Notes the calls of a block on whole tensors in this context; `silent` are functions that return no tensors.

    `products` are the parameters that code multiplies by itself, by their ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.silent: set[str] = set()
        self.products: set[int] = set()
        self._is_paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function_name(func)
        if name == "__iter__":
            with self:
                return iter(args[0].unbind(0))
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        if name in ("matmul", "__matmul__", "__rmatmul__", "linear"):
            self.products |= {id(value) for value in args if isinstance(value, nn.Parameter)}
        if not tensors_in(result):
            self.silent.add(name)
        else:
            index = args[1:] if name in ("__getitem__", "narrow") and not tensors_in(args[1:]) else None
            self.calls.append(Call(name, shapes_in((args, kwargs or {})), shapes_in(result), index))
        return result

    def layer(self, name: str, run: Callable[[], Any], given: Any) -> Any:
        """Return what a layer computes, which is one call by its name."""
        self._is_paused = True
        try:
            result = run()
        finally:
            self._is_paused = False
        self.calls.append(Call(name, shapes_in(given), shapes_in(result)))
        return result


class PartsRun(TorchFunctionMode):
    """Follows the calls of a block on parts in this context, beside those of `whole`.

    `sites` are the calls that are rewritten.
    """

    def __init__(self, whole: WholeRun, group: TensorGroup) -> None:
        super().__init__()
        self._calls, self._silent, self._next = whole.calls, whole.silent, 0
        self._names = {call.name for call in whole.calls}
        self._group = group
        self._is_paused = False
        self._sites: dict[Site, list[Rewrite]] = {}
        self._plain: dict[Site, list[tuple[Any, str]]] = {}
        self.source = ""
        self.modules = [""]
        """The modules whose code runs, by their names in the block, the innermost last."""

    @property
    def sites(self) -> Sites:
        """The calls that are rewritten; raises `SplitError` where one place is reached by calls not told apart."""
        for site, found in self._sites.items():
            for given, source in self._plain.get(site, ()):
                if any(one.meets(given) and not one.spares(given) for one in found):
                    raise SplitError(
                        "a line of its code runs on whole tensors and on parts alike", source=source, is_mixed=True
                    )
        return {
            site: tuple(replace(one, is_alone=len(found) == 1 and site not in self._plain) for one in found)
            for site, found in self._sites.items()
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        name, split = function_name(func), [one for one in tensors_in((args, kwargs)) if part_of(one)]
        split.sort(key=lambda one: known_part(one).is_open)  # whose segments the others say
        if name == "__iter__":
            with self:
                return iter(args[0].unbind(0))
        self._check_written(name, args, kwargs, split)
        if name in self._silent or (name not in self._names and not split):
            return func(*args, **kwargs)
        source = known_part(split[0]).source if split else ""
        call = self.take(name, source)
        if not split:
            result = func(*args, **kwargs)
            if shapes_in(result) != call.returned:  # made in the sizes that a part was seen to have
                return mark_made(name, result, call, self._group, self.source)
            self._plain.setdefault(site_of_call(), []).append(((args, kwargs), self.source))
            return result
        self.source = source
        site, given = site_of_call(), (args, kwargs)
        return _CallOnParts(name, func, call, given, split, self._group).run(
            lambda rewrite: self._note(rewrite, given, source, site)
        )

    def take(self, name: str, source: str) -> Call:
        """Return the next call of the whole run, which is to be of `name`."""
        if self._next == len(self._calls) or self._calls[self._next].name != name:
            raise SplitError(f"its code goes another way where it has parts ({name})", source=source, is_mixed=True)
        self._next += 1
        return self._calls[self._next - 1]

    def _note(self, rewrite: Rewrite | None, given: Any, source: str, site: Site) -> None:
        if rewrite is None:
            self._plain.setdefault(site, []).append((given, source))
            return
        found, rewrite = self._sites.setdefault(site, []), replace(rewrite, module=self.modules[-1])
        if rewrite in found:
            return
        if any((one.func, one.sign, one.module) == (rewrite.func, rewrite.sign, rewrite.module) for one in found):
            raise SplitError("a line of its code runs on parts of several kinds", source=source, is_mixed=True)
        found.append(rewrite)

    def _check_written(self, name: str, args: Any, kwargs: Any, split: list[torch.Tensor]) -> None:
        is_in_place = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        targets = [kwargs.get("out"), args[0] if is_in_place and args else None]
        if split and any(isinstance(target, torch.Tensor) and not part_of(target) for target in targets):
            source = known_part(split[0]).source
            raise SplitError(f"{name} writes the output of {source} into a whole tensor", source=source, is_mixed=True)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def layer(self, name: str, run: Callable[[], Any], given: Any) -> Any:
        """Return what a layer computes that is whole, of tensors split along others than their last dimension too."""
        split = [one for one in tensors_in(given) if part_of(one)]
        call = self.take(name, known_part(split[0]).source if split else "")
        with self._paused():
            result = run()
        if split:
            mark_parts(PartialResult(name, call, split, given), result)
        return result


@dataclass(frozen=True)
class _Way:
    """A way to run a call, as a `Rewrite` has it."""

    divided: tuple[Path, ...] = ()
    open: tuple[Path, ...] = ()
    cuts: tuple[Cut, ...] = ()


class _CallOnParts:
    """One call on parts: the first way is taken in which it returns the part of what it returns whole."""

    def __init__(
        self,
        name: str,
        func: Callable[..., Any],
        call: Call,
        given: Any,
        split: list[torch.Tensor],
        group: TensorGroup,
    ) -> None:
        self.name, self.func, self.call, self.given, self.split, self.group = name, func, call, given, split, group
        self.first = split[0]
        self.part = known_part(self.first)
        self.paths = {id(leaf): path for path, leaf in leaves(given) if isinstance(leaf, torch.Tensor)}
        self.whole = [
            (path, leaf) for path, leaf in leaves(given) if isinstance(leaf, torch.Tensor) and not part_of(leaf)
        ]

    def run(self, note: Callable[[Rewrite | None], None]) -> Any:
        """Return what the call returns, known as parts; `note` is told how it is rewritten."""
        self._check_alike()
        self._check_dimension()
        self._check_taken_apart()
        failure: Exception | None = None
        mixed: SplitError | None = None
        for way in self._ways():
            rewrite = self._rewrite(way)
            args, kwargs = rewrite.applied(self.given, self.group, copies=False)
            try:
                result = self.func(*args, **kwargs)
            except DOES_NOT_RUN as error:
                failure = failure or error
                continue
            try:
                mark_parts(PartialResult(self.name, self.call, self.split, (args, kwargs)), result)
            except SplitError as error:
                mixed = error if mixed is None or (error.segments and not mixed.segments) else mixed
                continue
            note(rewrite if rewrite.changes_sizes or rewrite.copied else None)
            return result
        if mixed is not None:
            raise mixed
        raise SplitError(
            f"{self.name} does not run on parts of the output of {self.part.source}: "
            f"{(str(failure).splitlines() or [''])[0]}",
            source=self.part.source,
            is_mixed=True,
        ) from failure

    def _rewrite(self, way: _Way) -> Rewrite:
        is_cut = {cut.path for cut in way.cuts}
        copied = tuple(
            path
            for path, leaf in self.whole
            if path not in is_cut and leaf.is_floating_point() and not isinstance(leaf, nn.Parameter)
        )
        sign = Sign(self.paths[id(self.first)], self.first.ndim, self.part.sharding)
        return Rewrite(self.func, sign, way.divided, way.open, way.cuts, copied)

    def _ways(self) -> Iterator[_Way]:
        """Return ways to run the call: as it is, with numbers divided, with whole operands cut."""
        size, sharding = self.group.size, self.part.sharding
        shared = self._shared_heads()
        if shared:  # which would run as they are, and be those of other queries
            yield _Way(cuts=shared)
            return
        from_right = sharding.dim - self.first.ndim
        aligned = tuple(
            Cut(path, sharding.at(from_right + leaf.ndim))
            for path, leaf in self.whole
            if leaf.ndim >= -from_right and leaf.shape[from_right] == sharding.length
        )
        if aligned and self.name not in CONVOLUTIONS:
            yield _Way(cuts=aligned)
        yield _Way()
        if self.name in CONVOLUTIONS:
            yield self._filters()
            return
        sizes = [(path, leaf) for path, leaf in leaves(self.given) if type(leaf) is int and leaf > 0]
        numbers = [path for path, leaf in sizes if not leaf % size]
        for path in numbers:
            yield _Way((path,))
        if len(numbers) > 1:
            yield _Way(tuple(numbers))
        if self.name in ("view", "reshape", "unflatten"):
            yield from (_Way((path,), (other,)) for path in numbers for other, _ in sizes if other != path)
        anywhere = [
            [Cut(path, sharding.at(dim)) for dim, length in enumerate(leaf.shape) if length == sharding.length]
            for path, leaf in self.whole
        ]
        anywhere = [found for found in anywhere if found]
        if anywhere:
            yield _Way(cuts=tuple(found[0] for found in anywhere))
            yield _Way(cuts=tuple(found[-1] for found in anywhere))

    def _shared_heads(self) -> tuple[Cut, ...]:
        """Return the cuts of whole keys and values that several heads of split queries read each."""
        sharding, dim = self.part.sharding, self.first.ndim - 3
        if self.name != "scaled_dot_product_attention" or sharding.dim != dim:
            return ()
        cuts = []
        for path, leaf in self.whole:
            if path[-1] not in (1, 2, "key", "value") or leaf.ndim != self.first.ndim:
                continue
            heads = leaf.shape[dim]
            if not 1 < heads < sharding.length:
                return ()
            # Fewer heads than ranks: a rank reads those of its queries.
            repeats = 1 if heads % sharding.size == 0 else sharding.length // heads
            cuts.append(Cut(path, Sharding(dim, (heads * repeats,), sharding.size), repeats))
        return tuple(cuts)

    def _filters(self) -> _Way:
        """Return the convolution of this rank's channels by their own filters."""
        named = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        args, kwargs = self.given
        paths: dict[str, Path] = {name: (0, place) for place, name in enumerate(named[: len(args)])}
        paths |= {name: (1, name) for name in kwargs}
        given = dict(zip(named, args, strict=False)) | kwargs
        weight, sharding = given["weight"], self.part.sharding
        inputs, num_groups = weight.shape[1], sharding.length // weight.shape[1]
        outputs = weight.shape[0] // num_groups
        is_by_channel = sharding.dim == self.first.ndim - weight.ndim + 1
        if num_groups == 1 or not is_by_channel or any(one % (inputs * sharding.size) for one in sharding.segments):
            raise SplitError(f"{self.name} brings channels together", source=self.part.source, is_mixed=True)
        own = replace(sharding, dim=0, segments=tuple(one // inputs * outputs for one in sharding.segments))
        return _Way(
            (paths["groups"],) if given.get("groups") == num_groups else (),
            cuts=tuple(Cut(paths[one], own) for one in ("weight", "bias") if given.get(one) is not None),
        )

    def _check_alike(self) -> None:
        """Raise where operands are split along different dimensions, or the same one in other segments."""
        cut = self.part.sharding
        for other in self.split[1:]:
            one = known_part(other)
            is_as_long = one.sharding.length == cut.length and not one.is_open
            if is_as_long and (one.sharding.segments, one.sharding.repeats) != (cut.segments, cut.repeats):
                raise SplitError(
                    f"{self.name} meets the output of {self.part.source} in {cut.segments} and that of {one.source} in "
                    f"{one.sharding.segments}",
                    source=one.source,
                )

    def _check_dimension(self) -> None:
        """Raise where a function that keeps shapes works along the split dimension: shapes would not tell."""
        args, kwargs = self.given
        along: Sequence[int] = ()
        if self.name in _LAST_DIMENSIONS:
            normalized = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
            along = range(self.first.ndim - len(normalized), self.first.ndim)
        elif self.name in _ALONG:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            along = (dim % self.first.ndim,) if isinstance(dim, int) else ()
        if self.part.sharding.dim in along:
            raise SplitError(
                f"{self.name} works along the output of {self.part.source}, which would be split",
                source=self.part.source,
                is_mixed=True,
            )

    def _check_taken_apart(self) -> None:
        """Raise where entries of the split dimension are taken one by one: they are segments of the source."""
        args, kwargs = self.given
        dim = None
        if self.name == "unbind":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % self.first.ndim
        elif self.name == "__getitem__" and self.call.index is not None and part_of(args[0]):
            entry = entries_of(self.call.index[0], self.first.ndim).get(self.part.sharding.dim)
            dim = self.part.sharding.dim if isinstance(entry, int) else None
        if dim == self.part.sharding.dim:
            count = self.part.sharding.length
            raise SplitError(
                f"the {count} parts of the output of {self.part.source} are taken apart",
                source=self.part.source,
                segments=(-count,),  # resolved by the search: so many segments of the source's own length
            )
