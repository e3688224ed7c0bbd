"""Causes of parameters that are wrong after a step whose gradient was right, or that exchanges gradients itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paraplan.script_check.causes import Cause, Parting, among_ranks, factor_of, gradient_cause
from paraplan.script_check.evidence import Sight, distance, ranks_of
from paraplan.script_check.mixtures import of_micro_batches, order_of_parts

_SMALLEST = 1e-3
_SAME_WAY = 2e-3
_SAME_FACTOR = 1.01
_FARTHEST = 3
_FEWEST_SIGNS = 16
"""Fewer numbers have the signs of any gradient by chance."""
_SAME_SIZE = 0.02
_MOST = 0.99
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
    if factor is None and (implied := _by_implied_gradient(sight, parting, before)):
        return implied
    if factor is not None:
        text = f"it moved {factor:.4g} times as far as in one process, in the right direction: it is stepped more than "
        return Cause("update", factor, text + "once, by another rate, or with another state of the optimizer")
    return Cause("update", None, _of_direction(sight, parting, ways[0], way, tolerance))


def _by_implied_gradient(sight: Sight, parting: Parting, before: torch.Tensor) -> Cause | None:
    """Return what the gradient that a step implies tells, where that of ranks is not seen; None where nothing more.

    A step implies it where one process moves along its gradient, as by SGD. Where each number moves by the same, as by
    a first step of Adam, signs tell of which part of the batches it is.
    """
    gradient = sight.alone.of(f"gradient/{parting.step}").get(parting.name)
    values = [value for value in parting.values if value is not None]
    if len(values) < len(parting.values) or _of_gradient(sight, parting).startswith("its"):
        return None
    way = parting.expected.double() - before.double()
    rate = None if gradient is None else factor_of(way, gradient.double(), _SAME_WAY)
    if gradient is None or not rate:
        return _by_signs(sight, parting, [value.double() - before.double() for value in values], way)
    steps = [(value.double() - before.double()) / rate for value in values]
    noise = parting.tolerance * float(parting.expected.norm()) / max(float(way.norm()), 1e-30)
    errors = [distance(step, gradient, parting.floor) for step in steps]
    implied = Parting(parting.step, parting.name, steps, gradient, errors, max(noise, 1e-4), parting.floor)
    cause = gradient_cause(sight, implied) if implied.ranks else None
    if cause is None or cause.kind in ("another direction", "scaled") or "neither their sum" in cause.text:
        return None
    return Cause("update", None, f"of the gradient that its step is made by: {cause.text}")


def _by_signs(sight: Sight, parting: Parting, moved: Sequence[torch.Tensor], way: torch.Tensor) -> Cause | None:
    """Return of which micro-batch, or of which rank's batch alone, steps have the signs; None where of none."""
    size = float(way.abs().median())
    if parting.step > 1 or way.numel() < _FEWEST_SIGNS or not _has_one_size(way, size):
        return None
    if not all(_has_one_size(one, size) for one in moved):
        return None
    parts = [
        (f"micro-batch {number} alone", one) for number, one in enumerate(of_micro_batches(sight, parting.name), 1)
    ]
    shares = [share.of("gradient/1").get(parting.name) for share in sight.shares]
    parts += [
        (f"rank {group[0]}'s batch alone", share)
        for group, share in zip(sight.groups, shares, strict=False)
        if share is not None
    ]
    told = [next((text for text, part in parts if _has_signs(one, part)), "") for one in moved]
    if not all(told):
        return None
    if len(set(told)) > 1:
        text = "ranks step by the gradients of their own batches alone: these are never reduced over them"
        return Cause("update", None, text)
    return Cause("update", None, f"its step has the signs of the gradient of {told[0]}: the others' are lost")


def _has_one_size(way: torch.Tensor, size: float) -> bool:
    return bool(((way.abs() - size).abs() <= _SAME_SIZE * size).double().mean() >= _MOST)


def _has_signs(moved: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a step goes against a gradient, number by number."""
    return moved.shape == gradient.shape and bool((moved.sign() == -gradient.double().sign()).double().mean() >= _MOST)


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
