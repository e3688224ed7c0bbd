"""A check of a plan: what is run, on how many ranks, and what it found."""

from __future__ import annotations

from math import gcd
from typing import Literal

from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.records import Record

Quantity = Literal["loss", "gradient", "parameter"]

_AXES: tuple[Axis, ...] = ("tp", "pp", "cp", "dp")


class CheckRequest(Record):
    """Run of every rank of a check: `num_steps` optimizer steps of `plan` on a small model, beside one process.

    `model` is a `config.json`'s path or a factory. `max_layers` bounds the layers of the smaller model; `keeps_width`
    leaves its layers as wide as they are. `folder` takes what the ranks find.
    """

    model: str
    plan: ParallelPlan
    folder: str
    max_layers: int
    seq_length: int = 16
    num_steps: int = 3
    keeps_width: bool = False
    seed: int = 0


class Gap(Record):
    """Where a plan and one process part: a quantity that differs by `error`, relative to the largest of its kind.

    `name` is the parameter's, "" for the loss. `order` counts parameters as the model names them.
    """

    step: int
    quantity: Quantity
    name: str
    error: float
    rank: int
    order: int = 0


class RankFinding(Record):
    """Finding of one rank. Errors are relative, the largest of all steps.

    `gaps` lists what differs in the first step in which anything does, in the order of the model.
    """

    rank: int
    loss_error: float
    gradient_error: float
    parameter_error: float
    num_parameters: int
    num_compared: int
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    gaps: tuple[Gap, ...] = ()


class CheckReport(Record):
    """The answer of a check. `plan` is what was run; `gap` where it first parts from one process, None if nowhere.

    `num_unequal` counts the parameters whose gradients differ in that step. `blame` names what the difference goes
    away without: an axis, or more than one micro-batch.
    """

    model: str
    num_model_parameters: int
    planned: ParallelPlan
    plan: ParallelPlan
    num_steps: int
    is_equal: bool
    loss_error: float
    gradient_error: float
    parameter_error: float
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    gap: Gap | None = None
    num_unequal: int = 0
    blame: tuple[str, ...] = ()


def smaller_plan(plan: ParallelPlan, *, max_ranks: int) -> ParallelPlan:
    """Return `plan` for at most `max_ranks` ranks: every axis that it has keeps two or more.

    Degrees are halved, the largest first, as far as that goes; a plan with four axes keeps 16 ranks. Micro-batches are
    few, but more than one where the plan has more.
    """
    degrees = {axis: int(getattr(plan, axis)) for axis in _AXES}
    while _product(degrees) > max_ranks:
        axis = max(degrees, key=lambda axis: degrees[axis])
        if degrees[axis] < 4:
            break
        degrees[axis] = degrees[axis] // 2 if degrees[axis] % 2 == 0 else 2
    for axis in _AXES:  # 3 becomes 2
        if _product(degrees) > max_ranks and degrees[axis] == 3:
            degrees[axis] = 2
    pp = degrees["pp"]
    count = plan.num_microbatches
    if pp > 1:
        count = min(count, 2 * pp)
        count = max(pp, count // pp * pp) if plan.num_microbatches >= pp else count
    is_same_pipeline = pp == plan.pp
    return plan.replace(
        **degrees,
        ep=gcd(plan.ep, degrees["dp"] * degrees["cp"]),
        num_microbatches=min(count, 2) if pp == 1 else count,
        micro_batch_size=min(plan.micro_batch_size, 2),
        virtual_pipeline_size=plan.virtual_pipeline_size if is_same_pipeline else min(plan.virtual_pipeline_size, 2),
        stage_blocks=None,
    )


def without(plan: ParallelPlan, axis: Axis) -> ParallelPlan:
    """Return `plan` with one rank along `axis`, and without what goes with that axis alone."""
    changes: dict[str, object] = {axis: 1}
    if axis == "tp":
        changes["sequence_parallel"] = False
    if axis == "pp":
        changes |= {"pipeline_schedule": None, "virtual_pipeline_size": 1, "stage_blocks": None}
    if axis in ("dp", "cp"):
        rest = plan.dp * plan.cp // getattr(plan, axis)
        changes["ep"] = gcd(plan.ep, rest)
        if rest == 1:
            changes["zero_stage"] = 0
    return plan.replace(**changes)


def axes_of(plan: ParallelPlan) -> list[Axis]:
    """Return the axes along which `plan` has more than one rank."""
    return [axis for axis in _AXES if getattr(plan, axis) > 1]


def _product(degrees: dict[Axis, int]) -> int:
    result = 1
    for degree in degrees.values():
        result *= degree
    return result
