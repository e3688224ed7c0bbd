"""Checks of a plan that is already there: whether it still fits, is still supported and is still among the fastest."""

from __future__ import annotations

from paraplan.cost.estimate import PlanEstimate, estimate_plan, why_unsuitable
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError
from paraplan.plan.executor import ANYTHING, OWN_RUNTIME, Executor
from paraplan.plan.incompatibility import Incompatibility
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import unsupported_reason
from paraplan.records import Record
from paraplan.search.search import search
from paraplan.units import format_bytes_apart, format_count, format_seconds


class Finding(Record):
    """One check: its name, whether it holds, and the numbers that decide, in a sentence."""

    name: str
    passed: bool
    message: str

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.name:9}  {self.message}"


class PlanCheck(Record):
    """Findings about a plan. `estimate` and `best` are None where they cannot be had: see the findings."""

    plan: ParallelPlan
    findings: tuple[Finding, ...]
    estimate: PlanEstimate | None = None
    best: PlanEstimate | None = None

    @property
    def passed(self) -> bool:
        """True where every check holds."""
        return all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


def check_plan(
    workload: Workload, plan: ParallelPlan, *, tolerance: float, executor: Executor = OWN_RUNTIME
) -> PlanCheck:
    """Return whether `plan` suits a workload, fits, is supported, and is at most `tolerance` slower than the best.

    `executor` is what the plan is for, and what the best plan has to suit. `tolerance` is relative: 0.05 allows a step
    that takes 5 % longer than the best plan's.
    """
    suits = suits_finding(plan, why_unsuitable(workload, plan), workload.model.name)
    if not suits.passed:
        return PlanCheck(plan=plan, findings=(suits,))
    if plan.world_size < workload.cluster.num_gpus:
        message = f"the plan has {plan.world_size} ranks, and the machines {workload.cluster.num_gpus} GPUs"
        return PlanCheck(plan=plan, findings=(suits, Finding(name="gpus", passed=False, message=message)))
    estimate = estimate_plan(workload, plan)
    findings = [suits, fits_finding(estimate), _supported(workload, plan, executor)]
    try:
        best = search(workload, num_candidates=1, executor=executor).best
    except NoPlanFitsError as error:
        findings.append(Finding(name="speed", passed=False, message=error.message))
        return PlanCheck(plan=plan, findings=tuple(findings), estimate=estimate)
    findings.append(_speed(estimate, best, tolerance))
    return PlanCheck(plan=plan, findings=tuple(findings), estimate=estimate, best=best)


def fits_finding(estimate: PlanEstimate) -> Finding:
    """Return whether a plan fits the usable memory of its GPUs."""
    needed, usable = format_bytes_apart(estimate.peak_memory_bytes, estimate.usable_memory_bytes)
    message = f"needs {needed} of {usable} usable per GPU"
    if not estimate.fits and estimate.peak_memory_bytes <= estimate.usable_memory_bytes:
        message += ", and more than the host's memory"
    return Finding(name="fits", passed=estimate.fits, message=message)


def limit_findings(
    estimate: PlanEstimate, *, max_memory_bytes: int | None, min_tokens_per_s: float | None
) -> list[Finding]:
    """Return whether an estimate keeps the limits that are given; the rate is that of one GPU."""
    findings = [fits_finding(estimate)]
    peak, rate = estimate.peak_memory_bytes, estimate.step.tokens_per_s_per_gpu
    if max_memory_bytes is not None:
        shown, most = format_bytes_apart(peak, max_memory_bytes)
        message = f"peak {shown}, at most {most} allowed"
        findings.append(Finding(name="max-memory", passed=peak <= max_memory_bytes, message=message))
    if min_tokens_per_s is not None:
        message = f"{format_count(rate)} tokens/s per GPU, at least {format_count(min_tokens_per_s)} wanted"
        findings.append(Finding(name="min-tokens-per-s", passed=rate >= min_tokens_per_s, message=message))
    return findings


def suits_finding(plan: ParallelPlan, found: Incompatibility | None, model: str) -> Finding:
    """Return whether a plan suits a model, its training and the machines."""
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    message = f"{model} on {ranks}, global batch {plan.global_batch_size}" if found is None else found.message
    return Finding(name="suits", passed=found is None, message=message)


def _supported(workload: Workload, plan: ParallelPlan, executor: Executor) -> Finding:
    reason = executor.reason_of(plan, workload.training, workload.model.num_blocks)
    if executor.is_own and reason is None:  # also the stages that a search rules out before
        training = workload.training
        reason = unsupported_reason(
            plan, num_blocks=workload.model.num_blocks, precision=training.precision, compiled=training.compiled
        )
    if executor is ANYTHING:
        message = f"what {workload.framework.title} executes is not known here"
        return Finding(name="supported", passed=True, message=message)
    message = f"{executor.name} executes it" if reason is None else f"{executor.name} does not execute it: {reason}"
    return Finding(name="supported", passed=reason is None, message=message)


def _speed(estimate: PlanEstimate, best: PlanEstimate, tolerance: float) -> Finding:
    ratio = estimate.step.step_time_s / best.step.step_time_s
    took = f"{format_seconds(estimate.step.step_time_s)} a step"
    if estimate.plan == best.plan:
        return Finding(name="speed", passed=True, message=f"{took}; it is the plan that is recommended")
    word = "slower" if ratio >= 1 else "faster"
    message = (
        f"{took}, {abs(ratio - 1):.1%} {word} than the best plan's {format_seconds(best.step.step_time_s)} "
        f"({best.plan.describe()}); {tolerance:.1%} slower is allowed"
    )
    return Finding(name="speed", passed=ratio <= 1 + tolerance, message=message)
