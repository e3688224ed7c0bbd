"""Patterns of wrong numbers of a value between modules: where they are, what they are instead, and what that means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paraplan.script_check.causes import factor_of
from paraplan.script_check.evidence import Sight, distance, ranks_of
from paraplan.script_check.mixtures import order_of_parts

_MOST_SHOWN = 6
_MOST_ROWS = 4096
_FEWEST = 3
"""Fewer numbers are a multiple of any."""


class Cut(NamedTuple):
    """A value on ranks beside the part of one process's value that each should have."""

    ranks: Sequence[torch.Tensor]
    parts: Sequence[torch.Tensor]
    begins: Sequence[tuple[int, ...]]
    """Where the part of each rank begins, by dimension."""
    tolerance: float
    is_gradient: bool = False

    @property
    def wrong(self) -> list[int]:
        """Ranks whose values are not their parts."""
        return [rank for rank in range(len(self.ranks)) if self.error(rank) > self.tolerance]

    @property
    def is_even(self) -> bool:
        """Whether all ranks have values of one shape."""
        return len({value.shape for value in self.ranks}) == 1

    def error(self, rank: int) -> float:
        """Size of the difference of a rank's value, relative to the part that it should have."""
        return distance(self.ranks[rank], self.parts[rank], 0.0)

    @property
    def are_shares(self) -> bool:
        """Whether the values of those ranks that should have the same are terms, whose sum is what each should have."""
        by_place: dict[tuple[int, ...], list[int]] = {}
        for rank, begin in enumerate(self.begins):
            by_place.setdefault(begin, []).append(rank)
        return all(
            len(ranks) > 1
            and self.is_near(torch.stack([self.ranks[rank].double() for rank in ranks]).sum(0), self.parts[ranks[0]])
            for ranks in by_place.values()
        )

    def is_near(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether rounding explains how two values differ."""
        return one.shape == other.shape and distance(one, other, 0.0) <= self.tolerance


def pattern_of(sight: Sight, cut: Cut) -> str:
    """Return what wrong numbers are in place of the right ones, "" where no pattern is seen."""
    for pattern in (
        _scaled,
        _of_another_rank,
        _alike,
        _of_other_rows,
        _shifted_by_a_vector,
        _scaled_by_row,
        _from_a_token_on,
        _in_a_region,
        _scaled_and_shifted,
    ):
        if text := pattern(sight, cut):
            return text
    return ""


def _scaled(sight: Sight, cut: Cut) -> str:
    factors = [factor_of(cut.ranks[rank], cut.parts[rank], cut.tolerance) for rank in cut.wrong]
    if any(factor is None or cut.ranks[0].numel() < 2 for factor in factors):
        return ""
    shown = ", ".join(dict.fromkeys(f"{factor:.4g}" for factor in factors))
    return (
        f"it is {shown} times that of one process on {ranks_of(cut.wrong)}: it is summed over ranks that have the "
        "whole, averaged where it should be summed, or scaled by a number of ranks"
    )


def _of_another_rank(sight: Sight, cut: Cut) -> str:
    for rank in cut.wrong:
        other = next((one for one, part in enumerate(cut.parts) if cut.is_near(cut.ranks[rank], part)), None)
        if other is not None:
            return (
                f"rank {rank} has what rank {other} should have: it takes the part of another rank, as where a place "
                "in a group is taken for the rank, or each takes the first part"
            )
        order = order_of_parts(cut.ranks[rank], cut.parts[rank], len(sight.ranks))
        if order:
            return f"on rank {rank} {order}"
    return ""


def _alike(sight: Sight, cut: Cut) -> str:
    """Return that ranks have the same where each should have a part of its own, "" where not so."""
    same = [rank for rank in range(len(cut.ranks)) if cut.is_near(cut.ranks[rank], cut.ranks[cut.wrong[0]])]
    parts = {cut.begins[rank] for rank in same}
    if len(parts) < 2:
        return ""
    return (
        f"it is the same on {ranks_of(same)}, where each has rows or tokens, or features, of its own: what unlike ones "
        "give is added, or averaged, over these ranks by their places"
    )


def _of_other_rows(sight: Sight, cut: Cut) -> str:
    """Return that rows are those of one process in another order, "" where not so."""
    if not cut.is_even:
        return ""
    whole = torch.cat([_rows(cut.parts[rank]) for rank in range(len(cut.parts))])
    size = float(whole.square().mean()) ** 0.5 * whole.shape[1] ** 0.5
    moved: list[str] = []
    for rank in cut.wrong:
        rows, parts = _rows(cut.ranks[rank]), _rows(cut.parts[rank])
        if len(whole) > _MOST_ROWS or whole.shape[1] < _FEWEST:
            return ""
        if float(torch.cdist(rows, whole).min(dim=1).values.max()) > 4 * cut.tolerance * size:
            return ""
        wrong = ((rows - parts).norm(dim=1) > 4 * cut.tolerance * size).nonzero().flatten().tolist()
        moved.append(f"rows {_ranges(wrong)} of {len(rows)} on rank {rank}")
    return (
        f"its rows are those of one process, in another order: {'; '.join(moved[:_MOST_SHOWN])} are others: what ranks "
        "gather is put together otherwise than what belongs to it, as labels, pairs or places"
    )


def _rows(value: torch.Tensor) -> torch.Tensor:
    return value.double().reshape(-1, value.shape[-1]) if value.ndim else value.double().reshape(1, 1)


def _shifted_by_a_vector(sight: Sight, cut: Cut) -> str:
    """Return that the same is added to each row, as a bias that each rank adds, "" where not so."""
    for rank in cut.wrong:
        more = _rows(cut.ranks[rank]) - _rows(cut.parts[rank])
        if len(more) < 2 or distance(more, more[:1].expand_as(more), 0.0) > 10 * cut.tolerance:
            return ""
    rank = cut.wrong[0]
    more = (_rows(cut.ranks[rank]) - _rows(cut.parts[rank]))[0]
    start = sight.alone.of("start")
    for parameter, value in start.items():
        if value.ndim == 1 and len(value) == len(more) and len(more) > 1:
            factor = factor_of(more, value, 10 * cut.tolerance)
            if factor is not None and abs(factor) > cut.tolerance:
                return f"{parameter} is in it {1 + factor:.3g} times: each rank adds it, and then their sum is taken"
    return (
        "the same numbers are added to each of its rows: what is to be added once is added by each rank, or not at all"
    )


def _scaled_by_row(sight: Sight, cut: Cut) -> str:
    """Return that each row is a multiple of the right one by a number of its own, "" where not so."""
    width = cut.ranks[0].shape[-1] if cut.is_even else 0
    for size in (size for size in range(width, _FEWEST - 1, -1) if width % size == 0):
        if all(_is_scaled_by_part(cut, rank, size) for rank in cut.wrong):
            what = "each of its rows" if size == width else f"each {size} features of its rows"
            return (
                f"{what} {'is' if size == width else 'are'} multiplied by another number on {ranks_of(cut.wrong)}: a "
                "norm, a mean, a softmax or a count is taken over a part, or another group, of the features or rows "
                "that it should be of"
            )
    return ""


def _is_scaled_by_part(cut: Cut, rank: int, size: int) -> bool:
    """Whether each `size` features of a row are a multiple of the right ones, by a number of their own."""
    one, other = (value.double().reshape(-1, size) for value in (cut.ranks[rank], cut.parts[rank]))
    if len(one) < 2:
        return False
    factors = (one * other).sum(1, keepdim=True) / (other * other).sum(1, keepdim=True).clamp(min=1e-30)
    return distance(factors * other, one, 0.0) <= 4 * cut.tolerance


def _scaled_and_shifted(sight: Sight, cut: Cut) -> str:
    """Return that rows, or channels of them, are multiples of the right ones plus a number, "" where not so."""
    shape = cut.ranks[0].shape
    for dim in range(1, len(shape)):
        if shape[dim:].numel() > _FEWEST and all(_is_affine(cut, rank, dim) for rank in cut.wrong):
            what = "rows" if dim == 1 else "rows and channels" if dim < len(shape) - 1 else "tokens"
            return (
                f"each of its {what} is another multiple of the right one, and a number more, on "
                f"{ranks_of(cut.wrong)}: the mean and the deviation of a norm are those of a part, or parts of unlike "
                "sizes count alike in them"
            )
    return ""


def _is_affine(cut: Cut, rank: int, dim: int) -> bool:
    """Whether what lies behind the first `dim` dimensions is each time a multiple of the right values plus a number."""
    one, other = (value.double().flatten(0, dim - 1).flatten(1) for value in (cut.ranks[rank], cut.parts[rank]))
    away, right = one - one.mean(1, keepdim=True), other - other.mean(1, keepdim=True)
    factors = (away * right).sum(1, keepdim=True) / right.square().sum(1, keepdim=True).clamp(min=1e-30)
    return len(one) > 1 and distance(factors * right + one.mean(1, keepdim=True), one, 0.0) <= 4 * cut.tolerance


def _from_a_token_on(sight: Sight, cut: Cut) -> str:
    """Return that rows are right up to a token and wrong from there on, each from another one, "" where not so."""
    begins = set()
    for rank in cut.wrong:
        mask = _mask(cut, rank)
        if mask.ndim < 3 or mask.shape[1] < _FEWEST:
            return ""
        wrong = mask.any(dim=tuple(range(2, mask.ndim))).long()
        if bool((wrong.diff(dim=1) < 0).any()):
            return ""
        begins |= set((wrong.shape[1] - wrong.sum(1)).tolist())
    if len(begins) < _FEWEST:
        return ""
    return (
        f"its rows are right up to a token, and wrong from there on, each from another ({_ranges(sorted(begins))}): "
        "what is carried on is not ended, or ended otherwise, where a document of the row begins"
    )


def _in_a_region(sight: Sight, cut: Cut) -> str:
    """Return which rows, tokens or features are wrong where others are right, "" where all are wrong."""
    regions = {rank: region for rank in cut.wrong if (region := _region(cut, rank)) is not None}
    right = [rank for rank in range(len(cut.ranks)) if rank not in cut.wrong]
    if len(regions) == len(cut.wrong):
        by_text: dict[str, list[int]] = {}
        for rank, region in regions.items():
            by_text.setdefault(region.text, []).append(rank)
        shown = "; ".join(f"{text} on {ranks_of(ranks)}" for text, ranks in list(by_text.items())[:_MOST_SHOWN])
        return f"it is wrong in {shown}, and right elsewhere{_meaning(cut, list(regions.values()))}"
    if right:
        why = "positions, masks, slopes, heads or what is carried on are those of another part there"
        if cut.is_gradient:
            why = "what other ranks have to send back of it is lost there, or wrong"
        return f"it is wrong on {ranks_of(cut.wrong)} and right on {ranks_of(right)}: {why}"
    return ""


class _Region(NamedTuple):
    """The wrong numbers of a rank's value, as indices of one dimension."""

    rank: int
    dim: int
    wrong: Sequence[int]
    what: str
    text: str


def _region(cut: Cut, rank: int) -> _Region | None:
    """Return where a rank's value is wrong, by its last dimension that has right and wrong places; None for none."""
    mask = _mask(cut, rank)
    for dim in reversed(range(mask.ndim)) if mask.ndim > 1 else ():
        others = [one for one in range(mask.ndim) if one != dim]
        wrong = mask.any(dim=others).nonzero().flatten().tolist()
        if 0 < len(wrong) < mask.shape[dim]:
            what = "features" if dim == mask.ndim - 1 else "tokens" if dim or mask.ndim == 2 else "rows"
            return _Region(rank, dim, wrong, what, f"{what} {_ranges(wrong)} of {mask.shape[dim]}")
    return None


def _meaning(cut: Cut, regions: Sequence[_Region]) -> str:
    """Return what it usually means that values are wrong in some regions alone."""
    if all(_are_shares_there(cut, region) for region in regions):
        return ": there each rank has a share, and their sum is right, so it is never summed over these ranks"
    if cut.is_gradient or any(region.what == "features" for region in regions):
        return ""
    if all(list(region.wrong) == list(range(len(region.wrong))) for region in regions) and all(
        cut.begins[region.rank][region.dim] > 0 for region in regions
    ):
        return (
            ": at the cut, what a token takes from those before it, as a convolution, a shift or a state, starts anew "
            "in place of coming from the rank before"
        )
    if all(list(region.wrong) == list(range(1, cut.ranks[0].shape[region.dim])) for region in regions):
        return (
            ": the first token, which sees itself alone, is right, so it is how tokens see those before them: heads, "
            "slopes, positions or masks"
        )
    return ""


def _are_shares_there(cut: Cut, region: _Region) -> bool:
    """Whether the wrong numbers of ranks that should have the same are terms of a right sum."""
    alike = [rank for rank, begin in enumerate(cut.begins) if begin == cut.begins[region.rank]]
    if len(alike) < 2:
        return False
    there = torch.tensor(list(region.wrong))
    total = torch.stack([cut.ranks[rank].double().index_select(region.dim, there) for rank in alike]).sum(0)
    return cut.is_near(total, cut.parts[region.rank].double().index_select(region.dim, there))


def _mask(cut: Cut, rank: int) -> torch.Tensor:
    """Return which numbers of a rank's value are wrong."""
    one, other = cut.ranks[rank].double(), cut.parts[rank].double()
    wrong: torch.Tensor = (one - other).abs() > 4 * cut.tolerance * float(other.square().mean()) ** 0.5
    return wrong


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as words: `0-3, 6`."""
    shown: list[list[int]] = []
    for number in numbers:
        if shown and number == shown[-1][-1] + 1:
            shown[-1] = [shown[-1][0], number]
        else:
            shown.append([number])
    words = ["-".join(map(str, dict.fromkeys(one))) for one in shown[:_MOST_SHOWN]]
    return ", ".join(words) + (", ..." if len(shown) > _MOST_SHOWN else "")
