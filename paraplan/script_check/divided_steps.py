"""Optimizers that ranks divide by their own code: who steps what, and what is reduced inside of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paraplan.script_check.causes import Parting, factor_of
from paraplan.script_check.evidence import Sight
from paraplan.script_check.whole import is_unnamed

_UNLIKE = 0.05
"""Relative difference of ranks' gradients from the right one above which the same step cannot follow from both."""
_SAME_STEP = 1e-3

Values = dict[str, torch.Tensor]


def clipped_alike(sight: Sight, step: int) -> list[Values]:
    """Return gradients of one process, of the shaken one and of ranks, all before clipping, or all after it.

    Where the script clips by its own code on ranks or in one process alone, they are noted after it there.
    """
    processes = (sight.alone, sight.shaken, *sight.ranks)
    scales = [process.record.steps[step - 1].clipped_to for process in processes]
    values = [process.of(f"gradient/{step}") for process in processes]
    if None not in scales or not any(scales):
        return values
    return [
        {name: value * (scale or 1.0) for name, value in of.items()} for of, scale in zip(values, scales, strict=True)
    ]


def by_holders(sight: Sight, step: int, found: Sequence[Values]) -> list[Values]:
    """Return gradients of ranks, for each parameter those that its optimizers have: others may hold anything.

    A rank whose optimizer does not hold a parameter, which another's does, gets its value after the step.
    """
    made = [dict(values) for values in found]
    held = [{name for group in process.record.steps[step - 1].members for name in group} for process in sight.ranks]
    for name in set().union(*held):
        holders = [rank for rank, names in enumerate(held) if name in names and name in found[rank]]
        for rank in range(len(made)) if holders else ():
            if name not in held[rank]:
                made[rank][name] = found[holders[0]][name]
    return made


def is_comparable(sight: Sight, name: str) -> bool:
    """Whether all ranks have the whole of a tensor, and not parts that an optimizer alone holds, as flat vectors."""
    if not is_unnamed(name):
        return True
    held = [
        {value.shape for key, value in process.tensors.items() if key.split("/", 2)[2:] == [name]}
        for process in (*sight.ranks, sight.alone)
    ]
    return all(shapes == held[0] for shapes in held)


def is_reduced_inside(sight: Sight, parting: Parting) -> bool:
    """Whether ranks' gradients are their own before the step, and all make the same right step of them.

    So does an optimizer that exchanges gradients itself, or one that steps by the gradient of the rank which has it.
    """
    after = sight.alone.tensors.get(f"parameter/{parting.step}/{parting.name}")
    before = sight.alone.before(parting.step, parting.name)
    is_plain = all(error <= parting.tolerance or error > _UNLIKE for error in parting.errors)
    if len(parting.kinds()) == 1 or not is_plain or after is None or before is None:
        return False
    first = parting.values[0]
    if first is None or any(one is None or factor_of(one, first, parting.tolerance) for one in parting.values[1:]):
        return False  # optimizers as Adam make one step of all multiples
    way = float(torch.dist(after.double(), before.double()))
    values = [process.tensors.get(f"parameter/{parting.step}/{parting.name}") for process in sight.ranks]
    return way > 0 and all(
        value is not None
        and value.shape == after.shape
        and float(torch.dist(value.double(), after.double())) <= _SAME_STEP * way
        for value in values
    )
