"""What the records of ranks and of one process say together: where they part, by how much, and what that means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from paraplan.script_check.records import Difference, Kind, ProcessRecord, Quantity

_ROUNDING = 3e-5
"""Relative difference that sums of another order make of fp32, beyond what shaken weights show."""

_NOISE_FACTOR = 16.0
_SMALLEST = 1e-3
_SAME_DIRECTION = 0.02

Cause = tuple[Kind, float | None, str]
"""What a difference is, the ratio to one process's value where the direction is the same, and words."""


@dataclass(frozen=True)
class Process:
    """One process's record with its tensors."""

    record: ProcessRecord
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, folder: Path, rank: int) -> Process | None:
        """Return what the process of `rank` wrote into `folder`, None where it wrote nothing."""
        path = folder / f"{rank}.json"
        if not path.exists():
            return None
        record = ProcessRecord.model_validate_json(path.read_text(encoding="utf-8"))
        return cls(record, load_file(path.with_suffix(".safetensors")))

    def of(self, kind: str) -> dict[str, torch.Tensor]:
        """Return tensors by parameter: of `start`, or `gradient/2`, say."""
        return {key[len(kind) + 1 :]: value for key, value in self.tensors.items() if key.startswith(f"{kind}/")}

    def reading(self, place: str, time: int) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that were read at `place` the `time`-th time, with the names of their keys."""
        source = next(one for one in self.record.sources if one.place == place)
        prefix = f"source/{source.number}/{time}/"
        leaves = sorted((int(key[len(prefix) :].split("/")[0]), key) for key in self.tensors if key.startswith(prefix))
        return [(key[len(prefix) :].split("/", 1)[1], self.tensors[key]) for _, key in leaves]


@dataclass(frozen=True)
class Sight:
    """All that is known: the ranks, one process, the same shaken, and what each rank alone would make."""

    ranks: Sequence[Process]
    alone: Process
    shaken: Process
    shares: Sequence[Process] = ()
    groups: Sequence[Sequence[int]] = ()
    """Ranks that read the same, by group."""
    num_micro_batches: int = 1
    num_parts: int = 1
    """Number of ranks that hold one whole of parameters of whose parts torch does not know."""


def distance(one: torch.Tensor, other: torch.Tensor, floor: float) -> float:
    """Return the size of a difference relative to that of `other`, which counts as `floor` where it is smaller."""
    size = max(float(other.double().norm()), floor * math.sqrt(other.numel()), 1e-30)
    return float(torch.dist(one.double(), other.double())) / size


def first_difference(sight: Sight) -> tuple[Difference | None, float, float]:
    """Return the first thing that parts, or None, with the largest relative errors of gradients and parameters."""
    starting = _start(sight) or _same_rows(sight)
    if starting is not None:
        return starting, 0.0, 0.0
    errors: dict[Quantity, float] = {"gradient": 0.0, "parameter": 0.0}
    num_steps = min(len(process.record.steps) for process in (*sight.ranks, sight.alone, sight.shaken))
    for step in range(1, num_steps + 1):
        for quantity in ("gradient", "parameter"):
            found, error = _compare(sight, step, quantity)
            if found is not None:
                return found, errors["gradient"], errors["parameter"]
            errors[quantity] = max(errors[quantity], error)
            if quantity == "gradient":
                norm = _norm(sight, step) or _rates(sight, step)
                if norm is not None:
                    return norm, errors["gradient"], errors["parameter"]
    return None, errors["gradient"], errors["parameter"]


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
            return _difference(0, "start", name, unlike, ("unlike start", None, cause))
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
    same = next(group for group in sight.groups if len(group) > 1)
    cause = "these ranks read the same rows: the data is not divided among them, so that they do the same work again"
    return _difference(1, "batch", "", list(same), ("same rows", None, cause))


def _compare(sight: Sight, step: int, quantity: Quantity) -> tuple[Difference | None, float]:
    kind = f"{quantity}/{step}"
    expected, shaken = sight.alone.of(kind), sight.shaken.of(kind)
    found = [process.of(kind) for process in sight.ranks]
    names = [name for name in sight.alone.record.names if name in expected]
    if not names:
        return None, 0.0
    floor = _SMALLEST * statistics.median(float(expected[name].double().square().mean()) ** 0.5 for name in names)
    noises = {name: distance(shaken[name], expected[name], floor) for name in names if name in shaken}
    usual = statistics.median(noises.values()) if noises else 0.0
    worst, unlike, first = 0.0, 0, None
    for name in names:
        values = [_fitted(one.get(name), expected[name]) for one in found]
        tolerance = max(_ROUNDING, _NOISE_FACTOR * max(noises.get(name, 0.0), usual))
        errors = [
            1.0
            if value is None and float(expected[name].abs().max()) > floor
            else 0.0
            if value is None
            else _error(value, expected[name], floor)
            for value in values
        ]
        error = max(errors)
        if error <= tolerance:
            worst = max(worst, error)
            continue
        unlike += 1
        if first is None:
            ranks = [rank for rank, one in enumerate(errors) if one > tolerance]
            cause = _cause(sight, kind, name, values, expected[name], tolerance, floor)
            first = _difference(step, quantity, name, ranks, cause, error=error, tolerance=tolerance)
    return (None if first is None else first.replace(num_alike=unlike)), worst


def _fitted(value: torch.Tensor | None, whole: torch.Tensor) -> torch.Tensor | None:
    return value if value is None or value.shape == whole.shape else None


def _error(value: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    if not bool(value.isfinite().all()):
        return 0.0 if not bool(expected.isfinite().all()) else float("inf")
    return distance(value, expected, floor)


def _cause(
    sight: Sight,
    kind: str,
    name: str,
    values: Sequence[torch.Tensor | None],
    expected: torch.Tensor,
    tolerance: float,
    floor: float,
) -> Cause:
    """Return the ratio to one process's value, where there is one, and what is seen."""
    if kind.startswith("parameter"):
        return (
            "update",
            None,
            (
                "its gradient is right and its value after the step is not: look at the optimizer, its state on ranks, "
                "and at what changes parameters beside it"
            ),
        )
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        ranks = [rank for rank, value in enumerate(values) if value is None]
        which = f"none on rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}" if there else "none on any rank"
        return "no gradient", None, f"it gets a gradient in one process and {which}: it takes no part in the loss there"
    if any(not bool(value.isfinite().all()) for value in there):
        return "not finite", None, "it is NaN or infinite on ranks and finite in one process"
    if all(float(value.double().norm()) <= tolerance * max(float(expected.double().norm()), floor) for value in there):
        return "zero", 0.0, "it is zero on all ranks"
    spread = max(distance(value, there[0], floor) for value in there)
    if spread > tolerance:
        return _cause_of_spread(there, expected, tolerance, floor)
    factor = _factor(there[0], expected, tolerance)
    if factor is not None:
        return "scaled", factor, _meaning(factor, sight)
    return _cause_of_direction(sight, kind, name, there[0], expected, tolerance, floor)


