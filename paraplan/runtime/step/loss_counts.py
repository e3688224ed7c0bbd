"""Over how many targets a mean loss goes: followed through the code of `loss_fn`, so that nobody has to say it.

The loss of a batch that is cut into micro-batches is the mean of theirs only where each counts by its own divisor:
the targets that are not ignored, a mask's sum, or simply the sequences. torch's mean losses know that number, and so
does a sum that is divided by another sum. `LossFollower` watches the torch functions that run in its context and notes
for every number what it is: a sum over the batch, or a mean with its divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch.overrides import TorchFunctionMode

Number = torch.Tensor | float


@dataclass(frozen=True)
class Sum:
    """A number that adds up over sequences. `raw` is what it was before code kept it from being 0 (clamp, + 1e-8)."""

    raw: Number | None = None


@dataclass(frozen=True)
class Mean:
    """A mean: a sum over sequences divided by `divisor`. `count` is that divisor as it adds up over sequences.

    Both are None for a mean over all elements, which counts as many as there are sequences. `others` are the counts of
    means that were added: the result is one mean where they are in proportion to `count`.
    """

    divisor: Number | None = None
    count: Number | None = None
    others: tuple[Number | None, ...] = ()


class Unknown:
    """A number of which nothing is known but that it was made of a sum or a mean."""


Term = Sum | Mean | Unknown

_UNKNOWN = Unknown()
_TARGETS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_CROSS_ENTROPIES = frozenset({F.cross_entropy, F.nll_loss})
_SUMS = frozenset({"sum", "nansum", "count_nonzero"})
_MEANS = frozenset({"mean", "nanmean"})
_KEEPS = frozenset({"float", "double", "half", "bfloat16", "int", "long", "to", "type", "type_as", "cpu", "cuda"})
_KEEPS |= frozenset({"clone", "contiguous", "detach", "squeeze", "neg", "__neg__", "requires_grad_", "__get__"})
_SCALES = frozenset({"mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply"})
_ADDS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__", "sub_", "__isub__"})
_DIVIDES = frozenset({"div", "__truediv__", "true_divide", "div_", "__itruediv__", "divide"})
_FLOORS = frozenset({"clamp", "clamp_min", "clip", "maximum", "max", "clamp_", "clamp_min_"})
_ARITHMETIC = _SUMS | _MEANS | _SCALES | _ADDS | _DIVIDES | _FLOORS
_READS = frozenset({"item", "__float__", "__int__", "__index__", "tolist"})
_ASKS = frozenset({"__bool__", "__len__", "size", "dim", "numel", "__gt__", "__lt__", "__eq__", "__ge__", "__le__"})


class LossFollower(TorchFunctionMode):
    """A context in which every sum and every mean over a batch is followed; `term_of` says what a number is."""

    def __init__(self) -> None:
        super().__init__()
        self._terms: dict[int, tuple[Any, Term]] = {}
        self._read: dict[float, Number] = {}  # sums that code has read as Python numbers
        self._picks = False  # whether entries were picked by their values

    def term_of(self, value: Any) -> Term | None:
        """Return what `value` is; None for what was not made of sums and means in this context."""
        known = self._terms.get(id(value))
        return known[1] if known is not None and known[0] is value else None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        args, given = _positional(name, args, kwargs or {})
        before = [self.term_of(value) for value in args]  # in-place functions return an operand
        is_made_of_terms = any(self.term_of(leaf) is not None for leaf in _tensors((args, given)))
        result = func(*self._divisible(name, args, before), **given)
        if isinstance(result, torch.Tensor):
            self._picks = self._picks or (name in ("__getitem__", "masked_select") and _picks_by_value(args))
            term = self._term(func, name, args, given, before, result)
            if term is None and is_made_of_terms:
                term = _UNKNOWN
            self._terms.pop(id(result), None)
            if term is not None:
                self._terms[id(result)] = (result, term)
        elif name in _READS and before and isinstance(before[0], Sum) and isinstance(result, (int, float)):
            self._read[float(result)] = _raw(args[0], before[0])
        return result

    def _divisible(self, name: str, args: tuple[Any, ...], before: list[Term | None]) -> tuple[Any, ...]:
        """Return `args`, in which a sum that is 0 divides as 1: 0 / 0 has a gradient that is not a number.

        That is a micro-batch without targets. Its mean counts for nothing, as its divisor does.
        """
        if name not in _DIVIDES or len(args) < 2:
            return args
        above, below, *others = args
        if isinstance(before[1], Sum):
            return above, below.detach().where(below != 0, torch.ones_like(below)), *others
        is_read = isinstance(below, (int, float)) and below == 0 and 0.0 in self._read
        return (above, 1.0, *others) if is_read else args

    def _term(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: list[Term | None],
        result: torch.Tensor,
    ) -> Term | None:
        if any(before):
            return self._of_terms(name, args, before, result)
        if result.ndim:
            return None
        if func in _CROSS_ENTROPIES:
            return _cross_entropy_term(args, kwargs)
        if name.endswith("_loss") or name.startswith("binary_cross_entropy") or name == "kl_div":
            return _loss_term(kwargs)
        if name in _MEANS:
            return self._mean_term(name, args)
        return Sum() if name in _SUMS else None

    def _mean_term(self, name: str, args: tuple[Any, ...]) -> Mean:
        if name == "nanmean":
            count = (~args[0].detach().isnan()).sum()
            return Mean(divisor=count, count=count)
        if self._picks:  # as many as there are this time
            number = float(args[0].numel())
            return Mean(divisor=number, count=number)
        return Mean()

    def _of_terms(
        self, name: str, args: tuple[Any, ...], before: list[Term | None], result: torch.Tensor
    ) -> Term | None:
        """Return what a function makes of operands that are known."""
        first, *rest = before
        second = rest[0] if rest else None
        if result.ndim:  # losses of single targets, divided by the number of all of them
            is_share = name in _DIVIDES and first is None and isinstance(second, Sum)
            return _divided_by(args[1], second) if is_share and isinstance(second, Sum) else None
        if name in _KEEPS or (name in _SUMS and isinstance(first, Mean)) or (name in _MEANS and not args[0].ndim):
            return first
        if name in _SCALES:
            return (first or second) if first is None or second is None else None
        if name in _FLOORS and isinstance(first, Sum):
            return Sum(raw=_raw(args[0], first))
        if name in _ADDS:
            return _added(args, first, second)
        if name in _DIVIDES:
            return self._quotient(args, first, second)
        return None

    def _quotient(self, args: tuple[Any, ...], above: Term | None, below: Term | None) -> Term | None:
        if isinstance(above, Sum) and isinstance(below, Sum):
            return _divided_by(args[1], below)
        if isinstance(above, Sum) and isinstance(args[1], (int, float)) and float(args[1]) in self._read:
            return Mean(divisor=float(args[1]), count=self._read[float(args[1])])
        if isinstance(above, Mean) and below is None:
            return above
        return None  # a sum by a number: by the sequences of this batch, or by a constant; values tell


def _positional(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an arithmetic function with the operands that were named among those by position."""
    given = dict(kwargs)
    if name not in _ARITHMETIC:
        return args, given
    for place, name in enumerate(("input", "other")):
        if len(args) == place and name in given:
            args = (*args, given.pop(name))
    return args, given


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for entry in tree:
            yield from _tensors(entry)
    elif isinstance(tree, dict):
        yield from _tensors(tuple(tree.values()))


