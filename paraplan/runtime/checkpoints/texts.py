"""The texts in a checkpoint, checked: how far the training is, and the options of its optimizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checkpoints.safe_reader import CheckpointError
from paraplan.runtime.step.loss_scale import LossScale

_HINT = "it is damaged; load an older one"
_MOST_STEPS = 2**62


@dataclass(frozen=True)
class Progress:
    """How far a training is: steps done, the plan that wrote it, the seed, and states of scheduler and loss scale.

    `num_averaged` steps are in the average of the parameters.
    """

    num_steps: int
    seed: int
    plan: ParallelPlan
    scheduler: dict[str, Any] | None
    loss_scale: dict[str, Any] | None
    num_averaged: int = 0


@dataclass(frozen=True)
class Options:
    """The options of the optimizer for one parameter, and the numbers in its state."""

    options: dict[str, Any]
    numbers: dict[str, Any]


def read_progress(values: torch.Tensor) -> Progress:
    """Return the progress that is written as bytes. Raises `CheckpointError` where it is none."""
    found = _object("progress", values)
    plan = found.get("plan")
    if not isinstance(plan, dict):
        raise _damaged("progress", "has no plan")
    try:
        checked = ParallelPlan.model_validate_json(json.dumps(plan))
    except ValueError as error:
        raise _damaged("progress", f"has a plan that contradicts itself: {str(error).splitlines()[-1]}") from error
    scale = _optional_object(found, "loss_scale")
    if scale is not None:
        _check_loss_scale(scale)
    return Progress(
        num_steps=_count(found, "num_steps"),
        seed=_count(found, "seed", least=-(2**64), limit=2**64),
        plan=checked,
        scheduler=_optional_object(found, "scheduler"),
        loss_scale=scale,
        num_averaged=_count(found, "num_averaged") if "num_averaged" in found else 0,
    )


def read_options(name: str, values: torch.Tensor) -> Options:
    """Return the options of parameter `name` that are written as bytes; pairs are tuples, as optimizers have them."""
    found = _object(f"options of {name}", values)
    options, numbers = found.get("options"), found.get("numbers")
    if not isinstance(options, dict) or not isinstance(numbers, dict) or "params" in options:
        raise _damaged(f"options of {name}", "are not those of an optimizer")
    for value in (*options.values(), *numbers.values()):
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, (list, dict)) for item in items):
            raise _damaged(f"options of {name}", "hold more than numbers, texts and lists of them")
    kept = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return Options(options=kept, numbers=numbers)


def check_kinds(what: str, saved: Mapping[str, Any], held: Mapping[str, Any], *, knows_all: bool = False) -> None:
    """Raise `CheckpointError` where a saved value is of another kind than the one held, as a text is for a number.

    With `knows_all` names that are not held are refused too.
    """
    for name, value in saved.items():
        if name not in held:
            if knows_all:
                raise _damaged(what, f"have a value {name[:100]!r}, which nothing here has")
            continue
        ours, theirs = _kind(held[name]), _kind(value)
        if None not in (ours, theirs) and ours != theirs:
            raise _damaged(what, f"have {theirs} for {name}, which is {ours}")


def taking(what: str, take: Callable[[], Any]) -> None:
    """Call `take`, which sets the state of something to what a checkpoint holds; damage is a `CheckpointError`."""
    try:
        take()
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise _damaged(what, f"cannot be taken over: {str(error)[:200]}") from error


def _kind(value: Any) -> str | None:
    """Return the kind of a value in words; None for one that fits any."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, (int, float, torch.Tensor)):
        return "a number"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, (list, tuple)) else "an object"


def _object(what: str, values: torch.Tensor) -> dict[str, Any]:
    try:
        found = json.loads(bytes(values.numpy()).decode())
    except (ValueError, RecursionError) as error:
        raise _damaged(what, f"cannot be read: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise _damaged(what, "is no object")
    return found


def _count(found: Mapping[str, Any], name: str, *, least: int = 0, limit: int = _MOST_STEPS) -> int:
    value = found.get(name)
    if type(value) is not int or not least <= value < limit:
        raise _damaged("progress", f"has {name}={str(value)[:100]}")
    return value


def _optional_object(found: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = found.get(name)
    if value is not None and not isinstance(value, dict):
        raise _damaged("progress", f"has {name}={str(value)[:100]}")
    return value


def _check_loss_scale(scale: Mapping[str, Any]) -> None:
    usual = asdict(LossScale())
    if scale.keys() != usual.keys() or any(type(value) not in (int, float) for value in scale.values()):
        raise _damaged("progress", f"has loss_scale={str(dict(scale))[:100]}")
    counts = (scale["steady_steps"], scale["skipped_steps"])
    if not (math.isfinite(scale["scale"]) and scale["scale"] > 0) or any(
        type(count) is not int or count < 0 for count in counts
    ):
        raise _damaged("progress", f"has loss_scale={str(dict(scale))[:100]}")


def _damaged(what: str, reason: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint is damaged: {what} {reason}", hint=_HINT)
