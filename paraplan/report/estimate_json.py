"""An estimate as the JSON object that programs read. Apart from the tables, which cost the import of rich."""

from __future__ import annotations

from typing import Any

from paraplan.accuracy.history import effect_of_history
from paraplan.accuracy.ranges import Peak, memory_range, out_of_memory_risk, step_range
from paraplan.cost.capacity import largest_layer, what_fits
from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.loading import loading_of
from paraplan.cost.lower_bounds import lower_bound_reason
from paraplan.cost.workload import Workload
from paraplan.report.notes import warnings_of
from paraplan.report.short_text import memory_verdict, samples_rates


def _loading(workload: Workload, estimate: PlanEstimate) -> dict[str, Any] | None:
    loading = loading_of(workload, estimate)
    if loading is None:
        return None
    ways = {"fits": loading.fits, "in_words": loading.in_words}
    return loading.model_dump() | ways


def estimate_report(workload: Workload, estimate: PlanEstimate) -> dict[str, Any]:
    """Return the JSON object of `paraplan estimate --json`."""
    parameters, cluster = workload.model.parameters, workload.cluster
    likely = step_range(workload, estimate)
    padded, packed = samples_rates(workload, estimate)
    peaks: dict[Peak, int] = {
        "allocated": max(stage.total_bytes for stage in estimate.memory),
        "device": max(stage.device_bytes for stage in estimate.memory),
    }
    history = effect_of_history(workload, estimate.plan)
    return {
        "plan": estimate.plan.model_dump(mode="json"),
        "parameters": {"total": parameters.total} | parameters.model_dump(),
        "memory": [stage.model_dump() for stage in estimate.memory],
        "fits": estimate.fits,
        "memory_verdict": memory_verdict(workload, estimate)[0],
        "peak_memory_bytes": estimate.peak_memory_bytes,
        "usable_memory_bytes": estimate.usable_memory_bytes,
        "device_peak_bytes": peaks["device"],
        "host_bytes_per_node": estimate.host_bytes_per_node,
        "host_memory_bytes": estimate.host_memory_bytes,
        "peak_ranges": {name: memory_range(workload, estimate.plan, peak, name) for name, peak in peaks.items()},
        "out_of_memory_risk": out_of_memory_risk(workload, estimate),
        "loading": _loading(workload, estimate),
        "step": estimate.step.model_dump(),
        "step_is_lower_bound": lower_bound_reason(workload, estimate.plan) is not None,
        "effective_tokens_per_s_per_gpu": {"padded": padded, "packed": packed},
        "step_range": likely.model_dump() if likely is not None else None,
        "history": history.model_dump() if history is not None else None,
        "training": workload.training.model_dump(mode="json"),
        "cluster": {
            "name": cluster.name,
            "num_nodes": cluster.num_nodes,
            "gpus_per_node": cluster.gpus_per_node,
            "gpu": cluster.gpu.name,
        },
        "largest_layer": largest_layer(workload).model_dump(),
        "warnings": list(warnings_of(workload, estimate.plan)),
        "what_fits": [row.model_dump() for row in what_fits(workload, estimate.plan)],
    }
