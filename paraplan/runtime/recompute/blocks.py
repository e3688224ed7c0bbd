"""Running parts of a block again in the backward pass in place of keeping what they computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.batch_norm import batch_norms
from paraplan.runtime.recompute.policy import OperatorChoice, RecomputedBlocks
from paraplan.runtime.recompute.split_backward import checkpoint_for_split_backward
from paraplan.runtime.structure.forwards import set_forward
from paraplan.runtime.torch_private import function_modes, version_of

_SDPA = F.scaled_dot_product_attention  # which stands elsewhere while a block runs under context parallelism


def recompute_blocks(
    blocks: Sequence[nn.Module],
    again: RecomputedBlocks,
    *,
    first: int = 0,
    in_halves: bool = False,
    are_all: bool = True,
) -> None:
    """Make those of `blocks` of a model, the first of which has number `first`, that run `again` keep less until then.

    `in_halves`: the schedule takes backward passes in two halves, both of which read what was computed again.
    `are_all`: these are all blocks of the model, of which one at least must have attention to run again, or call an
    operator whose results are kept.
    """
    blocks = [block for number, block in enumerate(blocks, first) if number in again.numbers]
    if again.recompute == "full":
        choice = None if again.keeps is None else OperatorChoice(again.keeps, again.every_second)
        for block in blocks:
            recompute_in_backward(block, in_halves=in_halves, choice=choice)
        if choice is not None and are_all and blocks:
            _refuse_without_calls(blocks[-1], choice)
    elif again.recompute == "selective":
        calls = _AttentionCalls(in_halves=in_halves)
        for block in blocks:
            recompute_attention(block, calls, is_last=are_all and block is blocks[-1])


def recompute_in_backward(block: nn.Module, *, in_halves: bool = False, choice: OperatorChoice | None = None) -> None:
    """Make `block` keep only its inputs for the backward pass, and run its forward pass again there.

    The results of the operators of `choice` are kept too, and not computed again.

    The forward of the instance is wrapped, not the module: names of parameters stay, and hooks of the module (those of
    FSDP) stay outside. Non-reentrant checkpointing (torch.utils.checkpoint) restores the random numbers of dropout.
    """
    inner = block.forward

    written = _WrittenBuffers(block)
    has_buffers = any(True for _ in block.buffers())

    def forward(*args: Any, **kwargs: Any) -> Any:
        is_plain = not has_buffers and not in_halves and choice is None
        if is_plain or torch.compiler.is_compiling():  # what is compiled writes buffers once
            return checkpoint(partial(inner, **kwargs), *args, use_reentrant=False)
        first, second = (nullcontext(), nullcontext()) if choice is None else choice.contexts()
        with written.noted() as before:
            again = partial(_both, partial(written.back_to, before), second)
            if in_halves:
                return checkpoint_for_split_backward(
                    lambda *given: inner(*given[:-1], **given[-1]), *args, kwargs, first=first, around=again
                )
            return checkpoint(partial(inner, **kwargs), *args, use_reentrant=False, context_fn=lambda: (first, again()))

    set_forward(block, forward)


@contextmanager
def _both(outer: Callable[[], AbstractContextManager[Any]], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer(), inner:
        yield


def _refuse_without_calls(last: nn.Module, choice: OperatorChoice) -> None:
    """Raise at the end of the first forward pass of `last` where no block called an operator of `choice`."""
    inner = last.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        if choice.others and not choice.num_kept:
            raise UnsupportedPlanError(
                f"the blocks ({type(last).__name__}) call none of the operators that the recompute policy keeps; they "
                f"call {', '.join(sorted(choice.others))}",
                hint="keep some of these, such as 'matmul', or leave out keep",
            )
        return output

    set_forward(last, forward)


class _WrittenBuffers:
    """The buffers of a block that its forward pass writes: running statistics, say, which count a batch once."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._names: set[str] | None = None

    @contextmanager
    def noted(self) -> Iterator[dict[str, torch.Tensor]]:
        """Give what the written buffers hold before the forward pass in this context; all of them at first."""
        held = dict(self._block.named_buffers()) if self._block.training and torch.is_grad_enabled() else {}
        norms = batch_norms(self._block)
        normalized = {
            f"{name}.{buffer}".lstrip(".")
            for name, one in norms.items()
            for buffer, _ in one.named_buffers(recurse=False, remove_duplicate=False)
        }
        before = {
            name: one.detach().clone()
            for name, one in held.items()
            if self._names is None or name in self._names or name in normalized
        }
        versions = {name: version_of(one) for name, one in held.items()}
        yield before
        written = {name for name, version in versions.items() if version_of(held[name]) != version}
        late = sorted(written - before.keys())
        if late:
            raise UnsupportedPlanError(
                f"{type(self._block).__name__} writes its buffer {late[0]}, which its first forward pass did not; run "
                "again in the backward pass it would write it twice",
                hint="write the buffer in every forward pass, or use recompute=none",
            )
        if held and self._names is None:
            self._names = written
        for name in [name for name in before if name not in (self._names or ()) and name not in normalized]:
            del before[name]

    @contextmanager
    def back_to(self, before: dict[str, torch.Tensor]) -> Iterator[None]:
        """Have the buffers hold `before` in this context, where the forward pass runs again, and then what they do now.

        Not in place for autograd, which may have kept them.
        """
        held = dict(self._block.named_buffers()) if before else {}
        now = {name: held[name].detach().clone() for name in before}
        for name, value in before.items():
            held[name].data.copy_(value)
        try:
            yield
        finally:
            for name, value in now.items():
                held[name].data.copy_(value)


