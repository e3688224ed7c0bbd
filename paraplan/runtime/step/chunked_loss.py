"""Losses over chunks of tokens: logits that are computed chunk by chunk where cross-entropy asks for them.

The head returns what stands for the logits of all tokens, without memory. Cross-entropy takes a chunk of tokens after
the other, and its backward pass computes the logits of each chunk again. What else code asks of the logits it gets of
all tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from paraplan.errors import UnsupportedPlanError
from paraplan.plan.chunks import num_loss_chunks
from paraplan.runtime.split.context_sums import SumsOverRanks
from paraplan.runtime.split.logits import VocabularyLogits
from paraplan.runtime.step.loss import StepLoss
from paraplan.runtime.structure.forwards import set_forward
from paraplan.runtime.torch_private import function_modes, pytree, without_memory

_ENTRIES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})  # attributes that are logits
_OF_GRAPH = frozenset({"requires_grad", "is_leaf", "grad_fn", "grad", "output_nr"})
_ASKS = frozenset({"size", "dim", "is_floating_point", "is_complex", "get_device", "__len__", "numel"})
_LAYOUTS = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"})
_OF_EACH = frozenset({"float", "to", "type", "bfloat16", "half", "double", "tanh", "mul", "div", "true_divide"})
_OF_EACH |= frozenset({"__mul__", "__rmul__", "__truediv__"})
_OPTIONS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


@dataclass(frozen=True, eq=False)
class _Source:
    """The source of logits: `head` of the hidden states of tokens, and the work of code on each of them after it."""

    hidden: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    anchor: torch.Tensor
    modes: Sequence[TorchFunctionMode]
    around: Callable[[], AbstractContextManager[Any]]
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits

    def loss(self, hidden: torch.Tensor, target: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Return the cross-entropy of some tokens, as when the head was called: in a backward pass modes are off."""
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            stack.enter_context(self.around())
            return F.cross_entropy(self.logits(hidden), target, **options)


