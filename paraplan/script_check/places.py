"""Where in a model a gradient goes wrong: told by the loss, by what modules give, and by which parameters part."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paraplan.script_check.causes import Cause, Parting, is_of_known_size
from paraplan.script_check.evidence import Sight, ranks_of

_TOLERANCE = 1e-3
_NOISE_FACTOR = 16.0


@dataclass(frozen=True)
class Loss:
    """The loss of a step: the mean over ranks, times the number of ranks that fits best, and that of one process."""

    ranks: float
    alone: float

    @property
    def is_right(self) -> bool:
        """Whether the two are the same."""
        return abs(self.ranks - self.alone) <= _TOLERANCE * abs(self.alone)


def loss_of(sight: Sight, step: int) -> Loss:
    """Return the loss of a step, that of one process twice where ranks have none."""
    alone = sight.alone.loss(step)
    losses = [process.loss(step) for process in sight.ranks]
    if alone is None or any(loss is None for loss in losses):
        return Loss(alone or 0.0, alone or 0.0)
    mean = statistics.fmean(loss or 0.0 for loss in losses)
    sizes = [float(size) for size in (1, *sight.sizes.values())]
    scale = min((*sizes, *(1 / size for size in sizes)), key=lambda size: abs(mean / size - alone))
    return Loss(mean / scale, alone)


def is_vague(cause: Cause) -> bool:
    """Whether a cause says no more than that a gradient is wrong: it may follow from that of another parameter."""
    return cause.kind == "another direction" or (cause.kind == "not reduced" and "neither" in cause.text)


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
    if not is_vague(cause):
        return cause
    if not loss_of(sight, partings[0].step).is_right:
        return _forward(sight, partings[0].step)
    return cause._replace(text=f"{cause.text}; {_way_back(sight, names, partings)}")


def _forward(sight: Sight, step: int) -> Cause:
    """Return what is seen of a step whose loss is another than that of one process."""
    loss = loss_of(sight, step)
    text = f"the loss is {loss.ranks:.6g}, and {loss.alone:.6g} in one process: "
    outputs = _outputs(sight) if step == 1 else {}
    module = next((name for name, is_right in outputs.items() if is_right is False), None)
    if module is not None:
        text += (
            f"the first output that is another is that of {module}. Its heads or parts are in another order, its "
            "positions or masks are those of another part, or each rank adds to it what is to be added once"
        )
    elif outputs and list(outputs.values())[-1]:
        text += (
            "what the modules give is right, so it is what ranks make of it. Each divides by the number of its own "
            "targets, or counts some twice, or not at all"
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

    Ranks have rows, columns or tokens of an output, or the whole: sums of its squares tell. They do not where each has
    one of several values that are to be added: None.
    """
    found: dict[str, bool | None] = {}
    for name, expected in sight.alone.record.outputs.items():
        sizes = [process.record.outputs.get(name, float("nan")) for process in sight.ranks]
        noise = abs(sight.shaken.record.outputs.get(name, expected) / expected - 1) if expected else 0.0
        limit = max(_TOLERANCE, _NOISE_FACTOR * noise) * abs(expected)
        by_group = [[sizes[rank] for rank in group] for group in sight.groups]
        wholes = (sum(group[0] for group in by_group), sum(sizes), sizes[0])
        if any(abs(whole - expected) <= limit for whole in wholes):
            found[name] = True
        else:
            found[name] = False if all(max(group) - min(group) <= limit for group in by_group) else None
    return found


def _way_back(sight: Sight, names: Sequence[str], partings: Sequence[Parting]) -> str:
    """Return which parameters part although the loss is right."""
    for group in sight.groups:
        losses = [sight.ranks[rank].loss(partings[0].step) or 0.0 for rank in group]
        is_alike = len({sight.ranks[rank].record.given for rank in group}) == 1
        if is_alike and max(losses) - min(losses) > _TOLERANCE * abs(max(losses)):
            shown = ", ".join(f"{loss:.6g}" for loss in losses)
            return f"{ranks_of(group)}, which read the same, have unlike losses ({shown}): each counts its own part"
    wrong = {parting.name for parting in partings}
    last = max(place for place, name in enumerate(names) if name in wrong)
    after = names[last + 1 :]
    text = "the loss is right, so it goes wrong on the way back"
    if after and len(wrong) > 1:
        text += f": {names[last]} is the last of the model that is wrong, {after[0]} behind it is right"
    return text