def _picks_by_value(args: tuple[Any, ...]) -> bool:
    """Whether a mask is among the indices of `args`, so that the size of the result hangs on values."""
    entries = args[1] if len(args) > 1 else None
    entries = entries if isinstance(entries, tuple) else (entries,)
    return any(isinstance(entry, torch.Tensor) and entry.dtype == torch.bool for entry in entries)


def _added(args: tuple[Any, ...], first: Term | None, second: Term | None) -> Term | None:
    if first is None or second is None:
        term, known, other = (first, args[0], args[1]) if second is None else (second, args[1], args[0])
        if isinstance(other, torch.Tensor):
            return None
        # A constant: the mean of a constant is itself; with a sum it keeps a divisor from 0.
        return Sum(raw=_raw(known, term)) if isinstance(term, Sum) and other else term
    if isinstance(first, Sum) and isinstance(second, Sum):
        return Sum() if first.raw is second.raw is None else None
    if isinstance(first, Mean) and isinstance(second, Mean):
        main, other = (first, second) if first.count is not None else (second, first)
        if main.count is other.count:
            return replace(main, others=main.others + other.others)
        return replace(main, others=(*main.others, other.count, *other.others))
    return None


def _divided_by(divisor: torch.Tensor, term: Sum) -> Mean:
    return Mean(divisor=divisor.detach(), count=_raw(divisor, term))


def _raw(value: Any, term: Sum) -> Number:
    raw = value if term.raw is None else term.raw
    return raw.detach() if isinstance(raw, torch.Tensor) else raw


def _loss_term(kwargs: dict[str, Any]) -> Term | None:
    """Return what a loss of torch's is that has no targets to ignore."""
    if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return None
    reductions: dict[str, Term] = {"mean": Mean(), "batchmean": Mean(), "sum": Sum()}
    return reductions.get(kwargs.get("reduction", "mean"))


def _cross_entropy_term(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Term | None:
    given = dict(zip(_TARGETS, args, strict=False)) | kwargs
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    reduction = given.get("reduction", "mean")
    if reduction != "mean":
        return Sum() if reduction == "sum" else None
    target, weight = given["target"], given.get("weight")
    if target.is_floating_point():  # shares of the classes: the mean goes over all rows
        return Mean()
    counts = target != given.get("ignore_index", -100)
    count = counts.sum() if weight is None else (weight.detach()[target * counts] * counts).sum()
    return Mean(divisor=count, count=count)
