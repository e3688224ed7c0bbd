"""The part of a module's output that is wrong on ranks, told by the numbers that they and one process have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from paraplan.script_check.causes import factor_of
from paraplan.script_check.evidence import Sight
from paraplan.script_check.value_patterns import Cut, pattern_of

_TOLERANCE = 1e-4
_TOLERANCE_BACK = 1e-3
_SINGLE = 1e-6
"""Types whose unit of the last place is larger are coarse."""
_ROUNDINGS = 8
"""How many units of the last place outputs differ by rounding, in coarse types."""


class WrongOutput(NamedTuple):
    """The first value between modules that is wrong."""

    text: str
    """The value: what a module gives, or is given."""
    how: str
    """The numbers that are wrong and what they are in place of the right ones, with the usual meaning; "" where no
    pattern is seen."""


class _Value(NamedTuple):
    """A value between modules, or its gradient: what it is, and how ranks have it."""

    text: str
    module: str
    """The module that gives it; "" where one is given it."""
    cut: Cut
    are_shares: bool
    """Whether ranks have terms of it, whose sum is right."""


def first_wrong(sight: Sight) -> WrongOutput | None:
    """Return the first value of the first step that is wrong on ranks, None where none is known to be.

    Values of which ranks hold terms that are still to be added count as right where their sum is.
    """
    last = ""
    for value in _values(sight, back=False):
        if value.cut.wrong and not value.are_shares:
            what = f"the first output that is another is that of {value.module}"
            if not value.module:
                what = f"the first value that is another is {value.text}"
                what += f", which is made outside of modules of what {last} gives" if last else ""
            return WrongOutput(what, pattern_of(sight, value.cut))
        last = value.module or last
    return None


def first_wrong_gradient(sight: Sight) -> WrongOutput | None:
    """Return the first value between modules whose gradient is wrong as backward passes come to it, None for none."""
    right, before = "", None
    for value in _values(sight, back=True):
        if value.cut.wrong and not value.are_shares:
            what = f"the first gradient that is wrong on the way back is that of {value.text}"
            if before is not None and before.are_shares:
                what += f"; that of {before.text} is in shares, whose sum is right: it may go on before it is summed"
            elif right:
                what += f" (that of {right} is right)"
            return WrongOutput(what, pattern_of(sight, value.cut))
        right, before = value.text if not value.cut.wrong else right, value
    return None


def are_gradients_right(sight: Sight) -> bool:
    """Whether gradients of values between modules are known, and all are right."""
    values = list(_values(sight, back=True))
    return len(values) > 1 and all(not value.cut.wrong or value.are_shares for value in values)


def _values(sight: Sight, *, back: bool) -> Iterator[_Value]:
    """Yield values between modules, or their gradients, in the order of time.

    Losses of ranks are scaled: gradients are those of one process, times a number that the first of them tells, or
    that of the parts into which its rows are cut.
    """
    if sight.noted is None:
        return
    *ranks, alone = sight.noted
    coarse = alone.record.rounding if alone.record.rounding > _SINGLE else 0.0
    tolerance = max(_TOLERANCE_BACK if back else _TOLERANCE, _ROUNDINGS * coarse)
    scales = [] if back else [1.0] * len(ranks)
    for key in alone.record.noted:
        side, _, name = key.split("/", 2)
        values = [process.tensors[f"noted/{key}"] for process in ranks if f"noted/{key}" in process.tensors]
        if side.startswith("back ") != back or len(values) < len(ranks):
            continue
        expected = alone.tensors[f"noted/{key}"]
        cuts = _cuts(sight, values, expected, tolerance)
        if cuts and not scales:
            factors = [factor_of(one, part, tolerance) for one, part in zip(values, cuts[0].parts, strict=True)]
            num_parts = expected.shape[0] / values[0].shape[0]
            scales = [factor or num_parts for factor in factors] if all(factors) else [num_parts] * len(ranks)
        if cuts:
            cuts = _cuts(sight, [one / scale for one, scale in zip(values, scales, strict=True)], expected, tolerance)
            given = side.endswith("given")
            text = f"what {name} is given" if given else f"what {name} gives"
            best = cuts[0]._replace(is_gradient=back)
            yield _Value(text, "" if given else name, best, any(cut.are_shares for cut in cuts))


def _cuts(sight: Sight, values: Sequence[torch.Tensor], expected: torch.Tensor, tolerance: float) -> list[Cut]:
    """Return values of ranks beside their parts of `expected`, in all ways to cut it, that of the least error first."""
    shapes = [tuple(value.shape) for value in values]
    if any(
        len(shape) != expected.ndim or not bool(value.isfinite().all())
        for shape, value in zip(shapes, values, strict=True)
    ):
        return []
    cuts = []
    for begins in _layouts(sight, expected.shape, shapes[0]) if len(set(shapes)) == 1 else _uneven(expected, shapes):
        parts = []
        for begin, shape in zip(begins, shapes, strict=True):
            part = expected
            for dim, (at, size) in enumerate(zip(begin, shape, strict=True)):
                part = part.narrow(dim, at, size)
            parts.append(part)
        cuts.append(Cut(values, parts, begins, tolerance))
    return sorted(cuts, key=lambda cut: sum(map(cut.error, range(len(values)))))


def _uneven(expected: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yield where parts of unlike sizes of one dimension begin, one after another."""
    for dim in range(expected.ndim):
        sizes = [shape[dim] for shape in shapes]
        others = [
            {shape[one] for shape in shapes} == {expected.shape[one]} for one in range(expected.ndim) if one != dim
        ]
        if all(others) and sum(sizes) == expected.shape[dim]:
            starts = [0, *itertools.accumulate(sizes)]
            yield [tuple(start if one == dim else 0 for one in range(expected.ndim)) for start in starts[:-1]]


def _layouts(sight: Sight, whole: Sequence[int], shape: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Yield where the part of each rank may begin, of a value of the shape `whole` in parts of the shape `shape`.

    Rows are by groups of ranks that read the same, and the rest by the order of ranks; or all is by that order, as of
    what has no rows.
    """
    if any(not size or total % size for size, total in zip(shape, whole, strict=True)):
        return
    counts = [total // size for size, total in zip(shape, whole, strict=True)]
    everyone = [range(len(sight.ranks))]
    for groups in (sight.groups, everyone) if len(sight.groups) > 1 else (everyone,):
        inner = list(counts)
        if groups is not everyone:
            if inner[0] % len(groups):
                continue
            inner[0] //= len(groups)
        if any(len(group) % math.prod(inner) for group in groups):
            continue
        dims = [dim for dim, count in enumerate(inner) if count > 1]
        for order in itertools.permutations(dims):
            for is_outer in (True, False) if dims else (True,):
                places: dict[int, list[int]] = {}
                for number, group in enumerate(groups):
                    copies = len(group) // math.prod(inner)
                    for place, rank in enumerate(group):
                        left = place // copies if is_outer else place % (len(group) // copies)
                        places[rank] = [number * inner[0], *[0] * (len(counts) - 1)]
                        for dim in reversed(order):
                            left, at = divmod(left, inner[dim])
                            places[rank][dim] += at
                yield [
                    tuple(at * size for at, size in zip(places[rank], shape, strict=True)) for rank in sorted(places)
                ]
