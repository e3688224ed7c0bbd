"""Causes of parameters that are wrong after a step whose gradient was right, or that exchanges gradients itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paraplan.script_check.causes import Cause, Parting, among_ranks, factor_of
from paraplan.script_check.evidence import Sight, ranks_of
from paraplan.script_check.mixtures import order_of_parts

_SMALLEST = 1e-3
_SAME_WAY = 2e-3
_SAME_FACTOR = 1.01
_FARTHEST = 3
_FEWEST = 4
"""A piece of a parameter with fewer numbers has any factor."""


def update_cause(sight: Sight, parting: Parting) -> Cause:
    """Return what is seen of a parameter whose value after the step is not that of one process."""
    before = sight.alone.before(parting.step, parting.name)
    wrong = [value for value in (parting.values[rank] for rank in parting.ranks) if value is not None]
    if before is None or len(wrong) < len(parting.ranks):
        return Cause("update", None, "it has no value there" if wrong else "it is in no rank's optimizer")
    way = parting.expected.double() - before.double()
    ways = [value.double() - before.double() for value in wrong]
    smallest = _SMALLEST * float(way.norm())
    still = [rank for rank, one in zip(parting.ranks, ways, strict=True) if float(one.norm()) < smallest]
    if still:
        if len(still) == len(parting.values):
            why = "no optimizer holds it, or its step is skipped"
        else:
            why = "the optimizer there does not hold it, or has no gradient for it, and no other rank sends the value"
        return Cause("not stepped", 0.0, f"it did not change on {ranks_of(still)}: {why}")
    tolerance = max(parting.tolerance * float(parting.expected.norm()) / float(way.norm()), 1e-4)
    factor = factor_of(ways[0], way, tolerance)
    if factor is not None:
        text = f"it moved {factor:.4g} times as far as in one process, in the right direction: it is stepped more than "
        return Cause("update", factor, text + "once, by another rate, or with another state of the optimizer")
    return Cause("update", None, _of_direction(sight, parting, ways[0], way, tolerance))


def scaled_by_rank(causes: Sequence[Cause]) -> Cause | None:
    """Return what it means that parameters moved in the right direction, and by unlike factors; None where not so."""
    factors: list[float] = []
    for factor in sorted(cause.factor for cause in causes if cause.kind == "update" and cause.factor):
        if not factors or factor > _SAME_FACTOR * factors[-1]:
            factors.append(factor)
    if not 2 <= len(factors) <= len(causes) / 2:
        return None
    numbers = ", ".join(f"{factor:.4g}" for factor in factors)
    return Cause(
        "update",
        None,
        f"parameters moved in the right directions, {numbers} times as far as in one process: each rank scales what it "
        "steps by a number of its own, as where it clips by another norm than that of all gradients after their "
        "reduction",
    )


def _of_direction(sight: Sight, parting: Parting, moved: torch.Tensor, way: torch.Tensor, tolerance: float) -> str:
    gradient = _of_gradient(sight, parting)
    before = parting.expected.double() - way
    order = order_of_parts(before + moved, parting.expected.double(), len(sight.ranks))
    if order:
        return f"{gradient}{order}"
    if pieces := _pieces(moved, way, tolerance):
        count, first, second = pieces
        return (
            f"{gradient}its first {count} numbers moved {first:.4g} times as far as in one process, and the others "
            f"{second:.4g} times: each is stepped by itself, by a norm or a state of that piece, where the optimizer "
            "needs the whole"
        )
    if shifted := _shifted(moved, way, tolerance):
        return f"{gradient}{shifted}"
    cosine = float((moved * way).sum() / (moved.norm() * way.norm() + 1e-30))
    text = f"{gradient}it moved in another direction (cosine {cosine:.3f}): "
    kinds = parting.kinds()
    if len(kinds) > 1:
        among = among_ranks(sight, kinds, len(parting.values))
        mean = torch.stack([value.double() for kind in kinds if (value := parting.values[kind[0]]) is not None]).mean(0)
        is_mean = float(torch.dist(mean - before, way)) <= _SAME_WAY * float(way.norm())
        why = ", and the mean of their steps is right: a part of what they step by is not reduced" if is_mean else ""
        return f"{text}{among} after the step{why}; they drift apart"
    if parting.name in sight.ranks[0].record.split or sight.num_parts > 1 or _is_held_in_parts(sight, parting):
        return text + "its optimizer needs more than the part of it that a rank holds, or has another state there"
    return text + "look at the optimizer, its state, and at what changes parameters beside it"


def _is_held_in_parts(sight: Sight, parting: Parting) -> bool:
    """Whether optimizers of ranks hold something else than the parameter, as vectors, or not all of them hold it."""
    steps = [process.record.steps[parting.step - 1] for process in sight.ranks]
    return not all(any(parting.name in names for names in step.members) for step in steps)


def _of_gradient(sight: Sight, parting: Parting) -> str:
    """Return what is known of the gradient by which a parameter was stepped."""
    key = f"gradient/{parting.step}/{parting.name}"
    expected = sight.alone.tensors.get(key)
    values = [process.tensors.get(key) for process in sight.ranks]
    if expected is None or any(value is None or value.shape != expected.shape for value in values):
        return ""
    if all(value is not None and parting.is_near(value, expected) for value in values):
        return "its gradient is right, and "
    return "gradients are reduced inside of the step, or parameters after it, and "


def _shifted(moved: torch.Tensor, way: torch.Tensor, tolerance: float) -> str:
    """Return by how many places the step of a piece is off, "" where it is not."""
    one, other = moved.flatten(), way.flatten()
    limit = 8 * tolerance * float(other.abs().mean()) + 1e-30
    wrong = ((one - other).abs() > limit).nonzero().flatten()
    for places in (*range(1, _FARTHEST + 1), *range(-_FARTHEST, 0)):
        inside = wrong[(wrong - places >= 0) & (wrong - places < len(other))]
        if len(inside) >= _FEWEST and len(inside) >= len(wrong) - _FARTHEST:
            near = (one[inside] - other[inside - places]).abs() <= limit
            if int(near.sum()) >= len(inside) - 1:
                return (
                    f"from number {int(wrong[0])} on its numbers make the steps that are those of {abs(places)} "
                    f"place{'s' if abs(places) > 1 else ''} {'before' if places > 0 else 'behind'}: slices of weights "
                    "and of gradients begin at unlike places"
                )
    return ""


def _pieces(moved: torch.Tensor, way: torch.Tensor, tolerance: float) -> tuple[int, float, float] | None:
    """Return where two pieces of a parameter meet that moved by unlike factors, with these; None where none do.

    Every place is tried: what is left of each piece beside its best factor comes of sums up to there.
    """
    one, other = moved.flatten(), way.flatten()
    if len(one) < 2 * _FEWEST:
        return None
    squares, products, ways = (value.cumsum(0) for value in (one * one, one * other, other * other))
    first = squares - products**2 / ways.clamp(min=1e-300)
    of_rest = (squares[-1] - squares, products[-1] - products, (ways[-1] - ways).clamp(min=1e-300))
    left = (first.clamp(min=0) + (of_rest[0] - of_rest[1] ** 2 / of_rest[2]).clamp(min=0))[_FEWEST - 1 : -_FEWEST]
    place = int(left.argmin()) + _FEWEST - 1
    factors = float(products[place] / ways[place]), float(of_rest[1][place] / of_rest[2][place])
    rest = float(left.min()) ** 0.5 / float(one.norm())
    if rest > 4 * tolerance or abs(factors[0] - factors[1]) <= 8 * tolerance:
        return None
    return place + 1, *factors
