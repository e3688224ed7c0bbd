"""What a plan file keeps of a search: the figures that a run of the plan is compared with."""

from __future__ import annotations

from paraplan.plan.files import PlannedEstimate, PlannedMemory
from paraplan.search.results import SearchResult

_CLEARLY_LESS = 0.8  # of the memory: a step down that is worth trying after the estimate was exceeded


def planned_estimate(result: SearchResult) -> PlannedEstimate:
    """Return the prediction for the best plan of `result`, by parts of its fullest stage, and a smaller plan."""
    best = result.best
    fullest = max(best.memory, key=lambda stage: stage.total_bytes)
    flops_per_s = best.step.model_flops_per_s_per_gpu * best.plan.world_size
    limit = _CLEARLY_LESS * best.peak_memory_bytes
    smaller = [candidate for candidate in result.candidates if candidate.peak_memory_bytes <= limit]
    return PlannedEstimate(
        step_time_s=best.step.step_time_s,
        tokens_per_s_per_gpu=best.step.tokens_per_s_per_gpu,
        peak_memory_bytes=best.peak_memory_bytes,
        memory=PlannedMemory(
            parameter_bytes=fullest.parameter_bytes,
            gradient_bytes=fullest.gradient_bytes,
            optimizer_state_bytes=fullest.optimizer_state_bytes,
            activation_bytes=fullest.activation_bytes,
            workspace_bytes=fullest.workspace_bytes,
        ),
        model_flops_per_step=flops_per_s * best.step.step_time_s,
        smaller_plan=min(smaller, key=lambda plan: plan.step_time_s).plan.describe() if smaller else None,
    )
