"""Where the records of ranks and of one process part first, and by how much."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from paraplan.script_check.buffers import unlike_held
from paraplan.script_check.causes import (
    Cause,
    Parting,
    gradient_cause,
    is_of_known_size,
    size_of,
)
from paraplan.script_check.copies import unlike_copies
from paraplan.script_check.divided_steps import by_holders, clipped_alike, is_comparable, is_reduced_inside
from paraplan.script_check.evidence import NOISE_FACTOR, SMALLEST, Sight, distance, ranks_of, sizes_of
from paraplan.script_check.places import in_context, is_vague, loss_of
from paraplan.script_check.records import Difference, Kind, ProcessRecord, Quantity
from paraplan.script_check.steadiness import changing
from paraplan.script_check.update_causes import scaled_by_rank, update_cause

_ROUNDING = 3e-5
"""Relative difference that sums of another order make of fp32, beyond what shaken weights show."""

_SUMMED = 1e-4
_OF_SUMS = 0.1
"""Relative difference of a gradient from the sum of its parts' below which it is that sum, and not their mean."""
_CLIPPED = 2e-3
"""Relative difference of what clipping multiplies by, which limits add some 1e-6 to the norm for."""
_CANCELLED = 1e-5
"""The rest of a gradient whose terms cancel, relative to the size that gradients of the model have: some tens of units
of the last place of fp32."""

_SKIPPING = (
    "a step is skipped on some ranks alone, as where each decides by its own gradients or loss, or has fewer batches"
)

_TELLING: tuple[Kind, ...] = (
    "not finite",
    "no gradient",
    "zero",
    "one rank's share",
    "other parts",
    "not reduced",
    "scaled",
    "stale",
    "mean of shares",
    "16 bits",
)
"""Kinds of causes, the plainest first: what parts by another direction alone mostly follows from one of them."""


def first_difference(sight: Sight) -> tuple[Difference | None, float, float]:
    """Return the first thing that parts, or None, with the largest relative errors of gradients and parameters."""
    starting = _start(sight) or _same_rows(sight)
    if starting is not None:
        return starting, 0.0, 0.0
    errors: dict[Quantity, float] = {"gradient": 0.0, "parameter": 0.0}
    num_steps = min(len(process.record.steps) for process in (*sight.ranks, sight.alone, sight.shaken))
    for step in range(1, num_steps + 1):
        if step > 1 and changing(sight, step - 1):
            return None, errors["gradient"], errors["parameter"]
        for quantity in ("gradient", "parameter"):
            found, error = _compare(sight, step, quantity)
            if found is not None:
                return _skipped(sight, step) or found, errors["gradient"], errors["parameter"]
            errors[quantity] = max(errors[quantity], error)
            if quantity == "gradient":
                if unlike := unlike_copies(sight, step):
                    found = _difference(step, "copy", "", unlike[0], Cause("unlike copies", None, unlike[1]))
                    return found, errors["gradient"], errors["parameter"]
                norm = _norm(sight, step) or _clipping(sight, step) or _rates(sight, step)
                if norm is not None:
                    return norm, errors["gradient"], errors["parameter"]
    if buffer := unlike_held(sight):
        found = _difference(1, "buffer", buffer[0], range(len(sight.ranks)), Cause("unlike buffers", None, buffer[1]))
        return found, errors["gradient"], errors["parameter"]
    return _steps(sight), errors["gradient"], errors["parameter"]


def sums_rows(sight: Sight) -> bool:
    """Whether a loss grows with the rows, as a sum or one that is divided by a number that the script writes down.

    Each rank has the loss that one process makes of its rows alone, so that no size of a group is in it; that of all
    rows is the sum of these. A loss that ranks scale by their number is none: one process does not.
    """
    alone = sight.alone.loss(1)
    shares = [share.loss(1) for share in sight.shares]
    if alone is None or len(shares) < 2 or any(share is None for share in shares):
        return False
    own = [sight.ranks[rank].loss(1) for group in sight.groups for rank in group]
    expected = [share for group, share in zip(sight.groups, shares, strict=True) for _ in group]
    pairs = [*zip(own, expected, strict=True), (alone, sum(share or 0.0 for share in shares))]
    if any(one is None or abs(one - (other or 0.0)) > _SUMMED * abs(other or 0.0) for one, other in pairs):
        return False
    # gradients that the script divides by a number of all targets afterwards are no such sums
    gradients = sight.alone.of("gradient/1")
    name = max(gradients, key=lambda name: float(gradients[name].double().norm()), default="")
    parts = [share.of("gradient/1").get(name) for share in sight.shares]
    whole = torch.stack([part.double() for part in parts if part is not None]).sum(0) if None not in parts else None
    return whole is None or distance(whole, gradients[name], 0.0) <= _OF_SUMS


