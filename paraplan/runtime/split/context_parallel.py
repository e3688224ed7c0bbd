"""Context parallelism: every rank of a `cp` group has some tokens of each sequence, from the first block to the loss.

What comes before the blocks (masks, positions) every rank computes for all tokens, so that it is that of one process;
embeddings too, unless what comes behind them works token by token (`own_tokens`). The first block cuts the hidden
state, and every block what it is given of tokens beside it; masks stay whole, for attention (`context_attention`). What
follows the blocks runs on a rank's own tokens, and the loss sums over the ranks (`context_sums`). All of these are
plain tensors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.runtime.data.batches import shifts_labels
from paraplan.runtime.shards.group import TensorGroup, all_gather
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.split.context_attention import ContextAttention
from paraplan.runtime.split.context_sums import SumsOverRanks
from paraplan.runtime.structure.forwards import set_forward
from paraplan.runtime.structure.outputs import map_outputs
from paraplan.runtime.torch_private import pytree

_TOKENS = 1  # their dimension, in [batch, tokens]
_BY_TOKEN = frozenset({"input_ids", "inputs_embeds"})  # what transformers calls inputs that have an entry for each
_TARGETS = frozenset({"labels", "targets", "target", "lm_labels"})
_WHOLE_NUMBERS = frozenset({torch.int64, torch.int32})
_WHOLE = re.compile("mask|bias|alibi|cache")  # arguments that speak of all keys


class Context:
    """The `cp` group as the parts of one rank's model know it.

    `num_tokens` are those of whole sequences. Under sequence parallelism a rank has one of `num_parts` of its tokens
    between blocks. `is_local` says that the last block of a pass has run, so that what follows has this rank's tokens.
    """

    def __init__(self, group: TensorGroup, *, num_parts: int = 1) -> None:
        self.group = group
        self.num_parts = num_parts
        self.attention = ContextAttention(group)
        self.sums = SumsOverRanks(group)
        self.num_tokens = 0
        self.hidden = torch.Size()
        """The shape of the state that the block which runs was called with."""
        self.cut_before: dict[tuple[str, int], tuple[Any, Any]] = {}
        """The arguments of the blocks of this pass, by its name and id, and this rank's tokens of each."""
        self.is_local = False
        self.is_cut = False
        self._is_embedding = False
        self.inside: ExitStack | None = None
        """The contexts of a forward pass that runs."""

    @property
    def num_own(self) -> int:
        """The number of tokens that this rank has of each sequence."""
        return self.num_tokens // self.group.size

    @property
    def own_outside(self) -> int | None:
        """The tokens of each sequence that code outside of blocks has, None where it has all, or blocks run."""
        return self.num_own if self._is_embedding or (self.is_local and self.sums.is_active) else None

    @contextmanager
    def embedding(self) -> Iterator[None]:
        """Surround an embedding that looks up this rank's tokens."""
        self._is_embedding = True
        try:
            yield
        finally:
            self._is_embedding = False

    def begin(self, inputs: Any, *, has_first: bool) -> None:
        """Take note of the tokens of `inputs`, which the block that runs first cuts where the rank `has_first` blocks.

        Raises `UsageError` where `cp` does not divide them.
        """
        self.is_cut = not has_first
        self.cut_before.clear()
        self.num_tokens = self.sums.num_tokens = tokens_of(inputs, self.group.size)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens of `whole`, which are in dimension `dim`."""
        own: torch.Tensor | None = getattr(whole, "own", None)
        if own is not None:  # which stands for those of all ranks
            return own
        size = whole.shape[dim] // self.group.size
        return whole.narrow(dim, self.group.index * size, size).contiguous()

    def gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tokens of all ranks, for each to go its own way with; gradients are summed and cut."""
        dim = dim % own.ndim
        sharding = Sharding(dim, (own.shape[dim] * self.group.size,), self.group.size)
        return all_gather(own, sharding, self.group) if own.is_floating_point() else self.group.gather(own, sharding)

    def cut_targets(self, targets: Any) -> Any:
        """Return `targets` with this rank's tokens of those that have an entry for each."""
        return pytree.tree_map(self._cut_target, targets)

    def _cut_target(self, leaf: Any) -> Any:
        has_tokens = isinstance(leaf, torch.Tensor) and leaf.ndim > _TOKENS and leaf.shape[_TOKENS] == self.num_tokens
        return self.cut(leaf, _TOKENS) if has_tokens else leaf

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Surround a forward pass, in which losses go over all ranks outside of blocks, once one has run."""
        self.is_local = self.sums.is_active = False
        try:
            with ExitStack() as stack:
                self.inside = stack
                yield
        finally:
            self.inside, self.sums.is_active = None, False

    def end_block(self) -> None:
        """Take note that a block has run: what follows has this rank's tokens."""
        self.is_local = self.sums.is_active = True
        if self.inside is not None:
            self.inside.enter_context(self.sums)

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Have losses go over all ranks in this context, where the model has run on this rank's tokens."""
        self.sums.is_active = self.sums.counts = self.is_local
        try:
            with self.sums if self.is_local else nullcontext():
                yield
        finally:
            self.sums.is_active = self.sums.counts = False


