"""Causes of differences, and their usual meaning: told by the values that ranks and one process have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paraplan.script_check.evidence import Sight, distance, listed, ranks_of
from paraplan.script_check.mixtures import made_of, meaning_of_shares
from paraplan.script_check.records import Kind

_SIZE_OF = "the size of "
_MOST_ROWS = 8
_SIZE_TOLERANCE = 1e-3
"""How exactly a factor is a number of ranks."""


class Cause(NamedTuple):
    """The kind of a difference, the ratio to one process's value where the direction is the same, and words."""

    kind: Kind
    factor: float | None
    text: str


@dataclass(frozen=True)
class Parting:
    """One parameter that parts in one step: its values on ranks, None where they have none, and in one process."""

    step: int
    name: str
    values: Sequence[torch.Tensor | None]
    expected: torch.Tensor
    errors: Sequence[float]
    tolerance: float
    floor: float

    @property
    def ranks(self) -> list[int]:
        """Ranks whose values differ."""
        return [rank for rank, error in enumerate(self.errors) if error > self.tolerance]

    def is_near(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether rounding explains how two values differ."""
        return distance(one, other, self.floor) <= 2 * self.tolerance

    def kinds(self) -> list[list[int]]:
        """Return the ranks by their values: those of one group have the same."""
        found: list[list[int]] = []
        for rank, value in enumerate(self.values):
            alike = next((group for group in found if self._is_same(self.values[group[0]], value)), None)
            if alike is None:
                found.append([rank])
            else:
                alike.append(rank)
        return found

    def _is_same(self, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        return one is other or (one is not None and other is not None and self.is_near(other, one))


def factor_of(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float | None:
    """Return by which number `value` is a multiple of `expected`; None where it has another direction."""
    size = float((expected.double() ** 2).sum())
    if size == 0:
        return None
    factor = float((value.double() * expected.double()).sum()) / size
    rest = float((value.double() - factor * expected.double()).norm()) / max(float(value.double().norm()), 1e-30)
    return factor if rest <= 4 * tolerance else None


def gradient_cause(sight: Sight, parting: Parting) -> Cause:
    """Return what is seen of a gradient that parts, and what it usually means."""
    values, expected = parting.values, parting.expected
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        ranks = [rank for rank, value in enumerate(values) if value is None]
        which = f"none on {ranks_of(ranks)}" if there else "none on any rank"
        return Cause(
            "no gradient",
            None,
            f"it gets a gradient in one process and {which}: it takes no part in the loss there, what reduces "
            "gradients passes it over, or the optimizer holds other tensors, as those of before the model was wrapped",
        )
    broken = [rank for rank, value in enumerate(there) if not bool(value.isfinite().all())]
    if broken:
        return Cause("not finite", None, f"it is NaN or infinite on {ranks_of(broken)} and finite in one process")
    smallest = parting.tolerance * max(float(expected.double().norm()), parting.floor)
    zero = [rank for rank, value in enumerate(there) if float(value.double().norm()) <= smallest]
    if zero:
        where = "all ranks" if len(zero) == len(values) else ranks_of(zero)
        return Cause(
            "zero", 0.0, f"it is zero on {where}: what it takes part in is cut from the loss, or never sent back"
        )
    if len(parting.kinds()) > 1:
        return _cause_of_spread(sight, parting, there)
    factor = factor_of(there[0], expected, parting.tolerance)
    if factor is not None:
        return _cause_of_factor(sight, factor)
    return _cause_of_direction(sight, parting, there[0])


def _cause_of_spread(sight: Sight, parting: Parting, values: Sequence[torch.Tensor]) -> Cause:
    """Return what ranks that disagree have: shares that were never reduced, or reduced among some."""
    kinds = parting.kinds()
    among = among_ranks(sight, kinds, len(values))
    first = values[0].double()
    ratios = [factor_of(value, values[0], parting.tolerance) for value in values]
    if first.numel() > 1 and all(ratio is not None for ratio in ratios):
        numbers = ", ".join(f"{ratio:.4g}" for ratio in ratios)
        return Cause(
            "scaled",
            factor_of(values[parting.ranks[0]], parting.expected, parting.tolerance),
            f"ranks have {numbers} times the gradient of rank 0: each multiplies it by a number of its own, as a loss "
            "scale, a number of targets, or a norm of clipping that is not the same on all",
        )
    total = torch.stack([values[group[0]].double() for group in kinds]).sum(dim=0)
    factor = factor_of(total, parting.expected, parting.tolerance)
    if factor is None:
        made = made_of(sight, parting.step, parting.name, values[parting.ranks[0]])
        if made:
            return Cause("other parts", None, f"{among}: on {ranks_of(parting.ranks[:1])} {made}")
        right = [rank for rank in range(len(values)) if rank not in parting.ranks]
        also = f" (the gradient of all batches is on {ranks_of(right)})" if right else ""
        return Cause(
            "not reduced",
            None,
            f"{among}{also}, and neither their sum nor their mean is the gradient of all batches: a part of it is not "
            "reduced over these ranks, as where an exchange on the way back is left out",
        )
    if abs(factor - 1) < _SIZE_TOLERANCE:
        what = "their sum is the gradient of all batches"
    elif abs(factor / len(kinds) - 1) < _SIZE_TOLERANCE:
        what = "their mean is the gradient of all batches"
    else:
        what = f"their mean is the gradient of all batches times {factor / len(kinds):.4g}"
    is_clipped = all(process.record.steps[parting.step - 1].norm is not None for process in sight.ranks)
    when = ", or not before it is clipped" if is_clipped else ""
    return Cause("not reduced", None, f"{among}, and {what}: it is never reduced over these ranks{when}")


def among_ranks(sight: Sight, kinds: Sequence[Sequence[int]], num_ranks: int) -> str:
    """Return which ranks have values of their own, and over which axis."""
    over = [
        name
        for name, groups in sight.axes.items()
        if all(len(group) == len(kinds) and all(set(group) & set(kind) for kind in kinds) for group in groups)
    ]
    axis = f" of {' or '.join(over)}" if over else ""
    if len(kinds) == num_ranks:
        return f"each rank{axis} has its own"
    return f"ranks{axis} differ ({' | '.join(map(listed, kinds))})"


def size_of(sight: Sight, factor: float) -> str:
    """Return which numbers a factor is, "" for none."""
    found = [what for what, size in sight.sizes.items() if abs(factor / size - 1) < _SIZE_TOLERANCE]
    axes = [what.removeprefix(_SIZE_OF) for what in found if what.startswith(_SIZE_OF)]
    others = [what for what in found if not what.startswith(_SIZE_OF)]
    return " or ".join([*([_SIZE_OF + " or ".join(axes)] if axes else []), *others])


def _cause_of_factor(sight: Sight, factor: float) -> Cause:
    """Return what a gradient that is too large, or too small, by `factor` usually means."""
    large, small = size_of(sight, factor), size_of(sight, 1 / factor) if factor > 0 else ""
    if large:
        text = f"it is {factor:.4g} times too large, {large}: it is summed where it should be averaged, or added twice"
    elif small:
        text = f"it is {factor:.4g} of what it should be, one by {small}: it is divided once too often"
    elif factor > 0 and size_of(sight, factor**0.5):
        text = f"it is {factor:.4g} times too large, the square of {size_of(sight, factor**0.5)}"
    elif factor > 0 and size_of(sight, factor**-0.5):
        text = f"it is {factor:.4g} of what it should be, one by the square of {size_of(sight, factor**-0.5)}"
    else:
        text = f"it has the right direction and {factor:.4g} times its size: the loss, or the gradient, is scaled "
        return Cause("scaled", factor, text + "otherwise")
    return Cause("scaled", factor, text)


def is_of_known_size(sight: Sight, factor: float) -> bool:
    """Whether a factor is a number of ranks, or one by it."""
    return factor > 0 and bool(size_of(sight, factor) or size_of(sight, 1 / factor))


def _cause_of_direction(sight: Sight, parting: Parting, value: torch.Tensor) -> Cause:
    by_shares = _cause_of_shares(sight, parting, value)
    if by_shares is not None:
        return by_shares
    expected = parting.expected
    for dim in range(expected.ndim):
        parts = list(zip(value.chunk(len(sight.ranks), dim), expected.chunk(len(sight.ranks), dim), strict=True))
        factors = [factor_of(one, other, parting.tolerance) for one, other in parts if other.numel() > 1]
        numbers = [f"{factor:.4g}" for factor in factors if factor is not None]
        if len(numbers) == len(parts) > 1:
            return Cause(
                "scaled",
                None,
                f"the parts that ranks hold of it are {', '.join(numbers)} times those of one process: each rank "
                "multiplies its own by another number, as where it clips by the norm of its part alone",
            )
        if _are_alike(parting, parts):
            return Cause(
                "other parts",
                None,
                "the parts that ranks hold of it have the same gradient, where each should have its own: it is reduced "
                "over ranks that hold unlike parts, so that numbers of other rows or columns are added by their places",
            )
    earlier = sight.alone.of(f"gradient/{parting.step - 1}").get(parting.name)
    if earlier is not None and parting.is_near(value, earlier):
        return Cause(
            "stale", None, f"it is the gradient of step {parting.step - 1}: the optimizer steps before it is exchanged"
        )
    if value.dtype == torch.float32 and float(value.norm()) > parting.floor * value.numel() ** 0.5:
        for coarse in (torch.bfloat16, torch.float16):
            if distance(value, expected, parting.floor) < 4 * torch.finfo(coarse).eps and bool(
                (value.to(coarse).float() == value).all()
            ):
                name = str(coarse).removeprefix("torch.")
                text = f"its values are those of {name}: it is reduced, or kept, in 16 bits where one process has 32"
                return Cause("16 bits", None, text)
    made = made_of(sight, parting.step, parting.name, value)
    if made:
        return Cause("other parts", None, made)
    cosine = float(
        (value.double() * expected.double()).sum() / (value.double().norm() * expected.double().norm() + 1e-30)
    )
    ratio = float(value.double().norm() / (expected.double().norm() + 1e-30))
    text = f"it has another direction (cosine {cosine:.3f}) and {ratio:.3g} times the size: "
    return Cause("another direction", None, text + (_of_rows(parting, value) or "some of it is lost, or wrong"))


def _are_alike(parting: Parting, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether parts have one value, where each should have another. `parts` holds what is there, and should be."""
    first, expected = parts[0]
    return len(parts) > 1 and all(
        one.shape == first.shape and parting.is_near(one, first) and not parting.is_near(other, expected)
        for one, other in parts[1:]
    )


def _of_rows(parting: Parting, value: torch.Tensor) -> str:
    """Return which rows of a matrix are wrong where others are right, "" where not so."""
    if value.ndim != 2:
        return ""
    wrong = [row for row in range(len(value)) if not parting.is_near(value[row], parting.expected[row])]
    if not 0 < 2 * len(wrong) <= len(value):
        return ""
    shown = ", ".join(map(str, wrong[:_MOST_ROWS])) + (", ..." if len(wrong) > _MOST_ROWS else "")
    are_zero, verb = not bool(value[wrong].any()), "are" if len(wrong) > 1 else "is"
    return f"its row{'s' if len(wrong) > 1 else ''} {shown} {verb} {'zero' if are_zero else 'wrong'}, and others right"


def _cause_of_shares(sight: Sight, parting: Parting, value: torch.Tensor) -> Cause | None:
    """Return what a gradient is made of what each rank's batch alone gives, None where that is not seen."""
    shares = [
        share.of(f"gradient/{parting.step}")[parting.name]
        for share in sight.shares
        if parting.name in share.of(f"gradient/{parting.step}")
    ]
    for group, share in zip(sight.groups, shares, strict=False):
        if factor_of(value, share, parting.tolerance) is not None:
            text = f"all ranks have the gradient of rank {group[0]}'s batch alone: the others' is lost"
            return Cause("one rank's share", None, text)
    if len(shares) > 1:
        mean = torch.stack([share.double() for share in shares]).mean(dim=0)
        apart = distance(value, parting.expected, parting.floor)
        if distance(value, mean, parting.floor) <= max(parting.tolerance, min(2e-3, apart / 4)):
            return Cause(
                "mean of shares",
                None,
                "it is the mean of what each rank's batch alone gives, which is not the gradient of all batches: "
                + meaning_of_shares(sight, parting.step, parting.name),
            )
        each = torch.stack(list(shares))
        for what, edge in (("largest", each.amax(dim=0)), ("smallest", each.amin(dim=0))):
            if parting.is_near(value, edge):
                text = f"each of its numbers is the {what} of those that ranks' batches give: it is reduced by another "
                return Cause("another direction", None, text + "operation than a sum or mean")
    return None