def _start(sight: Sight) -> Difference | None:
    """Return what replicas start with that is unlike, None where all start alike."""
    first = sight.ranks[0].of("start")
    for name in sight.ranks[0].record.names:
        unlike = [
            process.record.rank
            for process in sight.ranks
            if name in first and name in process.of("start") and not _is_same(process.of("start")[name], first[name])
        ]
        if unlike and sight.alone.of("start").get(name, first[name]).shape == first[name].shape:
            cause = (
                "these ranks start with other parameters than rank 0: draw them with one seed, or broadcast them once"
            )
            return _difference(0, "start", name, unlike, Cause("unlike start", None, cause))
    return None


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _same_rows(sight: Sight) -> Difference | None:
    """Return that ranks read the same rows where each should read its own, None where that is not known."""
    record = sight.ranks[0].record
    expected = record.num_replicas
    if expected is None and not record.split:
        expected = record.num_ranks // sight.num_parts
    if expected is None or len(sight.groups) >= expected or not sight.groups:
        return None
    # ranks that each take another part of what they read, as of a sequence, do work of their own
    alike = [group for group in sight.groups if len({sight.ranks[rank].record.given for rank in group}) < len(group)]
    if not alike:
        return None
    same = alike[0]
    cause = "these ranks read the same rows: the data is not divided among them, so that they do the same work again"
    return _difference(1, "batch", "", list(same), Cause("same rows", None, cause))


def _compare(sight: Sight, step: int, quantity: Quantity) -> tuple[Difference | None, float]:
    names, partings, worst = _partings(sight, step, quantity)
    if not partings:
        return None, worst
    make = gradient_cause if quantity == "gradient" else update_cause
    causes = [make(sight, parting) for parting in partings]
    chosen = 0
    if quantity == "gradient":
        # on the way back it goes wrong behind the last that is wrong
        is_last = loss_of(sight, step).is_right

        def order(place: int) -> tuple[int, int]:
            plain = _plainness(sight, causes, partings[place], place)
            follows = plain == 0 or len(_TELLING) <= plain < len(_TELLING) + 2
            return plain, -place if is_last and follows else place

        chosen = min(range(len(causes)), key=order)
        causes[chosen] = in_context(sight, names, partings, causes, chosen)
    elif by_rank := scaled_by_rank(causes):
        causes[0] = by_rank
    told = partings[chosen]
    error = max(told.errors)
    difference = _difference(
        step, quantity, told.name, told.ranks, causes[chosen], error=error, tolerance=told.tolerance
    )
    return difference.replace(num_alike=len(partings)), worst


def _partings(sight: Sight, step: int, quantity: Quantity) -> tuple[list[str], list[Parting], float]:
    """Return the names of what is compared in a step, which of them part, and the largest error of the others."""
    kind = f"{quantity}/{step}"
    is_gradient = quantity == "gradient"
    if is_gradient:
        expected, shaken, *found = clipped_alike(sight, step)
        found = by_holders(sight, step, found)
    else:
        expected, shaken, *found = [process.of(kind) for process in (sight.alone, sight.shaken, *sight.ranks)]
    names = [name for name in sight.alone.record.names if name in expected and is_comparable(sight, name)]
    if not names:
        return names, [], 0.0
    sizes, floor = sizes_of({name: expected[name] for name in names})
    dust = _CANCELLED * floor / SMALLEST if is_gradient else 0.0
    left_out = set() if is_gradient else _cancelled(sight, step) | changing(sight, step)
    noises = {name: distance(shaken[name], expected[name], floor) for name in names if name in shaken}
    for name, value in sight.again.of(kind).items() if sight.again is not None else ():
        noises[name] = max(noises.get(name, 0.0), distance(value, expected[name], floor) if name in expected else 0.0)
    usual = statistics.median(noises.values()) if noises else 0.0
    worst = 0.0
    partings = []
    for name in names:
        values = [_fitted(one.get(name), expected[name]) for one in found]
        tolerance = max(_ROUNDING, NOISE_FACTOR * max(noises.get(name, 0.0), usual))
        errors = [_error(value, expected[name], floor) for value in values]
        if name in left_out:
            continue
        if max(errors) <= tolerance:
            worst = max(worst, *errors)
        elif max(errors) > dust / max(sizes[name], floor, 1e-30):
            partings.append(Parting(step, name, values, expected[name], errors, tolerance, floor))
    if is_gradient and any(is_reduced_inside(sight, parting) for parting in partings):
        partings = [parting for parting in partings if len(parting.kinds()) == 1]
    return names, partings, worst


