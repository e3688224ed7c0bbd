"""Where in a model a gradient goes wrong: told by the loss, by what modules give, and by which parameters part."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.script_check.buffers import wrong_buffer
from paraplan.script_check.causes import Cause, Parting, is_of_known_size
from paraplan.script_check.evidence import NOISE_FACTOR, Sight, listed, ranks_of
from paraplan.script_check.mixtures import STATISTICS
from paraplan.script_check.wrong_outputs import are_gradients_right, first_wrong, first_wrong_gradient

_TOLERANCE = 1e-3
_LOSS_TOLERANCE = 1e-4
_TENSOR_AXES = ("tp", "tensor")
"""Parts of names of axes whose ranks compute one model's layers together."""


@dataclass(frozen=True)
class Loss:
    """The loss of a step: the mean over ranks, times the number of ranks that fits best, and that of one process."""

    ranks: float
    alone: float

    noise: float = 0.0
    """The part of the loss by which rounding changes it."""

    @property
    def is_right(self) -> bool:
        """Whether the two are the same."""
        return abs(self.ranks - self.alone) <= max(_LOSS_TOLERANCE, NOISE_FACTOR * self.noise) * abs(self.alone)


def loss_of(sight: Sight, step: int) -> Loss:
    """Return the loss of a step, that of one process twice where ranks have none."""
    alone = sight.alone.loss(step)
    losses = [process.loss(step) for process in sight.ranks]
    if alone is None or any(loss is None for loss in losses):
        return Loss(alone or 0.0, alone or 0.0)
    mean = statistics.fmean(loss or 0.0 for loss in losses)
    sizes = [float(size) for size in (1, *sight.sizes.values())]
    scale = min((*sizes, *(1 / size for size in sizes)), key=lambda size: abs(mean / size - alone))
    shaken = sight.shaken.loss(step)
    return Loss(mean / scale, alone, abs(shaken / alone - 1) if shaken is not None and alone else 0.0)


def is_vague(cause: Cause) -> bool:
    """Whether a cause says no more than that a gradient is wrong: it may follow from that of another parameter."""
    return cause.kind == "another direction" or (cause.kind == "not reduced" and is_unexplained(cause.text))


def is_unexplained(text: str) -> bool:
    """Whether a text says of ranks' values that they are no shares of the right one."""
    return "neither their sum nor their mean" in text


def in_context(
    sight: Sight, names: Sequence[str], partings: Sequence[Parting], causes: Sequence[Cause], chosen: int
) -> Cause:
    """Return the cause that is told with what the other parameters, and the loss, say of it."""
    cause = causes[chosen]
    if cause.kind == "scaled" and cause.factor is not None and len(partings) == len(names) > 1:
        factors = [one.factor for one in causes]
        is_one = all(factor is not None and abs(factor / cause.factor - 1) < _TOLERANCE for factor in factors)
        if is_one and not is_of_known_size(sight, cause.factor):
            return Cause(
                "scaled",
                cause.factor,
                f"all gradients are {cause.factor:.4g} times those of one process: the script clips by a norm that is "
                f"{1 / cause.factor:.4g} times the right one, which is not summed over all ranks or counts what they "
                "hold alike more than once, or scales its loss",
            )
    if not is_vague(cause) and not (cause.kind == "mean of shares" and STATISTICS in cause.text):
        return cause
    buffer = wrong_buffer(sight, partings[0].step)
    if buffer:
        return Cause("unlike buffers", None, buffer)
    if not is_vague(cause):
        return cause
    if not loss_of(sight, partings[0].step).is_right:
        if rows := _unlike_rows(sight):
            return Cause("unlike rows", None, rows)
        is_last_right = all(parting.name != names[-1] for parting in partings)
        return _forward(sight, partings[0].step, is_last_right=is_last_right)
    if unlike := _unlike_losses(sight, partings[0].step):
        return cause._replace(text=f"{cause.text}; {unlike}")
    back = first_wrong_gradient(sight) if partings[0].step == 1 else None
    if back is not None:
        text = f"{cause.text}; the loss is right, and {back.text}" + (f": {back.how}" if back.how else "")
        return cause._replace(text=text)
    if sight.alone.loss(partings[0].step) is None:
        return cause
    text = f"{cause.text}; {_way_back(names, partings)}"
    if partings[0].step == 1 and are_gradients_right(sight):
        text += (
            "; what goes back between modules is right, so it is made wrong where the gradient of the weight itself is "
            "made, of inputs or gradients that are gathered in another order, or in part, or where that is reduced"
        )
    return cause._replace(text=text)


