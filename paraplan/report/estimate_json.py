"""An estimate as the JSON object that programs read. Apart from the tables, which cost the import of rich."""

from __future__ import annotations

from typing import Any

import numpy as np

from paraplan.accuracy.history import effect_of_history
from paraplan.accuracy.ranges import Peak, memory_range, out_of_memory_risk, step_range
from paraplan.cost.blocks.routing import busiest_load, expert_ranks
from paraplan.cost.capacity import largest_layer, what_fits
from paraplan.cost.communication.exchanges import routed_matmul
from paraplan.cost.estimate import PlanEstimate
from paraplan.cost.loading import loading_of
from paraplan.cost.lower_bounds import lower_bound_reason
from paraplan.cost.notes import workload_notes
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import training_reason, unsupported_reason
from paraplan.report.short_text import memory_verdict, samples_rates


def warnings_of(workload: Workload, plan: ParallelPlan) -> tuple[str, ...]:
    """Return what to know of an estimate, a sentence each: of its training, and whether paraplan runs the plan."""
    notes = workload_notes(workload)
    training = workload.training
    if workload.writes_out_scores:
        why = "in fp32" if training.precision == "fp32" else f"of this model on {workload.cluster.gpu.title}"
        notes += (
            f"torch's sdpa has no fused kernel for grouped queries {why}: all scores are kept and counted, as in eager "
            "attention",
        )
    if plan.recompute == "selective" and workload.kernel_training.attention != "eager":
        ways = [name for name in workload.recomputes if name in ("selective_ops", "full")]
        notes += (
            f"selective recompute drops what attention keeps of its scores, and {training.attention} attention keeps "
            f"none: it is as none, and {' or '.join(ways)} would keep less",
        )
    if plan.ep > 1 and training.stated_load is None:
        ranks = expert_ranks(workload.framework, ep=plan.ep, tp=plan.tp)
        routed = (routed_matmul(run.block) for run in workload.model.runs)
        matmul = next(one for one in routed if one is not None)
        (load,) = busiest_load(training, workload.constants, matmul, ranks=np.array([ranks]))
        routers = "routers of trained models leave it on one text" if training.tunes_trained else "routers leave it"
        why = "as the tokens that pad samples all go to the same" if training.padding_share else f"as {routers}"
        notes += (
            f"the busiest of {ranks} ranks of experts is taken to have {load:.2f} times the mean of their rows, {why}: "
            "--expert-load states another",
        )
    without = _without_experts(workload, plan)
    if without is not None:
        notes += (f"{workload.framework.title} does not train so: {without}",)
    reason = training_reason(training, plan) or unsupported_reason(
        plan, num_blocks=workload.model.num_blocks, precision=training.precision
    )
    if reason is None or not workload.framework.is_own_runtime:
        return notes
    return (*notes, f"paraplan's own runtime does not execute this plan: {reason}")


def _without_experts(workload: Workload, plan: ParallelPlan) -> str | None:
    """Return why a framework other than paraplan's does not spread a plan's experts so, None where it does."""
    framework = workload.framework
    if plan.ep == 1 or framework.is_own_runtime:
        return None
    spreads = framework.data_parallel.has_expert_parallel
    if spreads and plan.zero_stage not in framework.experts.zero_stages:
        return f"ep={plan.ep} beside ZeRO-{plan.zero_stage}"
    if framework.export_target is not None:
        from paraplan.interop.export import why_inexpressible  # all targets, of which plans without ep need none

        found = why_inexpressible(framework.export_target, plan, workload.training, workload.model.num_blocks)
        return found if found is not None and found.startswith("ep=") else None
    return None if spreads else f"ep={plan.ep}"


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
