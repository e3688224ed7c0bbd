"""What products of matrices, and einsums, do to parts of their factors."""

from __future__ import annotations

from typing import Any

import torch

from paraplan.runtime.split.group import gather_to_ranks
from paraplan.runtime.split.split_tensor import CONTEXT, SplitTensor, as_operand, is_of_sequence


def split_product(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the rows of a matrix product for this rank's tokens; None where the factors do not bring tokens together.

    Attention that is written out multiplies queries by keys, and their weights by values, of all tokens: these are
    gathered, and every rank has the rows of its own queries (as Llama 3 does it, Grattafiori et al. 2024, section
    3.3.2). Heads need not divide.
    """
    left, right = args if len(args) == 2 else (None, None)
    if not (isinstance(left, SplitTensor) and isinstance(right, SplitTensor)) or kwargs:
        return None
    if left.source != CONTEXT or right.source != CONTEXT or min(left.ndim, right.ndim) < 2:
        return None
    if left.cut.dim != left.ndim - 2 or right.cut.dim < right.ndim - 2:
        return None
    rows = torch.matmul(left.local, gather_tokens(right))
    return SplitTensor(rows, left.cut.at(rows.ndim - 2), left.group, CONTEXT)


def split_einsum(_: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an einsum of factors that are split along one letter, which the result has; None where they are not.

    Of two factors with some tokens each, along different letters, the tokens of the second are gathered.
    """
    equation, *factors = args
    factors = list(factors[0]) if len(factors) == 1 and isinstance(factors[0], (list, tuple)) else factors
    if kwargs or not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    given, result = equation.replace(" ", "").split("->")
    terms = given.split(",")
    by_tokens = any(is_of_sequence(factor) for factor in factors)
    is_split = [isinstance(factor, SplitTensor) and is_of_sequence(factor) == by_tokens for factor in factors]
    first = factors[is_split.index(True)]
    letter = terms[is_split.index(True)][first.cut.dim]
    if letter not in result:
        return None
    parts = []
    for term, factor, split in zip(terms, factors, is_split, strict=True):
        place = term.find(letter)
        if not split:
            whole = as_operand(factor, first)
            parts.append(whole if place < 0 else first.cut.at(place).part(whole, first.group.index))
        elif factor.cut == first.cut.at(place):
            parts.append(factor.local)
        elif by_tokens and all(is_split) and len(factors) == 2:
            parts.append(gather_tokens(factor))
        else:
            return None
    cut = first.cut.at(result.index(letter))
    return SplitTensor(torch.einsum(equation, *parts), cut, first.group, first.source)


def gather_tokens(split: SplitTensor) -> torch.Tensor:
    """Return the tokens of all ranks of `cp`, for each to go its own way with; heads stay split as they are."""
    inner = split.local
    if not isinstance(inner, SplitTensor):
        return gather_to_ranks(inner, split.cut, split.group)
    gathered: torch.Tensor = SplitTensor(
        gather_to_ranks(inner.local, split.cut, split.group), inner.cut, inner.group, inner.source
    )
    return gathered
