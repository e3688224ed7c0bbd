"""Fields of a plan that a user fixes before the search, and errors where no plan can have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Protocol, TypeVar, get_type_hints

from paraplan.arguments import refuse_unsuited
from paraplan.errors import PlanError, WrongArgumentError
from paraplan.plan.parallel import AXES, Degree, Offload, Recompute, ScheduleName
from paraplan.plan.training import TrainingSpec


@dataclass(frozen=True)
class Constraints:
    """Fields of a plan that the search keeps; None leaves a field free."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    """Degree of expert parallelism as the framework counts: with the ranks of tp where these have experts of their
    own."""
    zero_stage: int | None = None
    micro_batch_size: int | None = None
    recompute: Recompute | None = None
    schedule: ScheduleName | None = None
    sequence_parallel: bool | None = None
    offload: Offload | None = None

    def __post_init__(self) -> None:
        """Raise `WrongArgumentError` for a value that no plan can have."""
        for each in fields(self):
            value = getattr(self, each.name)
            refuse_unsuited(value, _annotations()[each.name], name=each.name, of="Constraints")
            least, most = (0, 3) if each.name == "zero_stage" else (1, value)
            if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= most:
                raise WrongArgumentError(
                    f"{each.name}={value} of Constraints",
                    hint="degrees and sequences of a micro-batch are 1 or more, ZeRO stages 0 to 3",
                )

    def allows(self, **values: object) -> bool:
        """Return whether each of `values` is free, or what it is fixed to."""
        return all(getattr(self, name) in (None, value) for name, value in values.items())

    @property
    def words(self) -> list[str]:
        """The fixed fields as options of the command line: `--tp 4`."""
        return [_option(each.name, value) for each in fields(self) if (value := getattr(self, each.name)) is not None]

    @property
    def axes(self) -> dict[Degree, int]:
        """The fixed degrees."""
        names = [axis.name for axis in AXES]
        return {axis: degree for axis in names if (degree := getattr(self, axis)) is not None}


@cache
def _annotations() -> dict[str, Any]:
    return get_type_hints(Constraints)


FREE = Constraints()


class _HasAxes(Protocol):
    @property
    def options(self) -> dict[Degree, int]:
        """Degrees as options name them."""


_Degrees = TypeVar("_Degrees", bound=_HasAxes)


def check_axes(
    fixed: Constraints,
    degrees: Sequence[_Degrees],
    reason_of: Callable[[_Degrees], str | None],
    *,
    num_gpus: int,
    model_limit: Callable[[Degree, int], str | None],
) -> None:
    """Raise `PlanError` where no product of `degrees` that can be executed has the fixed axes, with what would do.

    `reason_of` says why a product cannot be executed, `model_limit` why a degree does not suit the model on any GPUs.
    """
    possible = [each for each in degrees if reason_of(each) is None]
    for axis, degree in fixed.axes.items():
        if any(each.options[axis] == degree for each in possible):
            continue
        with_it = [each for each in degrees if each.options[axis] == degree]
        reasons = Counter(reason for each in with_it if (reason := reason_of(each)) is not None)
        indivisible = f"{degree} does not divide {num_gpus} GPUs"
        why = model_limit(axis, degree) or (reasons.most_common(1)[0][0] if reasons else indivisible)
        hint = f"use --{axis} {_listed(possible, axis)}" if possible else f"leave out --{axis}"
        raise PlanError(f"--{axis} {degree}: {why}", hint=hint)
    if not fixed.axes or any(_agree(fixed, each, fixed.axes) for each in possible):
        return  # where nothing is fixed and nothing possible, the search says why
    ways = [
        f"--{axis} {_listed(rest, axis)}"
        for axis in fixed.axes
        if (rest := [each for each in possible if _agree(fixed, each, fixed.axes.keys() - {axis})])
    ]
    together = " and ".join(f"--{axis} {degree}" for axis, degree in fixed.axes.items())
    hint = f"with the others use {', or '.join(ways)}" if ways else "leave one of them out"
    raise PlanError(f"{together} do not go together on {num_gpus} GPUs", hint=hint)


def check_micro_batch(fixed: Constraints, shares: Iterable[int], *, training: TrainingSpec) -> None:
    """Raise `PlanError` where the fixed micro-batch divides none of `shares`, those of a rank of the global batch.

    A micro-batch of pairs has to be even.
    """
    size, found, group = fixed.micro_batch_size, sorted(set(shares)), training.learns_from.group
    if size is not None and size % group:
        raise PlanError(
            f"--micro-batch {size} holds no pairs, which {training.task} learns from",
            hint=f"use --micro-batch {size + 1}: chosen and rejected sequences count apart",
        )
    if size is None or any(share % size == 0 for share in found):
        return
    fitting = sorted({divisor for share in found for divisor in range(1, min(share, 4096) + 1) if share % divisor == 0})
    raise PlanError(
        f"--micro-batch {size} divides no rank's share of the global batch of {training.global_batch_size}",
        hint=f"use --micro-batch {_or(fitting)}",
    )


def nothing_has_all(fixed: Constraints) -> PlanError:
    """Return the error for choices that exclude each other."""
    return PlanError(
        f"no plan has all of {', '.join(fixed.words)}",
        hint="a pipeline goes with ZeRO 0 and 1 only, ZeRO needs several replicas, --schedule a pipeline, and "
        "--sequence-parallel tensor parallelism; leave one out",
    )


def _agree(fixed: Constraints, degrees: _HasAxes, axes: Iterable[Degree]) -> bool:
    return all(degrees.options[axis] == getattr(fixed, axis) for axis in axes)


def _listed(degrees: Iterable[_HasAxes], axis: Degree) -> str:
    return _or(sorted({each.options[axis] for each in degrees}))


def _or(values: Sequence[int]) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _option(name: str, value: object) -> str:
    if name == "sequence_parallel":
        return "--sequence-parallel" if value else "--no-sequence-parallel"
    name = {"zero_stage": "zero", "micro_batch_size": "micro-batch"}.get(name, name)
    return f"--{name} {value}"
