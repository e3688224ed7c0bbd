"""Which gradients a wrong one is made of: of ranks' batches, of micro-batches, of other parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from paraplan.script_check.evidence import Sight, distance

STATISTICS = (
    "a batch is more than its rows: the loss compares samples of a batch, or ranks use statistics of their own rows in "
    "place of those of all"
)
_FIT = 2e-3
"""Relative rest that a mixture of gradients may leave; what is no mixture leaves some percent."""
_NUMBERS_A_PART = 4
"""A tensor with fewer numbers for each part is a mixture of any."""
_MOST_GROUPS = 6


def weights_of(whole: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]]) -> list[float] | None:
    """Return how often each of `parts` is in `whole`, None where whole is no sum of them.

    Whole and parts are gradients of the same parameters: a batch's is so made of those of its rows.
    """
    if len(parts) < 2 or not whole:
        return None
    target = torch.cat([one.double().flatten() for one in whole])
    columns = torch.stack([torch.cat([one.double().flatten() for one in part]) for part in parts], dim=1)
    if len(target) < _NUMBERS_A_PART * len(parts) or float(target.norm()) == 0:
        return None
    if not bool(columns.isfinite().all() and target.isfinite().all()):
        return None
    found = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    rest = float((columns @ found - target).norm() / target.norm())
    return [float(one) for one in found] if rest <= _FIT else None


def meaning_of_shares(sight: Sight, step: int, name: str) -> str:
    """Return why the mean of what ranks' batches give is not the gradient of all: how one process weighs them."""
    whole = sight.alone.of(f"gradient/{step}")
    shares = _shares(sight, step)
    names = [one for one in whole if all(one in share for share in shares)]
    weights = weights_of([whole[one] for one in names], [[share[one] for one in names] for share in shares])
    if weights is None and name in names:
        weights = weights_of([whole[name]], [[share[name]] for share in shares])
    if step > 1 or (weights is None and whole[name].numel() < _NUMBERS_A_PART * len(shares)):
        return "ranks count unlike numbers of targets, or the loss compares samples of a batch"
    if weights is None:
        return STATISTICS
    text = f"these count {_listed(weights, len(weights))} times in one process, and once each here: "
    if abs(sum(weights) - 1) <= 5 * _FIT:
        return text + "ranks count unlike numbers of targets, and each divides by its own"
    return (
        text + "each rank scales its own before they are averaged, as where it clips by the norm of its own gradients"
    )


def made_of(sight: Sight, step: int, name: str, value: torch.Tensor) -> str:
    """Return which micro-batches, ranks' batches or other parameters' gradients one is made of, "" for none seen."""
    for made in (_of_micro_batches, _of_batches, _of_others, _in_another_order):
        if found := made(sight, step, name, value):
            return found
    return ""


def _of_micro_batches(sight: Sight, step: int, name: str, value: torch.Tensor) -> str:
    parts = of_micro_batches(sight, name) if step == 1 else []
    weights = weights_of([value], [[part] for part in parts])
    if weights is None:
        return ""
    lost = [number for number, weight in enumerate(weights, 1) if abs(weight) < 10 * _FIT]
    if lost:
        which = f"{'micro-batches' if len(lost) > 1 else 'micro-batch'} {', '.join(map(str, lost))} of {len(weights)}"
        verb = "are" if len(lost) > 1 else "is"
        return f"{which} {verb} lost: what was accumulated is overwritten, or cleared before the step"
    return f"micro-batches count {_listed(weights, 1)} times in it, and once each in one process"


def of_micro_batches(sight: Sight, name: str) -> list[torch.Tensor]:
    """Return the gradients of a parameter by micro-batch of the first step, as means over ranks; [] for unknown.

    They are those of what each rank's batch alone gives where that is known: one process, which has all rows, may cut
    them otherwise.
    """
    processes = [sight.passes] if sight.passes is not None else sight.shares
    by_process = [_counted(process.tensors, "pass/1", name) for process in processes]
    if not by_process or not sight.num_micro_batches or {len(sums) for sums in by_process} != {sight.num_micro_batches}:
        return []
    sums = [torch.stack([one.double() for one in of]).mean(0) for of in zip(*by_process, strict=True)]
    return [sums[0], *(one - before for before, one in itertools.pairwise(sums))]


