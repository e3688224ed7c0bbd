"""A model's blocks as a chain: what passes from block to block, and what else each piece of the model uses.

Hooks follow the hidden state from block to block, and what a block returns beside it for the next (T5's bias of
positions); `dataflow` says what everything was computed from. What is computed before the blocks from inputs alone
(masks, positions, an encoder's context) may be read anywhere: every stage of a pipeline computes it anew from the
parameters that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.structure.blocks import BlockStack
from paraplan.runtime.structure.dataflow import (
    NOTHING,
    Dataflow,
    Mark,
    Place,
    Registered,
    Sources,
    Uses,
    map_tensors,
    named_tensors,
    tensors_within,
)
from paraplan.runtime.structure.questions import Questions
from paraplan.runtime.torch_private import pytree

HINT = "use pp=1 for this model"
"""The way out for a model that is no chain of blocks."""


@dataclass(frozen=True)
class HiddenShape:
    """A tensor that passes from one block to the next, for one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ChainProbe:
    """Hooks that follow the hidden state from block to block, and tell `flow`, where it is given, where code runs.

    `questions` are those that code asks meanwhile.
    """

    def __init__(self, stack: BlockStack, flow: Dataflow | None = None, questions: Questions | None = None) -> None:
        self.flow = flow
        self.questions = questions
        self.received: list[HiddenShape] = []
        self.hidden_argument: int | str | None = None
        self.num_outputs: int | None = None
        self.before: Sources = NOTHING
        self.handed_in: set[int] = set()
        self.beside: list[dict[int, HiddenShape]] = []
        self._stack = stack
        self._handed_on: torch.Tensor | None = None
        self._kept: list[Any] = []  # so that ids that were noted stay theirs

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Follow the forward passes of `model` in this context."""
        with ExitStack() as undo:
            for index, block in enumerate(self._stack.modules(model)):
                undo.callback(block.register_forward_pre_hook(self._enter(index), with_kwargs=True).remove)
                undo.callback(block.register_forward_hook(self._leave(index)).remove)
            if self.flow is not None:
                undo.enter_context(self.flow)
            if self.questions is not None:
                undo.enter_context(self.questions)
            yield

    def _enter(self, index: int) -> Callable[..., Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if index != len(self.received):
                raise UnsupportedPlanError(
                    f"block {self._stack.names[index]} runs out of turn, after {len(self.received)} blocks", hint=HINT
                )
            where, hidden = self._find_hidden(index, args, kwargs)
            self.received.append(_shape_of(hidden))
            if self.flow is None:
                return args, kwargs
            if index == 0:
                self.before = self.flow.sources(hidden)
            objects = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor)]
            self._kept.append(objects)
            self.handed_in.update(id(one) for one in objects if hasattr(one, "__dict__"))
            self.flow.look_for_reassigned()
            if self.questions is not None:
                self.questions.check_drawn()
            entered = self.flow.hand_over(hidden, Mark("hidden", index))
            self.flow.place = Place(done=index, inside=index)
            return put_argument(where, entered, args, kwargs)

        return enter

    def _find_hidden(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, torch.Tensor]:
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = [(where, value) for where, value in named if isinstance(value, torch.Tensor)]
        if index == 0:
            # Token ids or masks may stand beside the hidden state; a model may also begin with its blocks.
            found = [(where, value) for where, value in tensors if value.is_floating_point()] or tensors
        else:
            found = [(where, value) for where, value in tensors if value is self._handed_on]
        if not found:
            raise UnsupportedPlanError(
                f"block {self._stack.names[index]} does not take the output of the block before it unchanged",
                hint=HINT,
            )
        where, hidden = found[0]
        if index == 1 and where != self.hidden_argument:
            raise UnsupportedPlanError(
                f"blocks take their hidden state as argument {self.hidden_argument} at first and {where} later",
                hint=HINT,
            )
        self.hidden_argument = where
        return where, hidden

    def _leave(self, index: int) -> Callable[..., Any]:
        def leave(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            first, *others = output if isinstance(output, tuple) else (output,)
            if not isinstance(first, torch.Tensor):
                raise UnsupportedPlanError(
                    f"block {self._stack.names[index]} returns {type(first).__name__} first, not its hidden state",
                    hint=HINT,
                )
            self.num_outputs = len(output) if isinstance(output, tuple) else None
            self._handed_on = first
            flow = self.flow
            numbered = dict(enumerate(others, start=1))
            self.beside.append({number: _shape_of(one) for number, one in numbered.items() if _can_pass_on(one)})
            if flow is not None:
                flow.look_for_reassigned()

                def marked(number: int, other: Any) -> Any:
                    mark = Mark("beside", index, number if number in self.beside[index] else 0)
                    return map_tensors(partial(flow.hand_over, mark=mark), other, leave_out=self._left_out)

                others = [marked(number, other) for number, other in numbered.items()]
                self._handed_on = flow.hand_over(first, Mark("hidden", index + 1))
                flow.place = Place(done=index + 1)
            if self.questions is not None:
                self.questions.allow_drawn()
            return (self._handed_on, *others) if isinstance(output, tuple) else self._handed_on

        return leave

    @property
    def _left_out(self) -> frozenset[int]:
        return frozenset(self.handed_in)

    def check_pure(self, output: Any) -> None:
        """Raise `UnsupportedPlanError` where more than the hidden state passes from block to block, or to the end."""
        flow, names = self.flow, self._stack.names
        assert flow is not None
        for index, name in enumerate(names):
            for mark in _marks(self.block_reads(index)):
                passes_on = mark.kind == "beside" and mark.number and mark.block == index - 1
                if mark.kind != "random" and mark.block != index and not passes_on:
                    raise UnsupportedPlanError(f"block {name} reads {self._described(mark)}", hint=HINT)
        for mark in _marks(self.after_reads(output)):
            if mark.kind != "random" and mark != Mark("hidden", len(names)):
                raise UnsupportedPlanError(f"what follows the blocks reads {self._described(mark)}", hint=HINT)

    def carried(self) -> tuple[tuple[int, ...], ...]:
        """Return which tensors of its output, beside the first, each block returns for the next, by their numbers."""
        following = [_marks(self.block_reads(index)) for index in range(1, len(self._stack))]
        return tuple(
            tuple(sorted({mark.number for mark in marks if mark.kind == "beside" and mark.block == index}))
            for index, marks in enumerate(following)
        )

    def _described(self, mark: Mark) -> str:
        names = self._stack.names
        if mark.kind == "beside":
            return f"what block {names[mark.block]} computes beside its hidden state: more than one tensor passes on"
        if mark.block == len(names):
            return "the output of the last block"
        return f"the hidden state that enters block {names[mark.block]}: more than one tensor passes on"

    def block_reads(self, index: int) -> Sources:
        """Return the sources of all that block number `index` reads."""
        assert self.flow is not None
        return NOTHING.union(*(read for place, read in self.flow.reads.items() if place.inside == index))

    def after_reads(self, output: Any) -> Sources:
        """Return the sources of all that follows the blocks, the model's `output` included."""
        assert self.flow is not None
        reads = self.flow.reads.get(Place(done=len(self._stack)), NOTHING)
        found = tensors_within(output, leave_out=self._left_out)
        return reads.union(*(self.flow.sources(tensor) for tensor in found))


