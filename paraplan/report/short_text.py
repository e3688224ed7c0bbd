"""The short answers: an estimate and a recommendation in a few lines of plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.workload import Workload
from paraplan.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:  # the search, which an estimate does without
    from paraplan.search.recommendation import Recommendation


def workload_lines(workload: Workload) -> tuple[str, ...]:
    """Return what is trained, on what, and how, a line each."""
    model, cluster, training = workload.model, workload.cluster, workload.training
    return (
        f"{model.name}, {format_count(model.parameters.total)} parameters",
        str(cluster),
        f"global batch {training.global_batch_size} x {training.seq_length} tokens, {training.title}",
    )


def verdict(estimate: PlanEstimate) -> str:
    """Return whether a plan fits, and else by how much it does not."""
    over = estimate.peak_memory_bytes - estimate.usable_memory_bytes
    if estimate.fits:
        return "fits"
    return f"does not fit, {format_bytes(over)} too much on a GPU" if over > 0 else "does not fit in the host's memory"


def estimate_lines(workload: Workload, estimate: PlanEstimate) -> tuple[str, ...]:
    """Return a plan, whether it fits, and the figures that are read first."""
    return (*workload_lines(workload), f"{estimate.plan.describe()}: {verdict(estimate)}", _figures(estimate))


def recommendation_lines(answer: Recommendation) -> tuple[str, ...]:
    """Return the recommended plan, its figures, and why it is recommended."""
    result = answer.result
    return (
        *workload_lines(answer.workload),
        f"Recommended: {result.best.plan.describe()}",
        _figures(result.best),
        *(f"{each.question} {each.outcome} ({each.because})" for each in result.decisions),
        *filter(None, [result.remark, answer.offload]),
        f"{result.plans_considered:,} plans considered",
    )


def _figures(estimate: PlanEstimate) -> str:
    step = estimate.step
    return (
        f"{format_seconds(step.step_time_s)} a step, "
        f"{format_count(float(f'{step.tokens_per_s_per_gpu:.3g}'))} tokens/s per GPU, MFU {step.mfu:.1%}, "
        f"peak {format_bytes(estimate.peak_memory_bytes)} of {format_bytes(estimate.usable_memory_bytes)} usable"
    )
