"""Why one plan beats another: the parts of their steps and of their memory side by side."""

from __future__ import annotations

from paraplan.cost.estimate import PlanEstimate, StepEstimate
from paraplan.records import Record
from paraplan.units import format_seconds

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


def explain(best: PlanEstimate, second: PlanEstimate, *, is_named: bool = True) -> Explanation:
    """Return why `best` beats `second`, part by part; `is_named` says that the decision tree names the second too."""
    names = [name for name in StepEstimate.model_fields if name.endswith("_s") and name not in _NOT_PARTS]
    parts = tuple(
        ComparedPart(name=name, best_s=getattr(best.step, name), second_s=getattr(second.step, name)) for name in names
    )
    return Explanation(
        best=best.plan.describe(),
        second=second.plan.describe(),
        best_step_s=best.step.step_time_s,
        second_step_s=second.step.step_time_s,
        parts=parts,
        best_memory_bytes=best.peak_memory_bytes,
        second_memory_bytes=second.peak_memory_bytes,
        because=_because(parts, best, second, is_named=is_named),
    )


def part_words(name: str) -> str:
    """Return the words of a part's field: `pipeline_bubble_s` is `pipeline bubble`."""
    return name.removesuffix("_s").replace("_", " ")


def _because(parts: tuple[ComparedPart, ...], best: PlanEstimate, second: PlanEstimate, *, is_named: bool) -> str:
    gap = second.step.step_time_s - best.step.step_time_s
    saved = sorted((part for part in parts if part.difference_s > 0), key=lambda part: -part.difference_s)
    spent = sorted((part for part in parts if part.difference_s < 0), key=lambda part: part.difference_s)
    if gap <= 0:
        why = "it is simpler" if is_named else "the decision tree names its family, and not that of the second"
        if is_named and best.peak_memory_bytes < second.peak_memory_bytes:
            why = "it needs less memory"
        return f"it is {format_seconds(-gap)} slower, and chosen because {why}"
    words = f"it saves {_listed(saved, 'of')}"
    if spent:
        words += f" and spends {_listed(spent, 'more on')}"
    return f"{words}: {format_seconds(gap)} in all ({gap / best.step.step_time_s:.1%})"


def _listed(parts: list[ComparedPart], word: str) -> str:
    shown = [f"{format_seconds(abs(part.difference_s))} {word} {part_words(part.name)}" for part in parts[:2]]
    return " and ".join(shown)
