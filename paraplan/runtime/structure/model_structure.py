"""The structure of a model, found once and used by every axis of a plan: its blocks, their chain, how each is called.

The model is copied to torch's meta device, where tensors have shapes and no values, and run there. Following what every
tensor is computed from (`dataflow`) tells what each piece of it reads, and whether the blocks form a chain (`chain`):
a pipeline can be cut only where one tensor alone passes from block to block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.model.trace_shapes import MetaShapes
from paraplan.runtime.data.batches import call_model
from paraplan.runtime.structure.blocks import BlockStack
from paraplan.runtime.structure.chain import (
    HINT,
    ChainProbe,
    ChainUses,
    find_uses,
)
from paraplan.runtime.structure.chain import HiddenShape as HiddenShape
from paraplan.runtime.structure.copies import meta_copy
from paraplan.runtime.structure.dataflow import Dataflow, Mark, tensors_within
from paraplan.runtime.structure.forwards import DOES_NOT_RUN
from paraplan.runtime.structure.meta import WAYS_TO_RUN, Context, attributes_kept, reentrant_refused
from paraplan.runtime.structure.outputs import map_outputs, numbered_outputs
from paraplan.runtime.structure.questions import Questions, flips
from paraplan.runtime.structure.snapshots import modes
from paraplan.runtime.torch_private import pytree, tensors_in

_EXAMPLE_BATCH, _EXAMPLE_TOKENS = 2, 8
_READINGS = ("item() cannot be called on meta", "meta device type tensor to numpy")  # in torch's words
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one call of a block, and the context in which it runs without values.

    `graded` says of each tensor among the arguments whether gradients flow back to it, and `read` which tensors of the
    output other code reads beside the first, by their numbers (`outputs`).
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Context
    graded: tuple[bool, ...] = ()
    read: frozenset[int] = frozenset()


@dataclass(frozen=True)
class BlockChain:
    """A model's blocks as a chain, with the names of the parameters and other tensors that each piece uses.

    `meta_model` is a copy of the model on the meta device; where it had to be made in bf16, `hidden_dtype` is what the
    model itself computes in. A block takes the hidden state as its argument `hidden_argument` (a position or a keyword)
    and returns it alone, or first in a tuple of `num_outputs`. Names are those of `named_parameters` and
    `named_buffers`: a tied parameter has one. What nothing uses counts to where it lies, outside of blocks to what is
    before them. `writes_hidden`: blocks write into the hidden state that they are given. `carried` has for each block
    but the last which tensors of its output the next one reads beside the hidden state, by their numbers.
    """

    meta_model: nn.Module
    hidden_dtype: torch.dtype | None
    stack: BlockStack
    hidden_argument: int | str
    num_outputs: int | None
    uses: ChainUses
    writes_hidden: bool = False
    carried: tuple[tuple[int, ...], ...] = ()

    def hidden_shapes(self, inputs: Any) -> list[tuple[HiddenShape, ...]]:
        """Return what each block receives for one micro-batch of `inputs`: the hidden state, and what is carried."""

        def attempt(tried: Any, _: Context) -> ChainProbe:
            probe = ChainProbe(self.stack)
            with probe.attached(self.meta_model):
                call_model(self.meta_model, tried)
            return probe

        with torch.no_grad():
            probe = first_that_runs(self.meta_model, _on_meta(inputs), attempt)
        made = zip(probe.beside[:-1], self.carried, strict=True)
        beside = [[], *([shapes[number] for number in numbers] for shapes, numbers in made)]
        return [
            tuple(replace(one, dtype=self.own_dtype(one.dtype)) for one in (hidden, *others))
            for hidden, others in zip(probe.received, beside, strict=True)
        ]

    def own_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what a tensor of `dtype` in the meta model is in the model."""
        return self.hidden_dtype if self.hidden_dtype is not None and dtype == torch.bfloat16 else dtype


