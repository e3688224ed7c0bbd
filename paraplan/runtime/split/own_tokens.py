"""Work of a rank of context parallelism before the blocks: on its own tokens, where that works token by token.

An embedding there looks up a rank's own tokens alone. What it returns stands for those of all ranks: code reads its
shape, from which it makes positions and masks of whole sequences, and the first block takes the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from paraplan.runtime.split.context_parallel import Context, own_random_numbers
from paraplan.runtime.structure.forwards import set_forward
from paraplan.runtime.torch_private import pytree, without_memory

_TOKENS = -2  # their dimension, in [..., tokens, hidden]
_ABOUT = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_meta", "is_sparse", "is_quantized"})
_ASKS = frozenset({"size", "dim", "is_floating_point", "is_complex", "is_contiguous", "get_device", "__len__"})
_OF_OWN = frozenset({"__get__", "register_hook", "requires_grad_"})  # what is asked of a tensor beside its shape
_OF_EACH = frozenset(
    {"linear", "layer_norm", "rms_norm", "to", "type", "type_as", "float", "bfloat16", "half", "double"}
)
_OF_EACH |= frozenset(
    {"contiguous", "clone", "detach", "pow", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "gelu", "silu"}
)
_OF_EACH |= frozenset({"neg", "__neg__", "square", "abs", "__pow__"})
_OF_PAIRS = frozenset(
    {"add", "sub", "mul", "div", "true_divide", "where", "masked_fill", "__add__", "__radd__", "__sub__"}
)
_OF_PAIRS |= frozenset({"__rsub__", "__mul__", "__rmul__", "__truediv__", "__iadd__", "__imul__", "add_", "mul_"})
_OVER_HIDDEN = frozenset({"mean", "sum", "norm"})
_DRAWS = frozenset({"dropout", "native_dropout"})  # the second one in runs without values


class TokensMixedError(Exception):
    """Code before the blocks does not work token by token."""


class OwnTokens(torch.Tensor):
    """A rank's `own` tokens in the shape that those of all ranks have, which takes no memory."""

    own: torch.Tensor
    context: Context
    holder: nn.Module

    @staticmethod
    def of(own: torch.Tensor, context: Context, holder: nn.Module) -> OwnTokens:
        """Return `own`, which `holder` or what follows it made, as those of all ranks."""
        shape = list(own.shape)
        shape[_TOKENS] = context.num_tokens
        made = without_memory(OwnTokens, shape, own)
        made.own, made.context, made.holder = own, context, holder
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do on a rank's own tokens what `func` does on all; raise `TokensMixedError` where it brings them together."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = next(one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, OwnTokens))
        context = first.context
        about = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if about in (_ABOUT if name == "__get__" else _ASKS):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if context.is_local or name in _OF_OWN:
            return func(*_own(args), **_own(kwargs))
        if name in _OF_PAIRS:
            args, kwargs = (pytree.tree_map(lambda one: _beside(one, context), tree) for tree in (args, kwargs))
        elif not (name in _OF_EACH or name in _DRAWS or (name in _OVER_HIDDEN and _is_over_hidden(args, kwargs))):
            raise TokensMixedError(name)
        with own_random_numbers(first.holder, context.group, draws=name in _DRAWS):
            own = func(*_own(args), **_own(kwargs))
        if own is first.own:
            return first
        return pytree.tree_map(lambda one: OwnTokens.of(one, context, first.holder), own)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise `TokensMixedError`: what is computed is computed on a rank's own tokens."""
        raise TokensMixedError(str(func))


def _own(tree: Any) -> Any:
    return pytree.tree_map(lambda one: one.own if isinstance(one, OwnTokens) else one, tree)


def _beside(one: Any, context: Context) -> Any:
    """Return this rank's tokens of an operand: by the rules of broadcasting they are in the last dimension but one."""
    is_whole = isinstance(one, torch.Tensor) and not isinstance(one, OwnTokens) and one.ndim > 1
    return context.cut(one, _TOKENS) if is_whole and one.shape[_TOKENS] == context.num_tokens > 1 else one


def _is_over_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dims in (-1, (-1,), [-1]) and kwargs.get("keepdim", False) is True


def look_up_own_tokens(model: nn.Module, blocks: Collection[str], context: Context) -> None:
    """Have embeddings of `model` outside of its `blocks` look up this rank's tokens, until the first block runs."""
    inside = tuple(f"{name}." for name in blocks)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not f"{name}.".startswith(inside):
            set_forward(module, _looking_up(module, context))


def _looking_up(module: nn.Module, context: Context) -> Callable[..., Any]:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if args else None
        is_of_tokens = isinstance(tokens, torch.Tensor) and tokens.ndim > 0 and tokens.shape[-1] == context.num_tokens
        if context.is_cut or not is_of_tokens:
            return inner(*args, **kwargs)
        tokens = context.cut(args[0], -1)
        with context.embedding():
            found = inner(tokens, *args[1:], **kwargs)
        return OwnTokens.of(found, context, module) if found.shape[:-1] == tokens.shape else found

    return forward