def _cause_of_spread(values: Sequence[torch.Tensor], expected: torch.Tensor, tolerance: float, floor: float) -> Cause:
    """Return what ranks that disagree have: shares that were never reduced, or reduced among some."""
    kinds: list[list[int]] = []
    for rank, value in enumerate(values):
        alike = next((group for group in kinds if distance(value, values[group[0]], floor) <= tolerance), None)
        if alike is None:
            kinds.append([rank])
        else:
            alike.append(rank)
    mean = torch.stack([values[group[0]].double() for group in kinds]).mean(dim=0)
    factor = _factor(mean, expected, tolerance)
    among = "each rank has its own" if len(kinds) == len(values) else f"ranks {' | '.join(map(_listed, kinds))} differ"
    if factor is None:
        return (
            "not reduced",
            None,
            f"{among}, and their mean is not the gradient of all batches: it is not reduced over all ranks",
        )
    times = "" if abs(factor - 1) < _SAME_DIRECTION else f" times {factor:.4g}"
    return (
        "not reduced",
        None,
        f"{among}, and their mean is the gradient of all batches{times}: it is never reduced over these ranks",
    )


def _factor(value: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float | None:
    """Return by which number `value` is a multiple of `expected`; None where it has another direction."""
    size = float((expected.double() ** 2).sum())
    if size == 0:
        return None
    factor = float((value.double() * expected.double()).sum()) / size
    rest = float((value.double() - factor * expected.double()).norm()) / max(float(value.double().norm()), 1e-30)
    return factor if rest <= max(_SAME_DIRECTION, tolerance) else None


def _meaning(factor: float, sight: Sight) -> str:
    """Return what a gradient that is too large, or too small, by `factor` usually means."""
    record = sight.ranks[0].record
    sizes = {"the number of ranks": record.num_ranks}
    if len(sight.groups) > 1:
        sizes["the number of ranks that read unlike batches"] = len(sight.groups)
    sizes |= {f"the size of the axis {name}": size for name, size in record.axes.items()}
    if sight.num_micro_batches > 1:
        sizes["the number of micro-batches"] = sight.num_micro_batches
    for what, size in sizes.items():
        if size > 1 and abs(factor / size - 1) < _SAME_DIRECTION:
            return (
                f"it is {factor:.4g} times too large, {what}: it is summed where it should be averaged, or added twice"
            )
        if size > 1 and abs(factor * size - 1) < _SAME_DIRECTION:
            return f"it is {factor:.4g} of what it should be, one by {what}: it is divided once too often"
        if size > 1 and abs(factor / size**2 - 1) < _SAME_DIRECTION:
            return f"it is {factor:.4g} times too large, the square of {what}"
    return f"it has the right direction and {factor:.4g} times its size: the loss, or the gradient, is scaled otherwise"


def _cause_of_direction(
    sight: Sight, kind: str, name: str, value: torch.Tensor, expected: torch.Tensor, tolerance: float, floor: float
) -> Cause:
    shares = [share.of(kind)[name] for share in sight.shares if name in share.of(kind)]
    for group, share in zip(sight.groups, shares, strict=False):
        if _factor(value, share, tolerance) is not None:
            cause = f"all ranks have the gradient of rank {group[0]}'s batch alone: the others' is lost"
            return "one rank's share", None, cause
    if len(shares) > 1:
        mean = torch.stack([share.double() for share in shares]).mean(dim=0)
        if distance(value, mean, floor) <= max(tolerance, _SAME_DIRECTION / 10):
            return (
                "mean of shares",
                None,
                (
                    "it is the mean of what each rank's batch alone gives, which is not the gradient of all batches: "
                    "ranks count unlike numbers of targets, or the loss compares samples of a batch"
                ),
            )
    cosine = float(
        (value.double() * expected.double()).sum() / (value.double().norm() * expected.double().norm() + 1e-30)
    )
    ratio = float(value.double().norm() / (expected.double().norm() + 1e-30))
    cause = (
        f"it has another direction (cosine {cosine:.3f}) and {ratio:.3g} times the size: some of it is lost, or wrong"
    )
    return "another direction", None, cause


def _norm(sight: Sight, step: int) -> Difference | None:
    expected = sight.alone.record.steps[step - 1].norm
    found = [process.record.steps[step - 1].norm for process in sight.ranks]
    shaken = sight.shaken.record.steps[step - 1].norm
    if expected is None or shaken is None or any(norm is None for norm in found) or expected == 0:
        return None
    tolerance = max(1e-4, _NOISE_FACTOR * abs(shaken / expected - 1))
    errors = [abs(float(norm or 0.0) / expected - 1) for norm in found]
    ranks = [rank for rank, error in enumerate(errors) if error > tolerance]
    if not ranks:
        return None
    factor = float(found[ranks[0]] or 0.0) / expected
    cause = f"clipping is told a norm of {found[ranks[0]]:.6g} where gradients, which are right, have {expected:.6g}: "
    cause += "parts of ranks are not summed, or what ranks hold alike is summed over them"
    return _difference(
        step, "gradient norm", "", ranks, ("norm", factor, cause), error=max(errors), tolerance=tolerance
    )


def _rates(sight: Sight, step: int) -> Difference | None:
    first = sight.ranks[0].record.steps[step - 1].rates
    for process in sight.ranks[1:]:
        for one, other in zip(first, process.record.steps[step - 1].rates, strict=False):
            for name, value in one.items():
                if other.get(name, value) != value:
                    cause = (
                        f"the optimizer's {name} is {other[name]:g} here and {value:g} on rank 0: replicas drift apart"
                    )
                    return _difference(step, "rate", name, [process.record.rank], ("rates", None, cause))
    return None


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
    kind, factor, text = cause
    return Difference(
        step=step,
        quantity=quantity,
        name=name,
        ranks=tuple(ranks),
        error=error,
        tolerance=tolerance,
        kind=kind,
        factor=factor,
        cause=text,
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