def tokens_of(inputs: Any, size: int) -> int:
    """Return the tokens of each sequence of `inputs`; raise `UsageError` where `size` ranks do not divide them."""
    if isinstance(inputs, dict):
        first = next((name for name, value in inputs.items() if isinstance(value, torch.Tensor)), None)
        value = next((inputs[name] for name in inputs if name in _BY_TOKEN), inputs.get(first))
    else:
        value = inputs[0] if isinstance(inputs, (tuple, list)) else inputs
    tokens = value.shape[_TOKENS] if isinstance(value, torch.Tensor) and value.ndim > _TOKENS else 0
    if not tokens or tokens % size:
        found = f"inputs of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(
            f"{found} do not divide along their tokens over cp={size} ranks",
            hint="use a sequence length that cp divides, or a plan without cp",
        )
    return int(tokens)


def follow_passes(model: nn.Module, context: Context, *, has_first: bool, has_last: bool) -> None:
    """Have passes of `model`, or of a stage of it, begin in `context`, and its own loss take this rank's targets.

    `has_first` and `has_last` say which ends of the model are there.
    """
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    shifts = shifts_labels(model)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = dict(zip(names, args, strict=False)) | kwargs
        context.begin(args or kwargs, has_first=has_first)
        if has_last and not shifts:
            cut = {name: context.cut_targets(named[name]) for name in _TARGETS & named.keys()}
            args = tuple(cut.get(name, value) for name, value in zip(names, args, strict=False)) or args
            kwargs = kwargs | {name: value for name, value in cut.items() if name in kwargs}
        return args, kwargs

    def leave(*_: Any) -> None:
        if not context.is_cut:
            raise UnsupportedPlanError(
                f"cp={context.group.size}: {type(model).__name__} ran without the blocks that divide its tokens",
                hint="give inputs that go through all of the model, or use a plan without cp",
            )

    model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    model.register_forward_hook(leave)
    if has_last and shifts:
        _shift_before_the_cut(model, context)


