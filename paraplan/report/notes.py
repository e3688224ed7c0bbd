"""Sentences on what is assumed of a training, and on what a plan does otherwise than it seems."""

from __future__ import annotations

import numpy as np

from paraplan.cost.blocks.routing import busiest_load, expert_ranks
from paraplan.cost.communication.exchanges import routed_matmul
from paraplan.cost.notes import workload_notes
from paraplan.cost.workload import Workload
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import training_reason, unsupported_reason
from paraplan.report.short_text import Line


def note_lines(workload: Workload, plan: ParallelPlan | None = None) -> tuple[Line, ...]:
    """Return what to know of a training, and of a plan where one is given, as lines of the short answer."""
    sentences = workload_notes(workload) if plan is None else warnings_of(workload, plan)
    return tuple(Line("Note", one, "caution") for one in sentences)


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
        notes += (f"{workload.framework.told_as} does not train so: {without}",)
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