def _can_pass_on(other: Any) -> bool:
    """Whether a stage could send what a block returns beside its hidden state: a tensor that may have a gradient."""
    return isinstance(other, torch.Tensor) and other.is_floating_point()


def _shape_of(tensor: torch.Tensor) -> HiddenShape:
    return HiddenShape(shape=tuple(tensor.shape), dtype=tensor.dtype)


def _marks(sources: Sources) -> list[Mark]:
    marks = [source for source in sources if isinstance(source, Mark)]
    return sorted(marks, key=lambda mark: (mark.kind, mark.block))


def put_argument(
    where: int | str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `args` and `kwargs` with `value` at `where`, a position or a keyword."""
    if isinstance(where, int):
        return (*args[:where], value, *args[where + 1 :]), kwargs
    return args, {**kwargs, where: value}


@dataclass(frozen=True)
class ChainUses:
    """Which parameters, and which buffers and other tensors, each piece of a model uses.

    `written_before` are those that the forward pass of every stage writes before the blocks. `problem` says why the
    stages of a pipeline would not compute what one process computes, None where they do. `written_inside` are those
    of the model's state that blocks write; `reads_between` says that code between the blocks reads hidden states.
    """

    parameters: Uses
    tensors: Uses
    written_before: frozenset[str]
    problem: str | None
    written_inside: frozenset[str] = frozenset()
    reads_between: bool = False

    def of(self, start: int, end: int) -> frozenset[str]:
        """Return the names that a stage with blocks `start`..`end` - 1 uses, the model's ends included."""
        return self.parameters.of(start, end) | self.tensors.of(start, end)

    def joined(self, other: ChainUses) -> ChainUses:
        """Return what is used where code may take one way or the other."""
        return ChainUses(
            parameters=self.parameters.joined(other.parameters),
            tensors=self.tensors.joined(other.tensors),
            written_before=self.written_before | other.written_before,
            problem=self.problem or other.problem,
            written_inside=self.written_inside | other.written_inside,
            reads_between=self.reads_between or other.reads_between,
        )


def find_uses(probe: ChainProbe, model: nn.Module, stack: BlockStack, output: Any, *, is_complete: bool) -> ChainUses:
    """Return what the pieces of `model` use, which has returned `output` and was followed by `probe`.

    Without `is_complete` it ran on some of its inputs alone: then what nothing was seen to use may be used anywhere.
    """
    pieces = _Pieces(probe, model, stack, output)
    problem = pieces.problem()
    before, blocks, after = pieces.completed(is_complete=is_complete)
    registered = Registered.of(model)

    def of(names: set[str]) -> Uses:
        return Uses(
            before=frozenset(before & names),
            blocks=tuple(frozenset(block & names) for block in blocks),
            after=frozenset(after & names),
        )

    return ChainUses(
        parameters=of(set(registered.parameters)),
        tensors=of(set(registered.tensors)),
        written_before=frozenset(pieces.early),
        problem=problem,
        written_inside=pieces.written_inside,
        reads_between=pieces.reads_between,
    )


class _Pieces:
    """Tensors that the pieces of a model read and write in a forward pass."""

    def __init__(self, probe: ChainProbe, model: nn.Module, stack: BlockStack, output: Any) -> None:
        assert probe.flow is not None
        self._flow, self._stack, self._num_blocks = probe.flow, stack, len(stack)
        self._lasting = frozenset(model.state_dict())  # parameters and buffers of its state
        self._lies_in = places_in_blocks(model, stack)
        self._names = {*Registered.of(model).parameters, *Registered.of(model).tensors}
        self.before = probe.before
        self.blocks = [probe.block_reads(index) for index in range(len(stack))]
        self.after = probe.after_reads(output)
        if probe.questions is not None and (everywhere := probe.questions.everywhere):
            self.before, self.after = self.before | everywhere, self.after | everywhere
            self.blocks = [block | everywhere for block in self.blocks]
        self.early, self.late = set[str](), set[str]()
        for name, writes in self._flow.writes.items():
            if all(write.place.inside is None for write in writes):
                (self.early if all(not write.place.done for write in writes) else self.late).add(name)

    @property
    def written_inside(self) -> frozenset[str]:
        """The parameters and buffers of the model's state that blocks write."""
        writes = self._flow.writes.items()
        written = {name for name, found in writes if any(write.place.inside is not None for write in found)}
        return frozenset(written & self._lasting)

    @property
    def reads_between(self) -> bool:
        """Whether code between the first and the last block reads what a block returned."""
        return any(
            mark.kind == "hidden"
            for place, reads in self._flow.reads.items()
            if place.inside is None and 0 < place.done < self._num_blocks
            for mark in _marks(reads)
        )

    def problem(self) -> str | None:
        """Return why a written tensor, or random numbers, would differ between stages and one process."""
        for name in self._flow.writes:
            problem = self._problem_of(name)
            if problem is not None:
                return problem
        self._follow_early_writes()
        readers = [(f"block {name}", reads) for name, reads in zip(self._stack.names, self.blocks, strict=True)]
        for reader, reads in [*readers, ("what follows the blocks", self.after)]:
            if any(mark.kind == "random" for mark in _marks(reads)):
                return f"{reader} reads random numbers drawn outside of it, which every stage would draw anew"
        return None

    def _problem_of(self, name: str) -> str | None:
        writes = self._flow.writes[name]
        inside = {write.place.inside for write in writes}
        lasts = name in self._lasting
        if lasts and name in self._flow.reassigned:
            return f"the forward pass puts another tensor in the place of {name}, where it should write into it (copy_)"
        readers = {index for index, reads in enumerate(self.blocks) if name in reads}
        reads_outside = name in self.before or name in self.after
        if name in self.early:
            return None
        if name in self.late:
            sources = NOTHING.union(*(write.sources for write in writes))
            foreign = [mark for mark in _marks(sources) if mark != Mark("hidden", self._num_blocks)]
            if (lasts and foreign) or readers or name in self.before:
                return f"{name} is written between or after the blocks, and stages would hold different values of it"
            return None
        if not lasts and not readers - inside and not reads_outside:
            return None
        if len(inside) > 1 or readers - inside or reads_outside:
            return f"{name} is written inside a block and used outside of it, and stages would hold different values"
        return None

    def _follow_early_writes(self) -> None:
        """Add to what reads a tensor that every stage writes what it is written from."""
        made_from = {name: NOTHING.union(*(write.sources for write in self._flow.writes[name])) for name in self.early}

        def followed(reads: Sources) -> Sources:
            while not reads >= (more := reads.union(*(made_from[name] for name in self.early if name in reads))):
                reads = more
            return reads

        self.before = followed(self.before | frozenset(self.early))
        self.blocks = [followed(reads) for reads in self.blocks]
        self.after = followed(self.after)

    def completed(self, *, is_complete: bool) -> tuple[set[str], list[set[str]], set[str]]:
        """Return the names that the pieces use; what none is seen to use belongs to where it lies."""
        before, after = self._of_model(self.before), self._of_model(self.after)
        blocks = [self._of_model(reads) for reads in self.blocks]
        for name, writes in self._flow.writes.items():
            if name in self.late:
                after |= {name} | self._of_model(NOTHING.union(*(write.sources for write in writes)))
        for name, indices in self._lies_in.items():
            for index in indices:
                blocks[index].add(name)
        unseen = self._names.difference(before, after, *blocks)
        before |= unseen
        if not is_complete:
            after |= unseen
            blocks = [block | unseen for block in blocks]
        return before, blocks, after

    def _of_model(self, sources: Sources) -> set[str]:
        return {source for source in sources if isinstance(source, str)}


def places_in_blocks(model: nn.Module, stack: BlockStack) -> dict[str, list[int]]:
    """Return the numbers of the blocks in which each tensor of `model` lies, by its name; others are left out."""
    registered = Registered.of(model)
    names = {id(tensor): name for name, tensor in [*registered.tensors.items(), *registered.parameters.items()]}
    found: dict[str, list[int]] = {}
    for index, block in enumerate(stack.modules(model)):
        tensors = [*block.parameters(), *(tensor for _, tensor in named_tensors(block))]
        for name in {names[id(tensor)] for tensor in tensors if id(tensor) in names}:
            found.setdefault(name, []).append(index)
    return found