def _shift_before_the_cut(model: Any, context: Context) -> None:
    """Have the model's own loss take labels of whole sequences, shifted before a rank takes its own."""
    inner = model.loss_function

    @wraps(inner)  # by whose name it is known which labels a loss leaves out
    def _of_whole_labels(logits: Any, labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not context.is_local:
            return inner(logits, labels, *args, **kwargs)
        shifted = kwargs.pop("shift_labels", None)
        if shifted is None:
            ignored = kwargs.get("ignore_index", -100)
            shifted = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        return inner(logits, None, *args, shift_labels=context.cut_targets(shifted), **kwargs)

    model.loss_function = _of_whole_labels


def run_on_own_tokens(block: nn.Module, context: Context, *, draws: bool, backend: str | None = None) -> None:
    """Make `block` work on this rank's tokens.

    With `backend` torch.compile compiles what the block itself does, exchanges included.
    """
    inner = block.forward
    if backend is not None:
        inner = torch.compile(inner, backend=backend)

    def forward(*args: Any, **kwargs: Any) -> Any:
        context.attention.num_own = context.num_tokens // context.group.size
        with context.attention.in_place(), own_random_numbers(block, context.group) if draws else nullcontext():
            output = inner(*args, **kwargs)
        context.end_block()
        return output

    set_forward(block, forward)


def take_own_tokens(block: nn.Module, context: Context, kept: Collection[str] = ()) -> None:
    """Have `block` be given this rank's tokens of what it is called with, of arguments `kept` those of all ranks.

    That is before FSDP casts what comes in, and before the forward pass that recompute runs again: both see a rank's
    own tokens, where this is called behind them.
    """
    cut = partial(_own_arguments, context, argument_names(block), kept)
    block.register_forward_pre_hook(cut, prepend=True, with_kwargs=True)


def _own_arguments(
    context: Context,
    names: list[str],
    kept: Collection[str],
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a block is called with as this rank has it; from here on sums are those of a rank."""
    context.sums.is_active = False
    if context.inside is not None:
        context.inside.close()
    given: tuple[tuple[Any, Any], ...] = (*enumerate(args), *kwargs.items())
    hidden, shape = None, torch.Size()
    for _, value in given:
        if isinstance(value, torch.Tensor) and len(shape := value.shape) > 1:
            hidden = value
            break
    # A pipeline hands on what the ranks of tp have together.
    expected = (context.num_tokens, context.num_own, context.num_own // context.num_parts)[: 3 if context.is_cut else 1]
    if hidden is None or shape[-2] not in expected:
        found = "no hidden state" if hidden is None else f"hidden states of shape {tuple(shape)}"
        raise UnsupportedPlanError(
            f"cp={context.group.size}: blocks take {found}, and not [batch, tokens, hidden] of {expected[0]} tokens",
            hint="use a plan without cp",
        )
    if (len(shape), shape[-1]) != (len(context.hidden), *context.hidden[-1:]):
        context.cut_before.clear()
    context.is_cut, context.hidden = True, shape
    own = list(args)
    for key, value in given:
        name = key if isinstance(key, str) else names[key] if key < len(names) else ""
        if value is hidden:
            made = context.cut(value, -2) if shape[-2] == context.num_tokens else value
        elif name in kept or not isinstance(value, (torch.Tensor, tuple)):
            continue
        else:
            before = context.cut_before.get((name, id(value)))
            made = before[1] if before is not None else _own_argument(name, value, context)
            if before is None and not _has_gradients(value):
                context.cut_before[name, id(value)] = (value, made)
            if made is not value and isinstance(value, torch.Tensor) and value.dtype in _WHOLE_NUMBERS:
                context.attention.positions = value
        if isinstance(key, int):
            own[key] = made
        else:
            kwargs[key] = made
    return tuple(own), kwargs


def _has_gradients(value: torch.Tensor | tuple[Any, ...]) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value))


def _own_argument(name: str, value: Any, context: Context) -> Any:
    if type(value) is tuple:
        return tuple(_own_argument(name, one, context) for one in value)
    if not isinstance(value, torch.Tensor) or _WHOLE.search(name):
        return value
    dim = _token_dim(value, context.num_tokens, context.hidden)
    if dim is None:
        return value
    return context.cut(value, dim)


def _token_dim(value: torch.Tensor, num_tokens: int, hidden: torch.Size) -> int | None:
    """Return the dimension of tokens in what stands beside a state of shape `hidden`, None where it has none."""
    if value.ndim == len(hidden) and value.shape[-1] == hidden[-1] and value.is_floating_point():
        return value.ndim - 2 if value.shape[-2] == num_tokens else None  # a batch may be as large
    if value.dtype == torch.bool or not value.ndim:
        return None
    if not value.is_floating_point() and not value.is_complex():
        return value.ndim - 1 if value.shape[-1] == num_tokens else None
    if value.ndim == 1:
        return 0 if value.shape[0] == num_tokens else None
    is_by_batch = value.ndim == len(hidden) and value.shape[0] == hidden[0]  # a gate of each sequence, [batch, 1, 1]
    return next((dim for dim in reversed(range(is_by_batch, value.ndim - 1)) if value.shape[dim] == num_tokens), None)


def run_on_all_tokens(module: nn.Module, context: Context, group: TensorGroup | None = None) -> None:
    """Make `module`, a part of a block, run on the tokens of all ranks, and return this rank's own.

    Under sequence parallelism hidden states have those of a rank of `group`.
    """
    inner = module.forward

    def num_parts(value: torch.Tensor) -> int:
        is_hidden = value.ndim == len(context.hidden) and value.shape[-1] == context.hidden[-1]
        return context.num_parts if group is not None and is_hidden and value.is_floating_point() else 1

    def gathered(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(gathered(one) for one in value)
        if not isinstance(value, torch.Tensor):
            return value
        dim = _token_dim(value, context.num_own // num_parts(value), context.hidden)
        return value if dim is None else context.gather(value, dim)

    def own(_: int, output: torch.Tensor) -> torch.Tensor:
        dim = _token_dim(output, context.num_tokens // num_parts(output), context.hidden)
        return output if dim is None else context.cut(output, dim)

    def forward(*args: Any, **kwargs: Any) -> Any:
        args = tuple(gathered(value) for value in args)
        kwargs = {name: value if _WHOLE.search(name) else gathered(value) for name, value in kwargs.items()}
        kept, context.attention.num_own = context.attention.num_own, 0
        try:
            with nullcontext() if group is None else group.several_parts(context.group.size):
                return map_outputs(own, inner(*args, **kwargs))
        finally:
            context.attention.num_own = kept

    set_forward(module, forward)


def argument_names(block: nn.Module) -> list[str]:
    """Return the names of the arguments of the class of `block`, in order; none where its code does not tell."""
    try:
        return list(inspect.signature(type(block).forward).parameters)[1:]
    except (TypeError, ValueError):
        return []


@contextmanager
def own_random_numbers(block: nn.Module, group: TensorGroup, *, draws: bool = True) -> Iterator[None]:
    """Draw this rank's own random numbers in training in this context, and leave the common ones one draw further.

    Nothing changes where `block` draws none.
    """
    if not draws or not block.training or group.handle is None or group.numbers.are_apart:
        yield
        return
    group.numbers.apart(next((held.device for held in block.parameters()), torch.device("cpu")))
    try:
        yield
    finally:
        group.numbers.together()
