"""Whether code works token by token: functions that no rule knows, tried with numbers on some tokens and on all.

Shapes do not tell whether a function looks at other tokens: a convolution with padding, or attention that is a function
of torch, returns as many tokens as it is given. So a trial without values (`context_parallel.check_context`) has each
of them run on random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from paraplan.runtime.seeds import seed_generators
from paraplan.runtime.shards.sharding import Sharding
from paraplan.runtime.shards.split_tensor import (
    CONTEXT,
    VOCABULARY,
    SplitError,
    SplitTensor,
    hidden_loss,
    split_operands,
)
from paraplan.runtime.torch_private import pytree, unset_fake_temporarily, watching_functions

# What shapes and the rules of `rules` are enough for; with sizes of real layers, trying them would take long.
_KNOWN = frozenset({"linear", "matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum", "addmm", "embedding"})
_KNOWN |= {"layer_norm", "rms_norm", "softmax", "log_softmax", "scaled_dot_product_attention", "cross_entropy"}
_KNOWN |= {"transpose", "permute", "unsqueeze", "squeeze", "swapaxes", "movedim", "_grouped_mm", "one_hot"}
_TOLERANCE = 1e-3


def check_by_token(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `SplitError` where `func`, called `name`, returns something else for some tokens than for all of them.

    The arguments are those of a call, without values. A call that does not run on numbers is left to its own error.
    """
    operands = [one for one in split_operands(args, kwargs) if one.source == CONTEXT]
    if name in _KNOWN or any(isinstance(one.local, SplitTensor) for one in operands):
        return
    size = operands[0].group.size
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), torch.no_grad():
        leaves, structure = pytree.tree_flatten((args, kwargs))
        numbers = [_numbers(leaf) for leaf in leaves]

        def results(index: int | None) -> list[torch.Tensor]:
            given = [
                number if index is None or not isinstance(leaf, SplitTensor) else leaf.sharding.part(number, index)
                for leaf, number in zip(leaves, numbers, strict=True)
            ]
            own_args, own_kwargs = pytree.tree_unflatten([_copied(value) for value in given], structure)
            seed_generators(0)
            found = pytree.tree_leaves(func(*own_args, **own_kwargs))
            return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

        try:
            expected, parts = results(None), [results(index) for index in range(size)]
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
            return
        for whole, *own in zip(expected, *parts, strict=True):
            if not _is_sharded(whole, own, operands[0].sharding):
                raise SplitError(f"{name} looks at several tokens at once", source=CONTEXT)


_CALLS_WATCHED = 64


@contextmanager
def custom_functions_refused() -> Iterator[None]:
    """Have an autograd.Function that is handed some tokens, or logits of some classes, raise an error.

    It runs on the parts, and autograd does not see that. Raises `SplitError`, for logits `UnsupportedPlanError`.
    """

    def watch(cls: Any, args: Any, kwargs: Any) -> None:
        sources = {one.source for one in split_operands(args, kwargs)}
        if CONTEXT in sources:
            raise SplitError(f"{cls.__name__}, an autograd.Function, hides what it does", source=CONTEXT)
        if VOCABULARY in sources:
            raise hidden_loss()

    with watching_functions(watch):
        yield


@contextmanager
def custom_functions_kept_whole() -> Iterator[None]:
    """Have an autograd.Function that is handed a part of what a layer returns raise `SplitError` for that layer."""

    def watch(cls: Any, args: Any, kwargs: Any) -> None:
        for one in split_operands(args, kwargs):
            message = f"{cls.__name__}, an autograd.Function, hides what it does with it"
            raise SplitError(message, source=one.source, is_mixed=True)

    with watching_functions(watch):
        yield


def without_custom_functions(loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return `loss_fn`, refused where it hands an autograd.Function outputs that are split.

    Its first calls are watched, for which torch is changed: those of the checks and of the first steps.
    """
    watched = 0

    def loss(outputs: Any, targets: Any) -> Any:
        nonlocal watched
        if watched == _CALLS_WATCHED:
            return loss_fn(outputs, targets)
        watched += 1
        with custom_functions_refused():
            return loss_fn(outputs, targets)

    return loss


def _numbers(leaf: Any) -> Any:
    """Return random numbers in the place of a tensor; ids and masks are of the first entry alone."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = tuple(leaf.shape)
    if not leaf.is_floating_point():
        return torch.zeros(shape, dtype=leaf.dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))  # in fp32: 16 bits round, and have ties


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_sharded(whole: torch.Tensor, parts: list[torch.Tensor], sharding: Sharding) -> bool:
    """Whether `parts` are those of `whole` by `sharding` in some dimension; other shapes are compared elsewhere."""
    if whole.ndim != parts[0].ndim:
        return True
    differing = [dim for dim, (all_, own) in enumerate(zip(whole.shape, parts[0].shape, strict=True)) if all_ != own]
    if len(differing) != 1 or whole.shape[differing[0]] != sharding.length:
        return True
    expected = [sharding.at(differing[0]).part(whole, index) for index in range(sharding.size)]
    return all(
        part.shape == own.shape
        and torch.allclose(_wide(own), _wide(part), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        for own, part in zip(parts, expected, strict=True)
    )


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.is_complex() else values.double()