class ModelStructure:
    """The structure of a whole model, found as far as it is asked for, each part of it once.

    `stack` are its blocks. It runs without values on `inputs`: `example_inputs`, or without these those of the model's
    own `example_inputs(batch, tokens)`, where it has that method, else token ids; of so many tokens that
    `token_multiple` divides them.
    """

    def __init__(
        self, model: nn.Module, stack: BlockStack | None, example_inputs: Any = None, *, token_multiple: int = 1
    ) -> None:
        self.model = model
        self._stack = stack
        self._example_inputs = example_inputs
        self._token_multiple = token_multiple
        self._own_dtype: torch.dtype | None = None

    @property
    def stack(self) -> BlockStack:
        """The blocks of the model, which has some."""
        assert self._stack is not None
        return self._stack

    @property
    def has_blocks(self) -> bool:
        """Whether the model has repeated blocks."""
        return self._stack is not None

    def around(self, names: tuple[str, ...]) -> ModelStructure:
        """Return the structure of the same model with other modules as its blocks."""
        return ModelStructure(self.model, BlockStack(names), self._example_inputs, token_multiple=self._token_multiple)

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of `model`, which is that of the structure or a copy of it; it may have none."""
        return [] if self._stack is None else self._stack.modules(model)

    def check_has_blocks(self, axis: str, purpose: str) -> None:
        """Raise `UnsupportedPlanError` for a model without repeated blocks; `axis` of the plan needs them `purpose`."""
        if self._stack is None:
            raise UnsupportedPlanError(
                f"{axis}, but {type(self.model).__name__} has no repeated blocks {purpose}",
                hint=f"keep the blocks in an nn.ModuleList or nn.Sequential, or use {axis.partition('=')[0]}=1",
            )

    @cached_property
    def inputs(self) -> Any:
        """Inputs of the model on the meta device."""
        return example_of(self.model, self._example_inputs, multiple=self._token_multiple)

    @cached_property
    def meta_model(self) -> nn.Module:
        """A copy of the model without values; in bf16 where it runs in no other type."""
        return meta_copy(self.model)

    def run(self, attempt: Callable[[Any, Context], _Result], meta_model: nn.Module | None = None) -> _Result:
        """Return `attempt` of the inputs, or of fewer, which runs `meta_model`, by default the structure's own.

        Raises `UsageError` where that does not run on any of them.
        """
        module = self.meta_model if meta_model is None else meta_model
        try:
            return first_that_runs(module, self.inputs, attempt)
        except UsageError:
            # Grouped matmuls (experts) have shapes in bf16 only.
            dtype = next((held.dtype for held in module.parameters() if held.is_floating_point()), None)
            if dtype in (None, torch.bfloat16):
                raise
            if module is self.meta_model:
                self._own_dtype = dtype
            return first_that_runs(module.to(torch.bfloat16), self.inputs, attempt)

    @cached_property
    def chain(self) -> BlockChain:
        """The blocks as a chain, as they run in training. Raises `UnsupportedPlanError` where they do not form one."""
        training = None if self.meta_model.training else True  # parts that are in evaluation on purpose stay so
        with torch.enable_grad(), modes(self.meta_model, training=training):
            probe, uses = self.run(self._follow)
        assert probe.hidden_argument is not None
        assert probe.flow is not None
        return BlockChain(
            meta_model=self.meta_model,
            hidden_dtype=self._own_dtype,
            stack=self.stack,
            hidden_argument=probe.hidden_argument,
            num_outputs=probe.num_outputs,
            uses=uses,
            writes_hidden=probe.flow.writes_hidden,
            carried=probe.carried(),
        )

    @cached_property
    def calls(self) -> list[BlockCall | None]:
        """The first call of each block; None for a block that is not called."""
        return self.run(self._note_calls)

    def _follow(self, tried: Any, _: Context) -> tuple[ChainProbe, ChainUses]:
        """Run the model on `tried` and return what its blocks did, and what its pieces use, whatever values answer."""
        probe, uses = self._followed(tried)
        assert probe.questions is not None
        for flipped in flips(probe.questions.num_asked):
            try:
                other, others_uses = self._followed(tried, flipped)
            except UnsupportedPlanError as error:
                raise UnsupportedPlanError(
                    f"the model branches on values, and on another branch {error.message}", hint=error.hint
                ) from error
            except DOES_NOT_RUN as error:
                if isinstance(error, NotImplementedError) or "meta" in str(error).replace("device='meta'", ""):
                    raise UnsupportedPlanError(
                        "the model branches on values, and its other branch does not run without values: "
                        f"{(str(error).splitlines() or [''])[0]}",
                        hint=HINT,
                    ) from error
                continue  # the model itself refuses such values
            calls = [(one.hidden_argument, one.num_outputs, one.carried()) for one in (probe, other)]
            if calls[0] != calls[1]:
                raise UnsupportedPlanError("the model branches on values, and calls its blocks otherwise", hint=HINT)
            assert probe.flow is not None
            assert other.flow is not None
            probe.flow.writes_hidden |= other.flow.writes_hidden
            uses = uses.joined(others_uses)
        return probe, uses

    def _followed(self, tried: Any, flipped: frozenset[int] = frozenset()) -> tuple[ChainProbe, ChainUses]:
        """Run the model on `tried` once, with other answers to the questions `flipped`."""
        stack = self.stack
        flow = Dataflow(self.meta_model, len(stack))
        probe = ChainProbe(stack, flow, Questions(flow, len(stack), flipped))
        with attributes_kept(self.meta_model), probe.attached(self.meta_model):
            output = call_model(self.meta_model, tried)
            flow.look_for_reassigned()
        if len(probe.received) != len(stack):
            raise UnsupportedPlanError(
                f"{len(probe.received)} of {len(stack)} blocks take part in a forward pass", hint=HINT
            )
        probe.check_pure(output)
        return probe, find_uses(probe, self.meta_model, stack, output, is_complete=tried is self.inputs)

    def _note_calls(self, tried: Any, context: Context) -> list[BlockCall | None]:
        calls: list[BlockCall | None] = [None] * len(self.stack)
        graded: list[tuple[bool, ...]] = [()] * len(self.stack)
        returned: set[int] = set()

        def note(index: int) -> Callable[..., None]:
            def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if torch.is_grad_enabled():
                    leaves = pytree.tree_leaves((args, kwargs))
                    graded[index] = tuple(leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor))
                    return
                # A copy: a cache among the arguments is filled as the blocks run.
                calls[index] = calls[index] or copy.deepcopy(BlockCall(args, kwargs, context))

            return enter

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            returned.update(numbered_outputs(output))

        with ExitStack() as undo:
            for index, block in enumerate(self.stack.modules(self.meta_model)):
                undo.callback(block.register_forward_pre_hook(note(index), with_kwargs=True).remove)
                undo.callback(block.register_forward_hook(leave).remove)
            with torch.no_grad():
                call_model(self.meta_model, tried)
            with torch.enable_grad():
                if returned <= {0}:
                    call_model(self.meta_model, tried)
                    read = [frozenset[int]()] * len(self.stack)
                else:
                    read = _outputs_read(self.meta_model, self.stack, tried)
        return [
            call and replace(call, graded=flags, read=numbers)
            for call, flags, numbers in zip(calls, graded, read, strict=True)
        ]


def example_of(model: nn.Module, example_inputs: Any, *, multiple: int = 1) -> Any:
    """Return inputs for `model` on the meta device: `example_inputs`, or where that is None those of `ModelStructure`.

    Sequences that are made here have a multiple of so many tokens.
    """
    if example_inputs is not None:
        return _on_meta(example_inputs)
    tokens = -(-_EXAMPLE_TOKENS // multiple) * multiple
    own = getattr(model, "example_inputs", None)
    if own is not None:
        return _on_meta(own(_EXAMPLE_BATCH, tokens))
    return torch.zeros(_EXAMPLE_BATCH, tokens, dtype=torch.long, device="meta")


def _outputs_read(meta_model: nn.Module, stack: BlockStack, inputs: Any) -> list[frozenset[int]]:
    """Return which tensors that the blocks return beside the first are read by other code, by their numbers."""
    flow = Dataflow(meta_model, len(stack))

    def marked(index: int) -> Callable[..., Any]:
        def change(number: int, tensor: torch.Tensor) -> torch.Tensor:
            return flow.hand_over(tensor, Mark("output", index, number)) if number else tensor

        return lambda _, __, output: map_outputs(change, output)

    with ExitStack() as undo:
        for index, block in enumerate(stack.modules(meta_model)):
            undo.callback(block.register_forward_hook(marked(index)).remove)
        with flow:
            output = call_model(meta_model, inputs)
    sources = frozenset[str | Mark]().union(*flow.reads.values(), *map(flow.sources, tensors_within(output)))
    marks = [source for source in sources if isinstance(source, Mark) and source.kind == "output"]
    return [frozenset(mark.number for mark in marks if mark.block == index) for index in range(len(stack))]


def first_that_runs(meta_model: nn.Module, inputs: Any, attempt: Callable[[Any, Context], _Result]) -> _Result:
    """Return `attempt` of `inputs`, which runs `meta_model`, or of fewer inputs.

    Code that looks at values (of a mask) cannot run on the meta device. Then fewer inputs are tried: only the tensors
    of a dict, then only the first one, which decides the shapes.
    """
    failures = []
    for context, tried in product(WAYS_TO_RUN, _reductions(inputs)):
        try:
            with MetaShapes(), context(), reentrant_refused(), attributes_kept(meta_model):
                return attempt(tried, context)
        except DOES_NOT_RUN as error:
            failures.append(error)
    first = failures[0]
    words = str(first).splitlines()[0] if str(first) else type(first).__name__
    reads_values = any(reading in words for reading in _READINGS)
    raise UsageError(
        f"{type(meta_model).__name__} does not run on inputs of {_described(inputs)}, so its structure cannot be "
        f"found: {words}",
        hint="leave out item(), float() and numpy() of tensors in its forward pass, or use DDP or ZeRO"
        if reads_values
        else "pass a small batch as example_inputs= to job.prepare",
    ) from first


def _reductions(inputs: Any) -> list[Any]:
    if not isinstance(inputs, dict):
        return [inputs]
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return [inputs, tensors, dict(list(tensors.items())[:1])]


def _described(inputs: Any) -> str:
    tensors = tensors_in(inputs)
    return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in tensors) or "no tensor"


def _on_meta(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to("meta"), tree)
