"""Over how many targets a mean loss goes: followed through the code of `loss_fn`, so that nobody has to say it.

The loss of a batch that is cut into micro-batches is the mean of theirs only where each counts by its own divisor:
the targets that are not ignored, a mask's sum, or simply the sequences. torch's mean losses know that number, and so
does a sum that is divided by another sum. `LossFollower` watches the torch functions that run in its context and notes
for every number what it is: a sum over the batch, or a mean with its divisor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn
from torch.overrides import TorchFunctionMode

Number = torch.Tensor | float


@dataclass(frozen=True)
class Sum:
    """A number that adds up over sequences. `raw` is what it was before code kept it from being 0 (clamp, + 1e-8)."""

    raw: Number | None = None


@dataclass(frozen=True)
class Part:
    """One of several means that were added, with what it was multiplied by since; see `Mean`."""

    value: torch.Tensor
    divisor: Number | None
    count: Number | None


@dataclass(frozen=True)
class Mean:
    """A mean: a sum over sequences divided by `divisor`. `count` is that divisor as it adds up over sequences.

    Both are None for a mean over all elements, which counts as many as there are sequences. `parts` are the means that
    were added, where these are over other numbers of targets, and begin with that of `count`: the result is one mean
    where their counts are in proportion.
    """

    divisor: Number | None = None
    count: Number | None = None
    parts: tuple[Part, ...] = ()


class Unknown:
    """A number of which nothing is known but that it was made of a sum or a mean."""


@dataclass(frozen=True)
class Several:
    """Means side by side in one tensor."""

    means: tuple[Mean, ...]


Term = Sum | Mean | Several | Unknown

_UNKNOWN = Unknown()
_TARGETS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_CROSS_ENTROPIES = frozenset({F.cross_entropy, F.nll_loss})
_SUMS = frozenset({"sum", "nansum", "count_nonzero"})
_MEANS = frozenset({"mean", "nanmean"})
_KEEPS = frozenset({"float", "double", "half", "bfloat16", "int", "long", "to", "type", "type_as", "cpu", "cuda"})
_KEEPS |= frozenset({"clone", "contiguous", "detach", "squeeze", "neg", "__neg__", "requires_grad_", "__get__"})
_SCALES = frozenset({"mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply"})
_ADDS = frozenset({"add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__", "sub_", "__isub__"})
_MADE = frozenset({"zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_ones"})
_ADDS_IN_PLACE = frozenset({"add_", "__iadd__", "sub_", "__isub__"})
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
        self.mixes = False  # whether sequences were brought together into something else than a number
        self._picks = False  # whether entries were picked by their values
        self._constants: dict[int, weakref.ref[torch.Tensor]] = {}  # made of parameters and numbers alone

    def term_of(self, value: Any) -> Term | None:
        """Return what `value` is; None for what was not made of sums and means in this context."""
        known = self._terms.get(id(value))
        return known[1] if known is not None and known[0] is value else None

    def _is_constant(self, value: Any) -> bool:
        """Whether `value` is the same for every part of a batch: a number, a parameter, or made of such."""
        if not isinstance(value, torch.Tensor):
            return isinstance(value, (int, float))
        known = self._constants.get(id(value))
        return isinstance(value, nn.Parameter) or (known is not None and known() is value)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        args, given = _positional(name, args, kwargs or {})
        before = [self.term_of(value) for value in args]  # in-place functions return an operand
        tensors = [*_tensors((args, given))]
        is_made_of_terms = any(self.term_of(leaf) is not None for leaf in tensors)
        is_constant = _is_neutral(name, args) or (bool(tensors) and all(map(self._is_constant, tensors)))
        # What is added in place is no more behind the call.
        operands = (self._copied(args[0]), *args[1:]) if name in _ADDS_IN_PLACE else args
        result = func(*self._divisible(name, args, before), **given)
        if isinstance(result, torch.Tensor):
            self._picks = self._picks or (name in ("__getitem__", "masked_select") and _picks_by_value(args))
            self.mixes = self.mixes or (name in (_SUMS | _MEANS) and bool(args) and _mixes(args, given, result))
            self._forget(result)
            if is_constant:
                self._constants[id(result)] = weakref.ref(result)
                return result
            term = self._term(func, name, operands, given, before, result)
            if term is None and is_made_of_terms:
                term = _UNKNOWN
            if term is not None:
                self._terms[id(result)] = (result, term)
        elif name in _READS and before and isinstance(before[0], Sum) and isinstance(result, (int, float)):
            self._read[float(result)] = _raw(args[0], before[0])
        return result

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return value
        copied = value.clone()
        if self._is_constant(value):
            self._constants[id(copied)] = weakref.ref(copied)
        return copied

    def _forget(self, result: torch.Tensor) -> None:
        self._terms.pop(id(result), None)
        self._constants.pop(id(result), None)

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
            return self._of_terms(name, args, kwargs, before, result)
        if name == "stack" and args and isinstance(args[0], (list, tuple)):
            return self._stacked(args[0])
        if result.ndim:
            return None
        if func in _CROSS_ENTROPIES:
            return _cross_entropy_term(args, kwargs)
        if name.endswith("_loss") or name.startswith("binary_cross_entropy") or name == "kl_div":
            return _loss_term(kwargs)
        if name in _MEANS:
            return self._mean_term(name, args)
        return Sum() if name in _SUMS else None

    def _stacked(self, values: Sequence[torch.Tensor]) -> Term | None:
        """Return what numbers side by side are: means with their parts."""
        terms = [self.term_of(value) for value in values]
        means = [
            replace(term, parts=_parts_of(value, term))
            for value, term in zip(values, terms, strict=True)
            if isinstance(term, Mean)
        ]
        return Several(tuple(means)) if len(means) == len(terms) else None

    def _mean_term(self, name: str, args: tuple[Any, ...]) -> Mean:
        if name == "nanmean":
            count = (~args[0].detach().isnan()).sum()
            return Mean(divisor=count, count=count)
        if self._picks:  # as many as there are this time
            number = float(args[0].numel())
            return Mean(divisor=number, count=number)
        return Mean()

    def _of_terms(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: list[Term | None],
        result: torch.Tensor,
    ) -> Term | None:
        """Return what a function makes of operands that are known."""
        first, *rest = before
        second = rest[0] if rest else None
        if isinstance(first, Several):
            is_all = result.ndim == 0 and name in ("sum", "mean")
            by = 1.0 / len(first.means) if name == "mean" else 1.0
            total = _sum_of(*((mean, mean.parts) for mean in first.means))
            return _changed(total, lambda value: value * by) if is_all else None
        if result.ndim and name in _DIVIDES and first is None and isinstance(second, Sum):
            return _divided_by(args[1], second)  # losses of single targets, by the number of all of them
        if result.numel() != 1:
            return None
        if name in _KEEPS or (name in _SUMS and isinstance(first, Mean)) or (name in _MEANS and not args[0].ndim):
            return _changed(first, _KEPT_AS.get(name, _same))
        if name in _SCALES:
            term, by = (first, args[1]) if second is None else (second, args[0])
            return _changed(term, lambda value: value * by) if first is None or second is None else None
        if name in _FLOORS and isinstance(first, Sum):
            return Sum(raw=_raw(args[0], first))
        if name in _ADDS:
            moves = [self._is_constant(value) for value in args[:2]]
            return _added(
                args, first, second, moves=moves, sign=kwargs.get("alpha", 1.0) * (-1.0 if "sub" in name else 1.0)
            )
        if name in _DIVIDES:
            return self._quotient(args, first, second)
        return None

    def _quotient(self, args: tuple[Any, ...], above: Term | None, below: Term | None) -> Term | None:
        if isinstance(above, Sum) and isinstance(below, Sum):
            return _divided_by(args[1], below)
        if isinstance(above, Sum) and isinstance(args[1], (int, float)) and float(args[1]) in self._read:
            return Mean(divisor=float(args[1]), count=self._read[float(args[1])])
        if isinstance(above, Mean) and below is None:
            return _changed(above, lambda value: value / args[1])
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


def _mixes(args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> bool:
    """Whether a sum or mean goes over the first dimension, and leaves others."""
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    found = dims if isinstance(dims, (tuple, list)) else (dims,)
    return bool(result.ndim) and isinstance(args[0], torch.Tensor) and (0 in found or -args[0].ndim in found)


def _added(
    operands: tuple[Any, ...], first: Term | None, second: Term | None, *, moves: list[bool], sign: float
) -> Term | None:
    """Return what the sum of two operands is; `moves` says which are constants, and `sign` multiplies the second."""
    if first is None or second is None:
        term, known, other = (first, operands[0], operands[1]) if second is None else (second, operands[1], operands[0])
        if not moves[1 if second is None else 0]:
            return None
        if isinstance(term, Sum):  # which a constant keeps from being 0, as a divisor
            return Sum(raw=_raw(known, term)) if isinstance(other, torch.Tensor) or other else term
        if not isinstance(term, Mean) or not term.parts:
            return term  # the mean of a constant is itself
        by, moved = (1.0, sign * other) if second is None else (sign, other)
        changed = _changed(term, lambda value: by * value)
        begin, *rest = changed.parts
        return replace(changed, parts=(replace(begin, value=begin.value + moved), *rest))
    if isinstance(first, Sum) and isinstance(second, Sum):
        return Sum() if first.raw is second.raw is None else None
    if not (isinstance(first, Mean) and isinstance(second, Mean)):
        return None
    by_sign = _changed(second, lambda value: sign * value)
    return _sum_of((first, _parts_of(operands[0], first)), (by_sign, _parts_of(operands[1], by_sign, sign)))


def _sum_of(*added: tuple[Mean, tuple[Part, ...]]) -> Mean:
    """Return what the sum of means is, each with its parts: one mean where they go over the same targets."""
    means = [mean for mean, _ in added]
    if all(mean.count is means[0].count and not mean.parts for mean in means):
        return means[0]
    parts = [part for _, own in added for part in own]
    main, *others = sorted(parts, key=lambda part: part.count is None)  # one whose targets are counted, if any is
    return Mean(divisor=main.divisor, count=main.count, parts=(main, *others))


def _parts_of(value: torch.Tensor, mean: Mean, sign: float = 1.0) -> tuple[Part, ...]:
    return mean.parts or (Part(sign * value, mean.divisor, mean.count),)


_Term = TypeVar("_Term", bound=Term | None)


def _changed(term: _Term, change: Callable[[torch.Tensor], torch.Tensor]) -> _Term:
    """Return what `term` is once `change` was done to its number, and so to what that is the sum of."""
    if not isinstance(term, Mean) or not term.parts:
        return term
    return replace(term, parts=tuple(replace(part, value=change(part.value)) for part in term.parts))


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _is_neutral(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function makes numbers that no batch changes: those that code begins a sum with."""
    return name in _MADE or (name == "tensor" and bool(args) and args[0] in (0, 1))


_KEPT_AS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg,
    "__neg__": torch.neg,
    "detach": torch.detach,
}
"""Functions that keep a mean one, and change its number."""


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