def _cancelled(sight: Sight, step: int) -> set[str]:
    """Return parameters of whose gradient only rounding is left in some step: Adam moves them by it as by any other."""
    found = set()
    for earlier in range(1, step + 1):
        sizes: dict[str, list[float]] = {}
        for process in (sight.alone, *sight.ranks):
            for name, value in process.of(f"gradient/{earlier}").items():
                sizes.setdefault(name, []).append(float(value.double().square().mean()) ** 0.5)
        usual = statistics.median(size for size, *_ in sizes.values()) if sizes else 0.0
        found |= {name for name, each in sizes.items() if 0 < max(each) <= _CANCELLED * usual}
    return found


def _fitted(value: torch.Tensor | None, whole: torch.Tensor) -> torch.Tensor | None:
    return value if value is None or value.shape == whole.shape else None


def _error(value: torch.Tensor | None, expected: torch.Tensor, floor: float) -> float:
    if value is None:
        return 1.0 if float(expected.abs().max()) > floor else 0.0
    if not bool(value.isfinite().all()):
        return 0.0 if not bool(expected.isfinite().all()) else float("inf")
    return distance(value, expected, floor)


def _plainness(sight: Sight, causes: Sequence[Cause], parting: Parting, place: int) -> int:
    """Return how little the cause of a parameter tells: that which tells most is told."""
    kind, factor, _ = causes[place]
    if is_vague(causes[place]):
        return len(_TELLING) + (kind != "not reduced")
    if kind == "scaled" and (parting.expected.numel() < 3 or factor is None or not is_of_known_size(sight, factor)):
        # one number is always a multiple of another
        return len(_TELLING) + 2
    return _TELLING.index(kind)


def _norm(sight: Sight, step: int) -> Difference | None:
    expected = sight.alone.record.steps[step - 1].norm
    found = [process.record.steps[step - 1].norm for process in sight.ranks]
    shaken = sight.shaken.record.steps[step - 1].norm
    if expected is None or shaken is None or any(norm is None for norm in found) or expected == 0:
        return None
    tolerance = max(1e-4, NOISE_FACTOR * abs(shaken / expected - 1))
    errors = [abs(float(norm or 0.0) / expected - 1) for norm in found]
    ranks = [rank for rank, error in enumerate(errors) if error > tolerance]
    if not ranks:
        return None
    norm = float(found[ranks[0]] or 0.0)
    factor = norm / expected
    text = f"clipping is told a norm of {norm:.6g} where gradients, which are right, have {expected:.6g}: "
    squared = size_of(sight, factor**2)
    if squared:
        text += f"{factor:.4g} times too large, the root of {squared}: what ranks hold alike is summed over them"
    elif max(errors) - min(errors) > tolerance:
        text += "each rank has a norm of its own, that of its part: the parts are not summed over ranks"
    elif factor > 1:
        text += "what ranks hold alike is counted more than once"
    else:
        text += "parts that other ranks hold are not counted"
    return _difference(
        step, "gradient norm", "", ranks, Cause("norm", factor, text), error=max(errors), tolerance=tolerance
    )


