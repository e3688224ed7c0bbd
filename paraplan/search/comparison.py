"""Two plans beside each other: the best and the second, an earlier one and the one of now."""

from __future__ import annotations

from paraplan.cost.estimate import PlanEstimate, StepEstimate, estimate_plan, why_unsuitable
from paraplan.cost.workload import Workload
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import AXES, ParallelPlan
from paraplan.plan.training import TrainingSpec
from paraplan.records import Record
from paraplan.search.reasons import Reason
from paraplan.search.results import SearchResult
from paraplan.units import format_bytes_apart, format_seconds

_NOT_PARTS = ("step_time_s", "tokens_per_s_per_gpu", "model_flops_per_s_per_gpu", "mfu", "data_parallel_wire_s")


class ComparedPart(Record):
    """One part of a step in seconds, under the better and under the other plan."""

    name: str
    best_s: float
    second_s: float

    @property
    def difference_s(self) -> float:
        """Seconds that the other plan spends more."""
        return self.second_s - self.best_s


class Explanation(Record):
    """Two plans compared: the parts sum to the steps. `because` names the parts that decide, largest first."""

    best: str
    second: str
    best_step_s: float
    second_step_s: float
    parts: tuple[ComparedPart, ...]
    best_memory_bytes: int
    second_memory_bytes: int
    because: str


def explain(best: PlanEstimate, second: PlanEstimate, reason: Reason) -> Explanation:
    """Return why `best` beats `second`, part by part; `reason` is what decided where that is not the time."""
    parts = compared_parts(best, second)
    return Explanation(
        best=best.plan.describe(),
        second=second.plan.describe(),
        best_step_s=best.step.step_time_s,
        second_step_s=second.step.step_time_s,
        parts=parts,
        best_memory_bytes=best.peak_memory_bytes,
        second_memory_bytes=second.peak_memory_bytes,
        because=_because(parts, best, second, reason),
    )


def compared_parts(best: PlanEstimate, second: PlanEstimate) -> tuple[ComparedPart, ...]:
    """Return the parts of both steps beside each other."""
    names = [name for name in StepEstimate.model_fields if name.endswith("_s") and name not in _NOT_PARTS]
    return tuple(
        ComparedPart(name=name, best_s=getattr(best.step, name), second_s=getattr(second.step, name)) for name in names
    )


def part_words(name: str) -> str:
    """Return the words of a part's field: `pipeline_bubble_s` is `pipeline bubble`."""
    return name.removesuffix("_s").replace("_", " ")


def _because(parts: tuple[ComparedPart, ...], best: PlanEstimate, second: PlanEstimate, reason: Reason) -> str:
    gap = second.step.step_time_s - best.step.step_time_s
    saved = sorted((part for part in parts if part.difference_s > 0), key=lambda part: -part.difference_s)
    spent = sorted((part for part in parts if part.difference_s < 0), key=lambda part: part.difference_s)
    if gap <= 0:
        return f"it is {format_seconds(-gap)} slower, and chosen because {reason.because}"
    words = f"it saves {_listed(saved, 'of')}"
    if spent:
        words += f" and spends {_listed(spent, 'more on')}"
    return f"{words}: {format_seconds(gap)} in all ({gap / best.step.step_time_s:.1%})"


def _listed(parts: list[ComparedPart], word: str) -> str:
    shown = [f"{format_seconds(abs(part.difference_s))} {word} {part_words(part.name)}" for part in parts[:2]]
    return " and ".join(shown)


_FIELDS = (
    *(axis.name for axis in AXES),
    "zero_stage",
    "zero_shards",
    "sequence_parallel",
    "micro_batch_size",
    "num_microbatches",
    "pipeline_schedule",
    "virtual_pipeline_size",
    "stage_blocks",
    "recompute",
    "offload",
    "rank_order",
)


class Change(Record):
    """One field of the plan, before and now."""

    field: str
    before: str
    now: str


class Comparison(Record):
    """A plan made before beside the one for now.

    `then_step_s` is what the old plan's file predicted where it was made, `here_step_s` what it would take on the
    machines of now (None where it cannot run there, with the reason in `because`), `now_step_s` the new plan's step.
    """

    before: str
    now: str
    changes: tuple[Change, ...]
    then_step_s: float | None
    here_step_s: float | None
    now_step_s: float
    because: tuple[str, ...]


def compare_with(workload: Workload, old: PlanFile, result: SearchResult) -> Comparison:
    """Return what changed from the plan of `old` to the best of `result`, and why."""
    new = result.best
    because = [*_of_machines(workload, old), *_of_training(workload.training, old)]
    here_s, reason = step_here(workload, old)
    because.append(reason)
    changes = tuple(
        Change(field=name, before=_words(old.plan, name), now=_words(new.plan, name))
        for name in _FIELDS
        if getattr(old.plan, name) != getattr(new.plan, name)
    )
    if here_s is not None and changes:
        ratio = new.step.step_time_s / here_s
        because.append(
            f"the new plan takes {format_seconds(new.step.step_time_s)}, "
            + (f"{1 - ratio:.1%} less time" if ratio < 1 else f"{ratio - 1:.1%} more")
        )
    elif not changes:
        because.append("the same plan is still the best")
    return Comparison(
        before=old.plan.describe(),
        now=new.plan.describe(),
        changes=changes,
        then_step_s=old.estimate.step_time_s if old.estimate else None,
        here_step_s=here_s,
        now_step_s=new.step.step_time_s,
        because=tuple(because),
    )


def _of_machines(workload: Workload, old: PlanFile) -> list[str]:
    then, now = old.plan.world_size, workload.cluster.num_gpus
    found = []
    if then != now:
        kind = "lost" if now < then else "added"
        found.append(f"{then} GPUs then, {now} now: {abs(now - then)} {kind}")
    if old.cluster is not None and old.cluster.name != workload.cluster.name:
        found.append(f"the machine was {old.cluster.name} and is {workload.cluster.name}")
    return found


def _of_training(training: TrainingSpec, old: PlanFile) -> list[str]:
    if old.training is None:
        return []
    return [
        f"{name.replace('_', ' ')} was {getattr(old.training, name)} and is {getattr(training, name)}"
        for name in TrainingSpec.model_fields
        if getattr(old.training, name) != getattr(training, name)
    ]


def step_here(workload: Workload, old: PlanFile) -> tuple[float | None, str]:
    """Return the old plan's step on the machines of now and a sentence; no step where it cannot run there."""
    plan, then = old.plan, old.model
    if then is not None and then.num_parameters not in (None, workload.model.parameters.total):
        return None, f"the old plan is for {then.name}, not {workload.model.name}"
    found = why_unsuitable(workload, plan)
    if found is not None:
        return None, f"the old plan does not suit what is trained here: {found.message}"
    estimate = estimate_plan(workload, plan)
    if not estimate.fits:
        needed, usable = format_bytes_apart(estimate.peak_memory_bytes, estimate.usable_memory_bytes)
        return None, f"the old plan needs {needed} of {usable} usable here"
    idle = workload.cluster.num_gpus - plan.world_size
    here = f"here, on {plan.world_size} of {workload.cluster.num_gpus} GPUs" if idle else "here"
    return estimate.step.step_time_s, f"the old plan would take {format_seconds(estimate.step.step_time_s)} {here}"


def _words(plan: ParallelPlan, name: str) -> str:
    value = getattr(plan, name)
    if isinstance(value, tuple):
        return "-".join(str(each) for each in value)
    if value is None:
        return "even" if name == "stage_blocks" else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
