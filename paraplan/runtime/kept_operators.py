"""Keeping the results of some operators where a block is run again: selective checkpointing by operator.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` is the same idea. It counts every operator and stops where
the second run calls fewer or more of any, and where a kept result was written in place. Blocks that run on parts find
out shapes in their first run alone, and sum products in place; so here only operators that are kept count, each by its
arguments' shapes, and what was written since is computed again. Operators that draw random numbers leave those
behind them as they were, so that what follows draws the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Operator = torch._ops.OpOverload | torch._ops.HigherOrderOperator


def is_keepable(operator: Any) -> bool:
    """Whether an operator returns new tensors, and writes none of its arguments."""
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return True
    schema = operator._schema
    return not schema.is_mutable and all(returned.alias_info is None for returned in schema.returns)


@dataclass
class OperatorChoice:
    """Which operators' results blocks keep; `num_kept` counts them, and `others` are those called until the first."""

    keeps: Callable[[Operator], bool]
    num_kept: int = 0
    others: set[str] = field(default_factory=set)
    _known: dict[Any, bool] = field(default_factory=dict)

    def is_kept(self, operator: Any) -> bool:
        """Whether the results of `operator` are kept."""
        known = self._known.get(operator)
        if known is None:
            known = self._known[operator] = is_keepable(operator) and self.keeps(operator)
        return known

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a run that keeps results, and of the one in the backward pass that takes them."""
        kept: dict[Any, _Result] = {}
        return _Keeping(self, kept), _Taking(self, kept)


@dataclass(frozen=True)
class _Result:
    """What an operator returned, when it was written last, and the random numbers behind it where it draws some."""

    value: Any
    versions: tuple[int, ...]
    random_states: tuple[tuple[torch.device, torch.Tensor], ...]

    @property
    def is_unchanged(self) -> bool:
        return self.versions == tuple(leaf._version for leaf in _tensors(self.value))

    def restore_random_numbers(self) -> None:
        for device, state in self.random_states:
            if device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
            else:
                torch.set_rng_state(state)


class _Calls:
    """Tells the calls of one operator apart: by the shapes of their arguments, and how many there were before."""

    def __init__(self) -> None:
        self._counts: Counter[Any] = Counter()

    def key(self, operator: Any, args: Any, kwargs: Any) -> Any:
        kind = (operator, *((leaf.shape, leaf.dtype, leaf.device) for leaf in _tensors((args, kwargs))))
        self._counts[kind] += 1
        return (*kind, self._counts[kind])


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Keeps results in the first run."""

    supports_higher_order_operators = True

    def __init__(self, choice: OperatorChoice, kept: dict[Any, _Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choice, self._kept, self._calls = choice, kept, _Calls()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._choice.is_kept(func):
            if not self._choice.num_kept and is_keepable(func):
                self._choice.others.add(str(func).rsplit(".", 1)[0])
            return result
        tensors = _tensors(result)
        if not tensors or tensors[0].is_meta:  # code that finds out shapes
            return result
        self._choice.num_kept += 1
        value = pytree.tree_map(_same_values, result)
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self._kept[self._calls.key(func, args, kwargs)] = _Result(
            value=value,
            versions=tuple(leaf._version for leaf in _tensors(value)),
            random_states=_random_states(tensors[0].device) if draws else (),
        )
        return result


class _Taking(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Takes the kept results in the second run, each once."""

    supports_higher_order_operators = True

    def __init__(self, choice: OperatorChoice, kept: dict[Any, _Result]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choice, self._kept, self._calls = choice, kept, _Calls()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._choice.is_kept(func):
            known = self._kept.pop(self._calls.key(func, args, kwargs), None)
            if known is not None and known.is_unchanged:
                known.restore_random_numbers()
                return known.value
        return func(*args, **(kwargs or {}))


def _same_values(leaf: Any) -> Any:
    """Return a tensor of the same values, without the graph that `leaf` will have, that sees writes to it."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # as torch's checkpoint
        return leaf.detach()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _random_states(device: torch.device) -> tuple[tuple[torch.device, torch.Tensor], ...]:
    states = [(torch.device("cpu"), torch.get_rng_state())]
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append((device, torch.cuda.get_rng_state(device)))
    return tuple(states)