def _clipping(sight: Sight, step: int) -> Difference | None:
    """Return that clipping, which is told the right norm, changes gradients otherwise than in one process."""
    steps = [process.record.steps[step - 1] for process in (sight.alone, *sight.ranks)]
    alone, *found = [one.clipped_to for one in steps]
    if not alone or any(one is None for one in found):
        return None
    ratios = [(one or 0.0) / alone for one in found]
    ranks = [rank for rank, ratio in enumerate(ratios) if abs(ratio - 1) > _CLIPPED]
    if not ranks:
        return None
    ratio = ratios[ranks[0]]
    text = f"clipping is told the right norm, and multiplies gradients by {found[ranks[0]]:.4g} where one process does "
    text += f"by {alone:.4g}: it is given other tensors than those that are stepped by, or another limit"
    return _difference(step, "gradient", "", ranks, Cause("clipping", ratio, text), error=abs(ratio - 1))


def _rates(sight: Sight, step: int) -> Difference | None:
    """Return by which number of the optimizer a parameter is stepped otherwise than on rank 0, or in one process."""
    steps = [process.record.steps[step - 1] for process in sight.ranks]
    alone = sight.alone.record.steps[step - 1]
    for name in sight.ranks[0].record.names:
        by_rank = [one.rates_of(name) for one in steps]
        held = [rank for rank, rates in enumerate(by_rank) if rates is not None]
        if not held:
            continue
        first = by_rank[held[0]] or {}
        for rank in held[1:]:
            found = _unlike(first, by_rank[rank] or {})
            if found:
                text = f"its {found} is {(by_rank[rank] or {})[found]:g} here and {first[found]:g} on rank {held[0]}: "
                text += "replicas drift apart"
                return _difference(step, "rate", name, [rank], Cause("rates", None, text))
        own = alone.rates_of(name) or {}
        # schedules count batches, of which one process has others
        scheduled = {"lr", *_scheduled(sight.ranks[held[0]].record, name, first)}
        found = _unlike({key: value for key, value in own.items() if key not in scheduled}, first)
        if found:
            text = f"its {found} is {first[found]:g} on ranks and {own[found]:g} in one process: the script chooses "
            text += "groups of parameters by something that ranks change, as the shape of a shard"
            return _difference(step, "rate", name, held, Cause("rates", None, text))
    return None


def _scheduled(record: ProcessRecord, name: str, rates: dict[str, float]) -> list[str]:
    """Return which of an optimizer's numbers are others than in the first step of a parameter."""
    by_step = (step.rates_of(name) for step in record.steps)
    first: dict[str, float] = next((found for found in by_step if found is not None), {})
    return [key for key, value in rates.items() if first.get(key, value) != value]


def _unlike(one: dict[str, float], other: dict[str, float]) -> str:
    return next((key for key, value in one.items() if other.get(key, value) != value), "")


def _skipped(sight: Sight, step: int) -> Difference | None:
    """Return that ranks have made unlike numbers of passes for a step, which explains gradients that part."""
    steps = [process.record.steps[step - 1] for process in sight.ranks]
    again = [rank for rank, one in enumerate(steps) if not one.losses]
    if again and sight.alone.record.steps[step - 1].losses:
        text = (
            f"{ranks_of(again)} step again by the gradients of step {step - 1}: no backward pass lies between the two"
        )
        return _difference(step, "steps", "", again, Cause("unlike steps", None, text))
    counts = [len(one.losses) * (1 + one.num_skipped) for one in steps]
    more = [rank for rank, count in enumerate(counts) if count > min(counts)]
    if not more:
        return None
    text = f"{ranks_of(more)} went through {max(counts)} batches before this step, and others through {min(counts)}: "
    return _difference(step, "steps", "", more, Cause("unlike steps", None, text + _SKIPPING))


def _steps(sight: Sight) -> Difference | None:
    """Return that ranks step unlike numbers of times."""
    counts = [len(process.record.steps) for process in sight.ranks]
    fewer = [rank for rank, count in enumerate(counts) if count < max(counts)]
    if not fewer:
        return None
    text = f"{ranks_of(fewer)} made {min(counts)} where others made {max(counts)}: "
    return _difference(min(counts) + 1, "steps", "", fewer, Cause("unlike steps", None, text + _SKIPPING))


def _difference(
    step: int,
    quantity: Quantity,
    name: str,
    ranks: Sequence[int],
    cause: Cause,
    *,
    error: float = 1.0,
    tolerance: float = 0.0,
) -> Difference:
    return Difference(
        step=step,
        quantity=quantity,
        name=name,
        ranks=tuple(ranks),
        error=error,
        tolerance=tolerance,
        kind=cause.kind,
        factor=cause.factor,
        cause=cause.text,
    )