class ChunkedLogits(torch.Tensor):
    """Logits of all tokens, which take no memory."""

    source: _Source

    @staticmethod
    def of(source: _Source, num_classes: int, dtype: torch.dtype) -> ChunkedLogits:
        """Return the logits that come from `source`, of type `dtype`."""
        like = torch.empty((), dtype=dtype, device=source.hidden.device)
        made = without_memory(ChunkedLogits, (*source.hidden.shape[:-1], num_classes), like)
        made.source = source
        return made

    def whole(self) -> torch.Tensor:
        """Return the logits of all tokens in memory."""
        with self.source.around():
            return self.source.logits(self.source.hidden)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Put off what works on each logit by itself, compute cross-entropy in chunks, and all else of all tokens."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        about = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        first = next(one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, ChunkedLogits))
        is_of_graph = about in _OF_GRAPH if name == "__get__" else name in ("register_hook", "retain_grad")
        if not is_of_graph and (about not in _ENTRIES if name == "__get__" else name in _ASKS):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if is_of_graph:
            return func(*(first.source.anchor if one is first else one for one in args), **kwargs)
        if args and args[0] is first:
            made = first._later(func, name, args[1:], kwargs)
            if made is not None:
                return made
        if name == "cross_entropy":
            given = dict(zip(_OPTIONS, args, strict=False)) | kwargs
            is_plain = given.get("size_average") is None and given.get("reduce") is None
            if given.get("input") is first and is_plain and first.ndim == 2 and not given["target"].is_floating_point():
                return _cross_entropy(first.source, given)
        whole = pytree.tree_map(lambda one: one.whole() if isinstance(one, ChunkedLogits) else one, (args, kwargs))
        return func(*whole[0], **whole[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute with the logits of all tokens: no function said what for."""
        whole = pytree.tree_map(
            lambda one: one.whole() if isinstance(one, ChunkedLogits) else one, (args, kwargs or {})
        )
        return func(*whole[0], **whole[1])

    def _later(self, func: Callable[..., Any], name: str, given: Any, kwargs: dict[str, Any]) -> ChunkedLogits | None:
        """Return what a function makes of these logits, put off; None where it cannot be."""
        source, num_classes, width = self.source, self.shape[-1], self.source.hidden.shape[-1]
        if name == "contiguous":
            return self
        if name in _OF_EACH and not any(
            isinstance(one, torch.Tensor) and one.ndim for one in (*given, *kwargs.values())
        ):
            step = partial(_applied, func, given, kwargs)
            dtype = step(torch.empty(1, dtype=self.dtype)).dtype
            return ChunkedLogits.of(replace(source, steps=(*source.steps, step)), num_classes, dtype)
        if name in _LAYOUTS:
            sizes = getattr(torch.empty(self.shape, device="meta"), name)(*given, **kwargs).shape
            if not sizes or sizes[-1] != num_classes or 0 in sizes:
                return None
            return ChunkedLogits.of(
                replace(source, hidden=source.hidden.reshape(*sizes[:-1], width)), num_classes, self.dtype
            )
        if name == "__getitem__" and _leaves_classes(given[0], self.ndim):
            index = given[0][:-1] if isinstance(given[0], tuple) and len(given[0]) == self.ndim else given[0]
            return ChunkedLogits.of(replace(source, hidden=source.hidden[index]), num_classes, self.dtype)
        return None


def _applied(func: Callable[..., Any], given: Any, kwargs: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = func(logits, *given, **kwargs)
    return result


def _leaves_classes(index: Any, ndim: int) -> bool:
    """Whether an index takes all classes of the tokens that it takes."""
    entries = index if isinstance(index, tuple) else (index,)
    if any(one is None or isinstance(one, (list, torch.Tensor)) for one in entries):
        return False
    if Ellipsis in entries:
        return entries[0] is Ellipsis and len(entries) > 1 and entries[-1] == slice(None)
    return len(entries) < ndim or (len(entries) == ndim and entries[-1] == slice(None))


def _cross_entropy(source: _Source, given: dict[str, Any]) -> torch.Tensor:
    """Return what torch.nn.functional.cross_entropy returns for all tokens."""
    reduction, target = given.get("reduction", "mean"), given["target"]
    each = -(-max(1, target.shape[0]) // num_loss_chunks(target.shape[0]))
    names = ("weight", "ignore_index", "label_smoothing")
    options = {name: given[name] for name in names if given.get(name) is not None}
    options["reduction"] = "none" if reduction == "none" else "sum"
    # Modes around this call see its result, not the chunks.
    losses = [
        checkpoint(source.loss, *one, options, use_reentrant=False, preserve_rng_state=False)
        for one in zip(torch.split(source.hidden, each), torch.split(target, each), strict=True)
    ]
    if reduction == "none":
        return torch.cat(losses)
    total = torch.stack(losses).sum()
    if reduction == "sum":
        return total
    counts, weight = target != options.get("ignore_index", -100), options.get("weight")
    counted: torch.Tensor = counts.sum() if weight is None else (weight[target * counts] * counts).sum()
    return total / counted


def find_heads(model: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the linear layers of `model`, outside of its `blocks`, that make logits.

    Raises `UnsupportedPlanError` for a model without a linear layer of as many outputs as an embedding has rows.
    """
    inside = tuple(f"{name}." for name in blocks)
    outside = {name: module for name, module in model.named_modules() if not f"{name}.".startswith(inside)}
    sizes = {module.num_embeddings for module in outside.values() if isinstance(module, nn.Embedding)}
    heads = {name: one for name, one in outside.items() if isinstance(one, nn.Linear) and one.out_features in sizes}
    if not heads:
        raise UnsupportedPlanError(
            f"loss=chunked: {type(model).__name__} has no linear layer outside of its blocks with as many outputs as "
            "an embedding has rows, which would make its logits",
            hint="use a plan with the plain loss",
        )
    return tuple(heads)


def compute_loss_in_chunks(head: nn.Linear, loss: StepLoss) -> None:
    """Have `head` return logits in chunks while a step runs it."""
    loss.heads.append(head)
    set_forward(head, _in_chunks(head, loss))


def _in_chunks(head: nn.Linear, loss: StepLoss) -> Callable[[torch.Tensor], torch.Tensor]:
    inner: Callable[[torch.Tensor], torch.Tensor] = head.forward
    num_classes = head.out_features
    logits: VocabularyLogits | None = loss.logits
    around = nullcontext if logits is None else logits.passing

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not loss.is_in_pass:
            return inner(hidden)
        entered = hidden.view_as(hidden)  # whose gradient is the last one of the head
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        of_loss = None if logits is None else logits.mode  # entered for each chunk; sums see the loss of all tokens
        modes = [mode for mode in function_modes() if mode is not of_loss and not isinstance(mode, SumsOverRanks)]
        return ChunkedLogits.of(_Source(entered, inner, entered, modes, around), num_classes, dtype)

    return forward