def _of_batches(sight: Sight, step: int, name: str, value: torch.Tensor) -> str:
    shares = [share[name] for share in _shares(sight, step) if name in share]
    if step > 1 or len(shares) != len(sight.groups):
        return ""
    expected = sight.alone.of(f"gradient/{step}")[name]
    should = weights_of([expected], [[share] for share in shares])
    weights = weights_of([value], [[share] for share in shares])
    if weights is None or should is None:
        return ""
    return (
        f"the batches of ranks {', '.join(str(group[0]) for group in sight.groups)} count "
        f"{_listed(weights, len(weights))} times in it, and {_listed(should, len(should))} times in one process: ranks "
        "weigh their own otherwise than by their share of all"
    )


def _of_others(sight: Sight, step: int, name: str, value: torch.Tensor) -> str:
    """Return which other parameter's gradient is in `value`, whole or of some ranks' batches."""
    expected = sight.alone.of(f"gradient/{step}")
    shares = _shares(sight, step) if step == 1 else []
    for other, gradient in expected.items():
        if other == name or gradient.shape != value.shape:
            continue
        if _is_near(value, gradient):
            return f"it is the gradient of {other}, of the same shape: gradients are put back in another order"
        pairs = [(share[name], share[other]) for share in shares if name in share and other in share]
        if not 2 <= len(pairs) <= _MOST_GROUPS or len(pairs) != len(sight.groups):
            continue
        for chosen in itertools.product((0, 1), repeat=len(pairs)):
            mixed = torch.stack([pair[one].double() for pair, one in zip(pairs, chosen, strict=True)]).mean(dim=0)
            if any(chosen) and _is_near(value, mixed):
                return (
                    f"the gradient of {other}, of the same shape, is mixed into it: ranks exchange gradients in unlike "
                    "orders"
                )
    if value.ndim == 2 and value.shape[0] == value.shape[1] and _is_near(value, expected[name].T):
        return "it is the gradient transposed"
    return ""


def _in_another_order(sight: Sight, step: int, name: str, value: torch.Tensor) -> str:
    return order_of_parts(value, sight.alone.of(f"gradient/{step}")[name], len(sight.ranks))


def order_of_parts(value: torch.Tensor, expected: torch.Tensor, count: int) -> str:
    """Return in which order `value` has the `count` parts of another tensor, "" where it is not made of them."""
    for dim, size in enumerate(value.shape):
        if value.shape != expected.shape or size % count:
            continue
        parts = expected.chunk(count, dim)
        found = [
            next((number for number, other in enumerate(parts) if _is_near(one, other)), None)
            for one in value.chunk(count, dim)
        ]
        if None not in found and found != list(range(count)):
            order = ", ".join(map(str, found))
            return (
                f"it has the parts {order} of its {count} one after another: shards are put together in another order"
            )
    return ""


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() > _NUMBERS_A_PART and distance(one, other, 0.0) <= _FIT


def _shares(sight: Sight, step: int) -> list[dict[str, torch.Tensor]]:
    return [share.of(f"gradient/{step}") for share in sight.shares]


def _counted(tensors: dict[str, torch.Tensor], prefix: str, name: str) -> list[torch.Tensor]:
    """Return the tensors of `name` by the number that follows `prefix`."""
    found: list[torch.Tensor] = []
    while (value := tensors.get(f"{prefix}/{len(found) + 1}/{name}")) is not None:
        found.append(value)
    return found


def _listed(weights: Sequence[float], scale: int) -> str:
    return ", ".join(f"{weight * scale:.3g}" for weight in weights)
