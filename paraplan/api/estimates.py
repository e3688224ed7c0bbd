"""Estimate of one plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from paraplan.api.executors import why_unplanned
from paraplan.cost.capacity import FitRow, LargestLayer, largest_layer, what_fits
from paraplan.cost.cost_model import CostModel
from paraplan.cost.estimate import MemoryEstimate, PlanEstimate, StepEstimate, estimate_plan
from paraplan.cost.lower_bounds import lower_bound_reason
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan
from paraplan.python_words import in_python_words
from paraplan.report.estimate_json import estimate_report
from paraplan.report.notes import warnings_of
from paraplan.report.short_text import Line, estimate_lines
from paraplan.units import format_bytes, format_seconds

if TYPE_CHECKING:  # imported where it is asked for
    from paraplan.cost.pipeline.simulation import Timeline

_FRAME_HEIGHT = 640


@dataclass(frozen=True, eq=False)
class Estimate:
    """Memory and step time of one plan. `str()` is the short answer; a notebook shows the report with its charts."""

    workload: Workload
    """Model, training and machines of the estimate."""
    result: PlanEstimate
    """The figures as a record, for JSON."""

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        return self.result.plan

    @property
    def memory(self) -> tuple[MemoryEstimate, ...]:
        """Memory of one rank of each pipeline stage at its peak, by parts that sum to `total_bytes`."""
        return self.result.memory

    @property
    def step(self) -> StepEstimate:
        """Seconds of one optimizer step, by parts that sum to `step_time_s`, and what follows from them."""
        return self.result.step

    @property
    def step_time_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.result.step.step_time_s

    def to_row(self) -> dict[str, Any]:
        """Return the plan's fields and its figures as one flat row, for pandas."""
        step = self.result.step
        return plan_row(self.plan) | {
            "step_time_s": step.step_time_s,
            "tokens_per_s_per_gpu": step.tokens_per_s_per_gpu,
            "mfu": step.mfu,
            "peak_memory_bytes": self.peak_memory_bytes,
            "fits": self.fits,
        }

    @property
    def is_lower_bound(self) -> bool:
        """Whether a step takes at least `step.step_time_s`, and what it takes beyond is not priced."""
        return lower_bound_reason(self.workload, self.plan) is not None

    @property
    def fits(self) -> bool:
        """True where the fullest stage stays within the usable memory, and offload within the host's."""
        return self.result.fits

    @property
    def peak_memory_bytes(self) -> int:
        """Bytes of the fullest stage."""
        return self.result.peak_memory_bytes

    @property
    def usable_memory_bytes(self) -> int:
        """Bytes that training may allocate on a GPU."""
        return self.result.usable_memory_bytes

    @property
    def is_runnable_framework(self) -> bool:
        """True where paraplan's own runtime is modelled."""
        return self.workload.framework.is_own_runtime

    @property
    def unplanned_because(self) -> str | None:
        """Why `recommend` would not choose such a plan for the framework, None where it might."""
        return why_unplanned(self.workload, self.plan)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the figures, a sentence each."""
        return tuple(map(in_python_words, warnings_of(self.workload, self.plan)))

    @property
    def timeline(self) -> Timeline | None:
        """When each pipeline rank computes, communicates and idles; None for a plan without a pipeline."""
        from paraplan.cost.timeline import pipeline_timeline

        return pipeline_timeline(self.workload, self.plan)

    @property
    def capacity(self) -> tuple[FitRow, ...]:
        """The largest micro-batch and the fewest GPUs under each ZeRO stage and recompute."""
        return what_fits(self.workload, self.plan)

    @property
    def largest_layer(self) -> LargestLayer:
        """The model's largest layer, and whether a GPU alone can train it."""
        return largest_layer(self.workload)

    def without_library_workspaces(self) -> tuple[MemoryEstimate, ...]:
        """Return the memory without what cuBLAS keeps for itself: no library runs in a trace."""
        constants = self.workload.constants.replace(counts_matmul_workspaces=False)
        return estimate_plan(replace(self.workload, constants=constants), self.plan).memory

    def to_dict(self) -> dict[str, Any]:
        """Return what `paraplan estimate --json` prints."""
        return estimate_report(self.workload, self.result)

    def to_html(self) -> str:
        """Return the report, one page that needs no network; its charts need vl-convert-python."""
        from paraplan.report.estimate_page import estimate_page

        return estimate_page(self.workload, self.result)

    def to_trace(self) -> dict[str, Any]:
        """Return the predicted step as a trace for Perfetto."""
        from paraplan.report.chrome_trace import chrome_trace

        return chrome_trace(self.workload, self.result)

    @property
    def lines(self) -> tuple[Line, ...]:
        """The short answer, line by line."""
        return estimate_lines(self.workload, self.result)

    def __str__(self) -> str:
        return in_python_words("\n".join(map(str, self.lines)))

    def __repr__(self) -> str:
        memory = f"{format_bytes(self.peak_memory_bytes)} of {format_bytes(self.usable_memory_bytes)}"
        return f"<Estimate {self.plan.describe()}: {format_seconds(self.step_time_s)}, {memory}>"

    def _repr_html_(self) -> str:
        return framed(self.to_html)


_ROW = ("dp", "tp", "pp", "cp", "ep", "zero_stage", "micro_batch_size", "num_microbatches", "recompute", "offload")


def plan_row(plan: ParallelPlan) -> dict[str, Any]:
    """Return what tells plans apart, one value a column."""
    return {"plan": plan.describe()} | {name: getattr(plan, name) for name in _ROW}


@overload
def estimate(workload: Workload, plan: ParallelPlan) -> Estimate: ...


@overload
def estimate(workload: Workload, plan: Sequence[ParallelPlan]) -> list[Estimate]: ...


def estimate(workload: Workload, plan: ParallelPlan | Sequence[ParallelPlan]) -> Estimate | list[Estimate]:
    """Return the memory of every stage and the step time of one plan, or of several, each in its place.

    A plan that says no `num_microbatches` has as many as the global batch needs. Raises `PlanError` where the plan does
    not suit the model, the training or the machines: the value, the limit and what would do.
    """
    model = CostModel.of_workload(workload)
    if isinstance(plan, ParallelPlan):
        return Estimate(model, estimate_plan(model, _filled(model, plan)))
    return [Estimate(model, estimate_plan(model, _filled(model, each))) for each in plan]


def _filled(workload: Workload, plan: ParallelPlan) -> ParallelPlan:
    count, rest = divmod(workload.training.global_batch_size, plan.dp * plan.micro_batch_size)
    is_said = "num_microbatches" in plan.model_fields_set
    return plan if is_said or rest or not count else plan.replace(num_microbatches=count)


def framed(page: Callable[[], str]) -> str:
    """Return a page in a frame of its own for notebooks, whose style stays inside."""
    from html import escape  # notebooks alone

    style = f"width:100%;height:{_FRAME_HEIGHT}px;border:0"
    return f'<iframe title="paraplan" style="{style}" srcdoc="{escape(page(), quote=True)}"></iframe>'
