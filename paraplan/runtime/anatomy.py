"""How a model uses its parameters: before its blocks, in each block, and after them.

The model is copied to torch's meta device, where tensors have shapes and no values, and run once. Cutting the graph at
every block tells which parameters each piece of it reaches, tied ones included, and whether the blocks form a chain:
a pipeline can be cut only where one tensor alone passes from block to block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.runtime.blocks import BlockStack
from paraplan.runtime.split.cut import Cut
from paraplan.runtime.split.split_tensor import SplitTensor
from paraplan.runtime.step.batches import call_model
from paraplan.runtime.without_values import WAYS_TO_RUN, Context, reentrant_refused

_EXAMPLE_BATCH, _EXAMPLE_TOKENS = 2, 8
HINT = "use pp=1 for this model"
"""What a model that is no chain of blocks is told."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class HiddenShape:
    """The tensor that passes from one block to the next, for one micro-batch.

    Under context parallelism it has this rank's tokens; `cut` says which those are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: Cut | None = None


@dataclass(frozen=True)
class BlockCall:
    """The arguments of one call of a block, and the context in which it runs without values.

    `graded` says of each tensor among the arguments whether gradients flow back to it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Context
    graded: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Anatomy:
    """A model's blocks as a chain, with the names of the parameters that each piece uses.

    `shadow` is a copy of the model on the meta device; where it had to be made in bf16, `hidden_dtype` is what the
    model itself computes in. A block takes the hidden state as its argument `hidden_argument` (a position or a keyword)
    and returns it alone, or first in a tuple of `num_outputs`. Names are those of `named_parameters`: a tied parameter
    has one. A parameter that nothing uses counts as used before the blocks.
    """

    shadow: nn.Module
    hidden_dtype: torch.dtype | None
    stack: BlockStack
    hidden_argument: int | str
    num_outputs: int | None
    before: frozenset[str]
    blocks: tuple[frozenset[str], ...]
    after: frozenset[str]

    def used_by(self, start: int, end: int) -> frozenset[str]:
        """Return the parameters that a stage with blocks `start`..`end` - 1 uses, the model's ends included."""
        names = frozenset().union(*self.blocks[start:end])
        if start == 0:
            names |= self.before
        if end == len(self.blocks):
            names |= self.after
        return names

    def hidden_shapes(self, inputs: Any) -> list[HiddenShape]:
        """Return what each block receives for one micro-batch of `inputs`, on whatever device these are."""
        with torch.no_grad():
            probe, _ = _probe(self.shadow, self.stack, _on_meta(inputs))
        return [replace(hidden, dtype=self.own_dtype(hidden.dtype)) for hidden in probe.received]

    def own_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what a tensor of `dtype` in the shadow is in the model."""
        return self.hidden_dtype if self.hidden_dtype is not None and dtype == torch.bfloat16 else dtype


def examine(model: nn.Module, stack: BlockStack, example_inputs: Any = None) -> Anatomy:
    """Return the anatomy of `model`, run on `example_inputs`.

    Without these the inputs are those of the model's own `example_inputs(batch, tokens)`, where it has that method,
    else token ids. Raises `UsageError` where the model does not run on them, and `UnsupportedPlanError` where its
    blocks do not form a chain.
    """
    inputs = example_of(model, example_inputs)
    shadow = meta_copy(model)
    hidden_dtype = None
    with torch.enable_grad():
        try:
            probe, output = _probe(shadow, stack, inputs)
        except UsageError:
            # Grouped matmuls (experts) have shapes in bf16 only.
            hidden_dtype = next((held.dtype for held in model.parameters() if held.is_floating_point()), None)
            if hidden_dtype in (None, torch.bfloat16):
                raise
            shadow = shadow.to(torch.bfloat16)
            probe, output = _probe(shadow, stack, inputs)
    names = {id(parameter): name for name, parameter in shadow.named_parameters()}
    if len(probe.received) != len(stack):
        raise UnsupportedPlanError(
            f"{len(probe.received)} of {len(stack)} blocks take part in a forward pass", hint=HINT
        )
    assert probe.hidden_argument is not None
    reached_after = _reached(output)
    if probe.side_outputs & reached_after.union(*probe.reached):
        raise UnsupportedPlanError("blocks hand on more than one tensor that needs a gradient", hint=HINT)
    after = frozenset(names[key] for key in reached_after if key in names)
    blocks = tuple(frozenset(names[key] for key in reached if key in names) for reached in probe.reached)
    before = frozenset(names[key] for key in probe.reached_before if key in names)
    used = before.union(after, *blocks)
    return Anatomy(
        shadow=shadow,
        hidden_dtype=hidden_dtype,
        stack=stack,
        hidden_argument=probe.hidden_argument,
        num_outputs=probe.num_outputs,
        before=before | (frozenset(names.values()) - used),
        blocks=blocks,
        after=after,
    )


class _ChainProbe:
    """Hooks that follow the hidden state from block to block and cut the graph between them."""

    def __init__(self, stack: BlockStack) -> None:
        self.received: list[HiddenShape] = []
        self.reached: list[set[int]] = []
        self.reached_before: set[int] = set()
        self.side_outputs: set[int] = set()
        self.hidden_argument: int | str | None = None
        self.num_outputs: int | None = None
        self._stack = stack
        self._handed_on: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = []  # with their graphs, so that ids that were noted stay theirs

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Follow the forward passes of `model` in this context."""
        handles = []
        for index, block in enumerate(self._stack.modules(model)):
            handles.append(block.register_forward_pre_hook(self._enter(index), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave(index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, index: int) -> Callable[..., Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if index != len(self.received):
                raise UnsupportedPlanError(
                    f"block {self._stack.names[index]} runs out of turn, after {len(self.received)} blocks", hint=HINT
                )
            where, hidden = self._find_hidden(index, args, kwargs)
            self._kept.append(hidden)
            if index == 0:
                self.reached_before = _leaves(hidden)
            cut = hidden.cut if isinstance(hidden, SplitTensor) else None
            own = hidden.local if isinstance(hidden, SplitTensor) else hidden
            self.received.append(HiddenShape(shape=tuple(own.shape), dtype=own.dtype, cut=cut))
            return put_argument(where, _cut(hidden), args, kwargs)

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
            # What stands beside the hidden state (attention weights) is let through, and must not be used again.
            others = pytree.tree_map(self._mark, others)
            self.num_outputs = len(output) if isinstance(output, tuple) else None
            self._kept.append(first)
            self.reached.append(_leaves(first))
            self._handed_on = _cut(first)
            return (self._handed_on, *others) if isinstance(output, tuple) else self._handed_on

        return leave

    def _mark(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        marked = _cut(leaf)
        self.side_outputs.add(id(marked))
        self._kept.append(marked)
        return marked


def put_argument(
    where: int | str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `args` and `kwargs` with `value` at `where`, a position or a keyword."""
    if isinstance(where, int):
        return (*args[:where], value, *args[where + 1 :]), kwargs
    return args, {**kwargs, where: value}


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled() and tensor.is_floating_point())


def _reached(output: Any) -> set[int]:
    leaves = pytree.tree_leaves(output)
    # An output object that torch does not know as a container is one leaf: its fields are looked at.
    leaves += [leaf for holder in leaves for leaf in pytree.tree_leaves(getattr(holder, "__dict__", None))]
    return set().union(*(_leaves(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)))


def _leaves(tensor: torch.Tensor) -> set[int]:
    """Return the ids of the tensors that the graph of `tensor` starts from."""
    found: set[int] = set()
    if tensor.grad_fn is None:
        return {id(tensor)}
    waiting, seen = [tensor.grad_fn], {tensor.grad_fn}
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of `model` without values, every floating-point parameter asking for a gradient; ties are kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        shape_only = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(shape_only, requires_grad=parameter.is_floating_point())
    for module in model.modules():
        # Buffers, and tensors kept as plain attributes.
        for tensor in [*module._buffers.values(), *vars(module).values()]:
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    return copy.deepcopy(model, memo)


def example_of(model: nn.Module, example_inputs: Any, *, multiple: int = 1) -> Any:
    """Return inputs for `model` on the meta device: `example_inputs`, or where that is None those of `examine`.

    Sequences that are made here have a multiple of so many tokens.
    """
    if example_inputs is not None:
        return _on_meta(example_inputs)
    tokens = -(-_EXAMPLE_TOKENS // multiple) * multiple
    own = getattr(model, "example_inputs", None)
    if own is not None:
        return _on_meta(own(_EXAMPLE_BATCH, tokens))
    return torch.zeros(_EXAMPLE_BATCH, tokens, dtype=torch.long, device="meta")


def block_calls(shadow: nn.Module, stack: BlockStack, inputs: Any) -> list[BlockCall | None]:
    """Return what each block of `shadow` is called with first when it runs on `inputs`, all on the meta device.

    None stands for a block that is not called.
    """

    def attempt(tried: Any, context: Context) -> list[BlockCall | None]:
        calls: list[BlockCall | None] = [None] * len(stack)
        graded: list[tuple[bool, ...]] = [()] * len(stack)

        def note(index: int) -> Callable[..., None]:
            def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if torch.is_grad_enabled():
                    leaves = pytree.tree_leaves((args, kwargs))
                    graded[index] = tuple(leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor))
                    return
                # A copy: a cache among the arguments is filled as the blocks run.
                calls[index] = calls[index] or copy.deepcopy(BlockCall(args, kwargs, context))

            return enter

        handles = [
            block.register_forward_pre_hook(note(index), with_kwargs=True)
            for index, block in enumerate(stack.modules(shadow))
        ]
        try:
            with torch.no_grad():
                call_model(shadow, tried)
            with torch.enable_grad():
                call_model(shadow, tried)
        finally:
            for handle in handles:
                handle.remove()
        return [call and replace(call, graded=flags) for call, flags in zip(calls, graded, strict=True)]

    try:
        return first_that_runs(shadow, inputs, attempt)
    except UsageError:
        # Grouped matmuls (experts) have shapes in bf16 only.
        return first_that_runs(shadow.to(torch.bfloat16), inputs, attempt)


def _probe(shadow: nn.Module, stack: BlockStack, inputs: Any) -> tuple[_ChainProbe, Any]:
    """Run `shadow` on `inputs` and return what its blocks did, with the output."""

    def attempt(tried: Any, _: Context) -> tuple[_ChainProbe, Any]:
        probe = _ChainProbe(stack)
        with probe.attached(shadow):
            return probe, call_model(shadow, tried)

    return first_that_runs(shadow, inputs, attempt)


def first_that_runs(shadow: nn.Module, inputs: Any, attempt: Callable[[Any, Context], _Result]) -> _Result:
    """Return `attempt` of `inputs`, which runs `shadow`, or of fewer inputs.

    Code that looks at values (of a mask) cannot run on the meta device. Then fewer inputs are tried: only the tensors
    of a dict, then only the first one, which decides the shapes.
    """
    failures = []
    for context, tried in product(WAYS_TO_RUN, _reductions(inputs)):
        try:
            with context(), reentrant_refused():
                return attempt(tried, context)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            failures.append(error)
    first = failures[0]
    raise UsageError(
        f"{type(shadow).__name__} does not run on inputs of {_described(inputs)}, so its structure cannot be found: "
        f"{str(first).splitlines()[0] if str(first) else type(first).__name__}",
        hint="pass a small batch as example_inputs= to job.prepare",
    ) from first


def _reductions(inputs: Any) -> list[Any]:
    if not isinstance(inputs, dict):
        return [inputs]
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return [inputs, tensors, dict(list(tensors.items())[:1])]


def _described(inputs: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in tensors) or "no tensor"


def _on_meta(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, tree)