def _unlike_rows(sight: Sight) -> str:
    """Return that ranks which hold the parts of one model read unlike rows, and exchange none; "" where not so."""
    record = sight.ranks[0].record
    parts = math.prod(size for name, size in record.axes.items() if any(word in name.lower() for word in _TENSOR_AXES))
    if parts == 1 or record.gathers_rows or len(sight.groups) <= record.num_ranks // parts:
        return ""
    return (
        f"{parts} ranks hold the parts of one model, and {' | '.join(listed(group) for group in sight.groups)} read "
        "unlike rows: ranks that share a model need the same, so choose rows by the place among its copies, and not by "
        "the rank"
    )


def _forward(sight: Sight, step: int, *, is_last_right: bool) -> Cause:
    """Return what is seen of a step whose loss is another than that of one process.

    Where the gradient of the last parameter is right, what is wrong does not come through the outputs.
    """
    loss = loss_of(sight, step)
    text = f"the loss is {loss.ranks:.6g}, and {loss.alone:.6g} in one process: "
    outputs = _outputs(sight) if step == 1 else {}
    module = next((name for name, is_right in outputs.items() if is_right is False), None)
    first = first_wrong(sight) if step == 1 else None
    if first is not None and first.how:
        return Cause("another output", None, f"{text}{first.text}: {first.how}")
    if first is not None or module is not None:
        text += first.text if first is not None else f"the first output that is another is that of {module}"
        text += (
            ". Its heads, groups or parts are cut or ordered otherwise, its positions or masks are those of another "
            "part, what it carries from token to token starts anew on each rank, or each rank adds to it what is to be "
            "added once"
        )
    elif outputs and list(outputs.values())[-1]:
        if is_last_right:
            text += (
                "what the modules give is right, and so are gradients of the last ones, so it is a term of the loss "
                "that comes from inside of the model, as one that balances experts: ranks scale or count it otherwise"
            )
            return Cause("another loss", None, text)
        text += (
            "what the modules give is right, so it is what ranks make of it. Each divides by the number of its own "
            "targets, or counts some twice, or not at all; or a mean or weight of each rank's own is in the place of "
            "one of all"
        )
        return Cause("another loss", None, text)
    else:
        text += (
            "the forward pass computes something else, as with heads or parts in another order, positions or masks of "
            "another part, what each rank adds, or a loss that each divides by the number of its own targets"
        )
    return Cause("another output", None, text)


def _outputs(sight: Sight) -> dict[str, bool | None]:
    """Return of modules, in the order of their first calls' ends, whether ranks together give what one process gives.

    Ranks have rows, columns or tokens of an output, or the whole: sums of its squares tell. Where each has one of
    several values that are to be added, and the sum of all is right, that is not known: None.
    """
    found: dict[str, bool | None] = {}
    for name, (squares, total, size) in sight.alone.record.outputs.items():
        by_rank = [process.record.outputs.get(name, (float("nan"),) * 3) for process in sight.ranks]
        shaken = sight.shaken.record.outputs.get(name, (squares, total, size))
        noise = abs(shaken[0] / squares - 1) if squares else 0.0
        if _is_whole(sight, [one[0] for one in by_rank], squares, max(_TOLERANCE, NOISE_FACTOR * noise) * squares):
            found[name] = True
        else:
            limit = _TOLERANCE * size + NOISE_FACTOR * abs(shaken[1] - total)
            is_sum = _is_whole(sight, [one[1] for one in by_rank], total, limit)
            found[name] = None if is_sum or math.isnan(by_rank[0][0]) else False
    return found


def _is_whole(sight: Sight, by_rank: Sequence[float], expected: float, limit: float) -> bool:
    """Whether what ranks have is one process's: rows of each copy, parts of these, or a whole or its parts in each."""
    copies, of_one = sum(by_rank[group[0]] for group in sight.groups), sum(by_rank[rank] for rank in sight.groups[0])
    return any(abs(whole - expected) <= limit for whole in (copies, sum(by_rank), by_rank[0], of_one))


def _unlike_losses(sight: Sight, step: int) -> str:
    """Return that ranks which read the same have unlike losses, "" where none have."""
    for group in sight.groups:
        losses = [sight.ranks[rank].loss(step) or 0.0 for rank in group]
        is_alike = len({sight.ranks[rank].record.given for rank in group}) == 1
        if is_alike and max(losses) - min(losses) > _TOLERANCE * abs(max(losses)):
            shown = ", ".join(f"{loss:.6g}" for loss in losses)
            return f"{ranks_of(group)}, which read the same, have unlike losses ({shown}): each counts its own part"
    return ""


def _way_back(names: Sequence[str], partings: Sequence[Parting]) -> str:
    """Return which parameters part although the loss is right."""
    wrong = {parting.name for parting in partings}
    last = max(place for place, name in enumerate(names) if name in wrong)
    after = names[last + 1 :]
    text = "the loss is right, so it goes wrong on the way back"
    if after and len(wrong) > 1:
        text += f": {names[last]} is the last of the model that is wrong, {after[0]} behind it is right"
    return text
