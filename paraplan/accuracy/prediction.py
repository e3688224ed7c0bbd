"""Predictions of measured runs from their configuration alone, and what the predictions are worth."""

from __future__ import annotations

from typing import get_args

from paraplan.accuracy.fine_tuning import has_only_modelled_features, is_fine_tuning
from paraplan.accuracy.measured_runs import MeasuredRun
from paraplan.accuracy.ranges import memory_range, out_of_memory_risk, step_range
from paraplan.accuracy.run_prediction import PEAKS, MemoryReading, RunPrediction
from paraplan.cost.estimate import PlanEstimate, allocator_holds, evaluate_plan
from paraplan.cost.plain_prediction import plain_prediction
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import ComputePrecision
from paraplan.units import GIB


def estimate_run(run: MeasuredRun, workload: Workload, plan: ParallelPlan) -> PlanEstimate:
    """Return the estimate of one run.

    Where the run says nothing of recompute, it is the least that fits the GPU: the run did fit.
    Raises `PlanError` for more stages than layers, with the embedding and the head, which Megatron-LM may count as two.
    """
    if plan.num_stages > workload.model.num_blocks + 2:
        raise PlanError(f"{plan.num_stages} pipeline stages, and the model has {workload.model.num_blocks} layers")
    estimate = evaluate_plan(workload, plan)
    may_recompute = not run.recompute and run.fit_status != "oom" and "offload" not in run.nonstandard_features.lower()
    for recompute in workload.recomputes[1:] if may_recompute else ():
        if _fits(estimate, workload):
            break
        estimate = evaluate_plan(workload, plan.replace(recompute=recompute))
    return estimate


def predict_run(
    run: MeasuredRun, workload: Workload, plan: ParallelPlan, *, is_known_framework: bool = True
) -> RunPrediction:
    """Return the prediction of one run, as `estimate_run` makes it, beside what was measured."""
    estimate = estimate_run(run, workload, plan)
    plan = estimate.plan
    measured_bytes = round(run.measured_peak_mem_gib * GIB) if run.measured_peak_mem_gib else None
    reading = _reading(run.memory_metric)
    predicted_bytes = _as_read(estimate, workload, reading, run.memory_rank)
    peaks = memory_range(workload, plan, predicted_bytes, PEAKS[reading])
    step_s, likely = estimate.step.step_time_s, step_range(workload, estimate, is_known_framework=is_known_framework)
    return RunPrediction(
        id=run.id,
        source=run.source,
        gpu=run.gpu,
        framework=run.framework,
        framework_profile=workload.framework.name,
        gpu_profile=workload.cluster.gpu.name,
        is_known_framework=is_known_framework,
        parallelism=_parallelism(plan),
        plan=plan.describe(),
        predicted_step_time_s=step_s,
        measured_step_time_s=run.measured_step_time_s,
        step_time_error=step_s / run.measured_step_time_s - 1 if run.measured_step_time_s else None,
        predicted_peak_memory_bytes=predicted_bytes,
        measured_peak_memory_bytes=measured_bytes,
        memory_error=predicted_bytes / measured_bytes - 1 if measured_bytes else None,
        memory_reading=reading if measured_bytes else None,
        fits={"fits": True, "oom": False}.get(run.fit_status),
        predicted_fits=allocator_holds(workload, estimate),
        predicted_step_time_low_s=likely.low_s if likely else None,
        predicted_step_time_high_s=likely.high_s if likely else None,
        predicted_peak_memory_low_bytes=peaks[0] if peaks else None,
        predicted_peak_memory_high_bytes=peaks[1] if peaks else None,
        evidence=likely.evidence if likely else None,
        allocator_share=estimate.cached_device_bytes / workload.cluster.gpu_memory_bytes,
        out_of_memory_risk=out_of_memory_risk(workload, estimate),
        plain=plain_prediction(workload, estimate),
    )


def _fits(estimate: PlanEstimate, workload: Workload) -> bool:
    return max(stage.device_bytes for stage in estimate.memory) <= workload.cluster.gpu_memory_bytes


def _parallelism(plan: ParallelPlan) -> str:
    axes = " x ".join(axis for axis, degree in plan.degrees.items() if axis != "dp" and degree > 1)
    sharding = f"ZeRO-{plan.zero_stage}" if plan.zero_stage else "DDP" if plan.dp > 1 else ""
    return ", ".join(part for part in (axes, sharding) if part) or "one GPU"


def _reading(metric: str) -> MemoryReading:
    words = metric.lower()
    if "nvidia-smi" in words or "nvml" in words:
        return "not stated" if "unknown" in words else "nvidia-smi"
    is_named = any(known in words for known in ("allocated", "active", "reserved"))
    if "allocated or reserved" in words:
        return "allocated or reserved"
    if not words or "unknown" in words or (not is_named and ("not stated" in words or "as printed" in words)):
        return "not stated"
    return "max_reserved" if "reserved" in words else "max_allocated"


def _as_read(estimate: PlanEstimate, workload: Workload, reading: MemoryReading, rank: str) -> int:
    """Return the peak in the unit of a measurement; what is not stated is taken as `nvidia-smi` shows it.

    Of torch's two readings the larger one stands for either.

    `rank` is the run's `memory_rank`. `nvidia-smi` shows one machine: the first has the first pipeline stages.
    """
    stages = estimate.memory[-1:] if rank == "last" else estimate.memory
    if reading == "nvidia-smi" and not rank:
        ranks_of_stage = max(1, estimate.plan.world_size // estimate.plan.pp)
        stages = stages[: max(1, workload.cluster.gpus_per_node // ranks_of_stage)]
    if reading == "max_allocated":
        return max(stage.total_bytes for stage in stages)
    on_device = max(stage.device_bytes for stage in stages)
    if reading in ("nvidia-smi", "not stated"):
        return on_device
    return on_device - workload.constants.device_bytes(
        0,
        communicators_bytes=int(workload.communicators_bytes(PlanTable.of_plans([estimate.plan]).axes)[0]),
        context_bytes=workload.framework.storage.context_bytes,
    )


_MODELLED_OFFLOADS = ("", "none", "activations to cpu")
"""Tensors that fine-tuning rows may keep on the host and still count."""


def is_standard(run: MeasuredRun) -> bool:
    """Return whether a run is a fair test: completely described, nothing unusual, in bf16, fp16 or fp32.

    A table that does not grade its rows is taken at its word.
    """
    is_modelled = is_fine_tuning(run) and has_only_modelled_features(run) and run.offload.lower() in _MODELLED_OFFLOADS
    complete = run.quality in ("A", "B", "") and (is_modelled or not run.nonstandard_features)
    return complete and run.precision in (*get_args(ComputePrecision), "") and run.fit_status != "oom"
