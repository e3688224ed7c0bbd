"""Origins of every tensor of a forward pass: parameters, buffers, hidden states, random numbers.

A dispatch mode sees each operation, those under no_grad, on detached tensors and on integers too. What is known of a
tensor is kept for its storage, so that views and writes in place are followed. What code reads out of a tensor as a
Python number is not: a run without values answers no such question (`questions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from paraplan.runtime.torch_private import (
    TorchDispatchMode,
    pytree,
    schema_of,
    storage_key,
    tensors_in,
)

_DEPTH = 6  # of what an output object nests


@dataclass(frozen=True)
class Mark:
    """A source that is not a tensor of the model.

    The hidden state that enters block number `block` (the output of the last one has the number of blocks); what block
    `block` computes or writes beside its hidden state; tensor `number` of its output; random numbers drawn outside of
    the blocks.
    """

    kind: Literal["hidden", "beside", "output", "random"]
    block: int
    number: int = 0


Sources = frozenset[str | Mark]
NOTHING: Sources = frozenset()


@dataclass(frozen=True)
class Place:
    """Where code runs: inside block `inside`, or outside of blocks after `done` of them."""

    done: int
    inside: int | None = None


@dataclass(frozen=True)
class Write:
    """A parameter or buffer written in a forward pass: where, and from what."""

    place: Place
    sources: Sources


@dataclass
class _Held:
    """One storage, as far as it is known.

    `origin` is the storage that it stands for, and `name` that of the model's tensor.
    """

    reference: object
    sources: Sources
    made_at: Place
    name: str | None = None
    origin: _Held | None = None
    is_hidden: bool = False


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return buffers and tensors that are plain attributes, by their names; those in several places several times."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in [*module.named_buffers(recurse=False, remove_duplicate=False), *vars(module).items()]:
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}".lstrip("."), value


@dataclass
class Registered:
    """The tensors of a model by their names: `parameters`, and `tensors` that are buffers or plain attributes."""

    parameters: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Registered:
        """Return those of `model`; a tensor in several places has the first of its names."""
        tensors = dict(model.named_buffers())
        seen = {id(tensor) for tensor in tensors.values()}
        for name, tensor in named_tensors(model):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                tensors[name] = tensor
        return cls(parameters=dict(model.named_parameters()), tensors=tensors)


class Dataflow(TorchDispatchMode):
    """Follows what tensors are computed from while `model`, without values, runs in this context.

    The caller says where it runs by `place`. `reads` are the sources of all that operations have read at a place, and
    `writes` those of the model's own tensors that were written.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, num_blocks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = Place(done=0)
        self.reads: dict[Place, Sources] = {}
        self.writes: dict[str, list[Write]] = {}
        self.reassigned: set[str] = set()
        self.writes_hidden = False
        self._copies = False
        self._num_blocks = num_blocks
        self._storages: dict[int, _Held] = {}
        self._kept: list[torch.Tensor] = []  # tensors without a storage, so that ids that were noted stay theirs
        registered = Registered.of(model)
        for name, tensor in [*registered.tensors.items(), *registered.parameters.items()]:
            self._register(name, tensor)
        self._holders = [(path, module) for path, module in model.named_modules() if any(_buffers_of(module))]
        self._buffers = dict(self._current_buffers())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` and note what its results were computed from."""
        given = kwargs or {}
        if self._copies:  # no operation of the model
            return func(*args, **given)
        operands = tensors_in((args, given))
        for operand in operands:  # inputs and constants, which no operation has made
            if self._key(operand) not in self._storages:
                self._hold(operand, NOTHING).made_at = Place(done=0)
        sources = NOTHING.union(*(self.sources(operand) for operand in operands))
        result = func(*args, **given)
        is_before_end = self.place.inside is None and self.place.done < self._num_blocks
        if is_before_end and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            sources |= {Mark("random", self.place.done)}
        self.read(sources)
        for written in _written(func, args, given):
            self._write(written, sources)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and self._key(leaf) not in self._storages:
                self._hold(leaf, sources)
        return result

    def sources(self, tensor: torch.Tensor) -> Sources:
        """Return what `tensor` was computed from."""
        held = self._storages.get(self._key(tensor))
        return NOTHING if held is None else held.sources

    def hand_over(self, tensor: torch.Tensor, mark: Mark) -> torch.Tensor:
        """Return a copy of `tensor` that has `mark` for its only source; writes to it are writes to `tensor` too."""
        origin = self._storages.get(self._key(tensor)) or self._hold(tensor, NOTHING)
        self._copies = True
        copy = tensor.clone()
        self._copies = False
        held = self._hold(copy, frozenset({mark}))
        held.origin, held.is_hidden = origin, mark.kind == "hidden"
        return copy

    def read(self, sources: Sources) -> None:
        """Note that code has read what `sources` are of, where it is, without an operation."""
        self.reads[self.place] = self.reads.get(self.place, NOTHING) | sources

    def look_for_reassigned(self) -> None:
        """Note the buffers that were replaced by other tensors since this was last called."""
        for key, (name, tensor) in self._current_buffers():
            if key not in self._buffers or self._buffers[key][1] is tensor:
                continue
            self.reassigned.add(name)
            self._note_write(name, self.sources(tensor))
            held = self._storages.get(self._key(tensor)) or self._hold(tensor, NOTHING)
            held.sources |= {name}
            held.name = name
        self._buffers = dict(self._current_buffers())

    def _current_buffers(self) -> Iterator[tuple[tuple[int, str], tuple[str, torch.Tensor]]]:
        for path, module in self._holders:
            for name, value in _buffers_of(module):
                yield (id(module), name), (f"{path}.{name}".lstrip("."), value)

    def _register(self, name: str, tensor: torch.Tensor) -> None:
        held = self._storages.get(self._key(tensor)) or self._hold(tensor, NOTHING)
        held.sources |= {name}
        held.name = held.name or name

    def _hold(self, tensor: torch.Tensor, sources: Sources) -> _Held:
        reference: object = tensor
        try:
            # A weak one: the storage may go, and its number is given to no other while this is kept.
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except (NotImplementedError, RuntimeError):
            self._kept.append(tensor)
        held = _Held(reference, sources, self.place)
        self._storages[self._key(tensor)] = held
        return held

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        try:
            return storage_key(tensor)
        except (NotImplementedError, RuntimeError):
            return id(tensor)

    def _write(self, tensor: torch.Tensor, sources: Sources) -> None:
        held = self._storages.get(self._key(tensor)) or self._hold(tensor, NOTHING)
        inside = self.place.inside
        if held.is_hidden:
            self.writes_hidden = True
        elif inside is not None and held.made_at.inside != inside:
            sources |= {Mark("beside", inside)}
        held.sources |= sources
        if held.name is not None:
            self._note_write(held.name, sources)
        origin = held.origin
        while origin is not None:  # which other code may hold
            origin.sources |= sources if inside is None else sources | {Mark("beside", inside)}
            origin = origin.origin

    def _note_write(self, name: str, sources: Sources) -> None:
        self.writes.setdefault(name, []).append(Write(self.place, sources | {name}))


def _buffers_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_buffers(recurse=False, remove_duplicate=False)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    positions, names = _written_arguments(func)
    for value in [*(args[at] for at in positions if at < len(args)), *(kwargs.get(name) for name in names)]:
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    # Its schema does not say that it writes running statistics in training.
    if "batch_norm" in str(func) and "backward" not in str(func) and len(args) > 5 and args[5] is True:
        yield from (value for value in args[3:5] if isinstance(value, torch.Tensor))


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    schema = schema_of(func)
    arguments = [] if schema is None else schema.arguments
    written = [one for one in enumerate(arguments) if one[1].alias_info is not None and one[1].alias_info.is_write]
    return (
        tuple(at for at, argument in written if not argument.kwarg_only),
        tuple(argument.name for _, argument in written),
    )


def tensors_within(output: Any, *, leave_out: frozenset[int] = frozenset()) -> list[torch.Tensor]:
    """Return the tensors in an output: in containers, and in the fields of objects but those with ids `leave_out`."""
    found: list[torch.Tensor] = []
    seen: set[int] = set(leave_out)

    def walk(value: Any, depth: int) -> None:
        for leaf in pytree.tree_leaves(value, is_leaf=lambda one: id(one) in leave_out):
            if isinstance(leaf, torch.Tensor):
                found.append(leaf)
            elif id(leaf) not in seen and depth and _has_fields(leaf):
                seen.add(id(leaf))
                walk(list(vars(leaf).values()), depth - 1)

    walk(output, _DEPTH)
    return found


def _has_fields(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value)


def map_tensors(change: Callable[[torch.Tensor], Any], output: Any, *, leave_out: frozenset[int] = frozenset()) -> Any:
    """Return an output with its tensors changed: in containers, and in objects with fields, which are changed in place.

    Objects with ids in `leave_out` stay as they are.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if id(leaf) not in leave_out and _has_fields(leaf):
            for name, value in list(vars(leaf).items()):
                object.__setattr__(leaf, name, map_tensors(change, value, leave_out=leave_out | {id(leaf)}))
        return leaf

    leaves, structure = pytree.tree_flatten(output, is_leaf=lambda one: id(one) in leave_out)
    return pytree.tree_unflatten([changed(leaf) for leaf in leaves], structure)


@dataclass(frozen=True)
class Uses:
    """The tensors of a model that its pieces use, by their names: before its blocks, in each block, and after them."""

    before: frozenset[str]
    blocks: tuple[frozenset[str], ...]
    after: frozenset[str]

    def of(self, start: int, end: int) -> frozenset[str]:
        """Return those of a stage with blocks `start`..`end` - 1, the model's ends included."""
        names = frozenset().union(*self.blocks[start:end])
        if start == 0:
            names |= self.before
        if end == len(self.blocks):
            names |= self.after
        return names

    def joined(self, other: Uses) -> Uses:
        """Return the tensors that the pieces use in one run or another."""
        blocks = zip(self.blocks, other.blocks, strict=True)
        return Uses(self.before | other.before, tuple(one | two for one, two in blocks), self.after | other.after)