@dataclass
class _AttentionCalls:
    are_seen: bool = False
    in_halves: bool = False


def recompute_attention(block: nn.Module, calls: _AttentionCalls, *, is_last: bool) -> None:
    """Make `block` keep query, key and value of its attention and run the attention core again in the backward pass.

    Selective recompute (Korthikanti et al. 2022, section 5). The core is scaled_dot_product_attention. Raises
    `UnsupportedPlanError` at the end of the first forward pass where no block has called that.
    """
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _KeepsInputs(calls):
            output = inner(*args, **kwargs)
        if is_last and not calls.are_seen:
            raise no_attention(block)
        return output

    set_forward(block, forward)


def no_attention(block: nn.Module) -> UnsupportedPlanError:
    """Return the error for blocks without an attention core that could run again."""
    return UnsupportedPlanError(
        f"recompute=selective, but the blocks ({type(block).__name__}) never call "
        "torch.nn.functional.scaled_dot_product_attention, which it would run again",
        hint="use a model with that attention (attn_implementation='sdpa' in transformers), or recompute=full",
    )


class AttentionSeen(TorchFunctionMode):
    """Notes whether the attention core was called in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.is_seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.is_seen = self.is_seen or func is _SDPA
        return func(*args, **(kwargs or {}))


class _KeepsInputs(TorchFunctionMode):
    """Has the attention core of what runs in this context run again in the backward pass."""

    def __init__(self, calls: _AttentionCalls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not _SDPA:
            return func(*args, **(kwargs or {}))
        self._calls.are_seen = True  # not read where it was not written, or compiled code would depend on it
        if not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():  # with what the modes around this one do
            return checkpoint(partial(func, **(kwargs or {})), *args, use_reentrant=False)
        # Modes around this one are no longer there when the backward pass runs the core again.
        around = function_modes()
        if self._calls.in_halves:
            return checkpoint_for_split_backward(
                partial(func, **(kwargs or {})), *args, around=lambda: _entered(around)
            )
        return checkpoint(
            partial(func, **(kwargs or {})),
            *args,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), _entered(around)),
        )


@contextmanager
def _entered(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield
