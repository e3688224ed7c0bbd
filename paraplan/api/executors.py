"""Who executes the plans of a workload: paraplan's runtime, or the framework that it is modelled for."""

from __future__ import annotations

from functools import partial

from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.plan.executor import ANYTHING, OWN_RUNTIME, Executor, ReasonOf, training_gap
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, ParallelPlan
from paraplan.plan.training import TrainingSpec


def executor_of(workload: Workload) -> Executor:
    """Return what executes plans for a workload: of another framework what its exported configuration can say.

    Raises `PlanError` where the framework cannot do the training at all, as with an optimizer that it lacks.
    """
    framework = workload.framework
    if framework.is_own_runtime:
        return OWN_RUNTIME
    if framework.export_target is not None:
        return executor_of_target(framework.export_target, workload, title=framework.title)
    executor = Executor(framework.name, partial(_lacking, framework, ANYTHING.reason_of))
    return _that_trains(executor, framework.title, workload)


def why_unplanned(workload: Workload, plan: ParallelPlan) -> str | None:
    """Return why a search for another framework leaves a plan out, None where it might choose it."""
    if workload.framework.is_own_runtime:  # which warns of what it cannot run
        return None
    try:
        return executor_of(workload).reason_of(plan, workload.training, workload.model.num_blocks)
    except PlanError as error:
        return error.message


def _lacking(
    framework: FrameworkProfile, reason_of: ReasonOf, plan: ParallelPlan, training: TrainingSpec, num_blocks: int
) -> str | None:
    """Return why a framework cannot execute a plan: an option that it lacks, or what its configuration cannot say.

    The framework's configuration says the plan alone where other tools hand it what a step learns from.
    """
    if framework.task_tools is not None and training.learns_from.is_run_by_trl:
        training = training.replace(task="sft")
    return framework.levers.lacking(training) or framework.fixed.lacking(plan) or reason_of(plan, training, num_blocks)


def executor_of_target(target: str, workload: Workload, *, title: str = "") -> Executor:
    """Return what executes plans that a target of `paraplan export` can say; `title` names it in errors.

    Raises `PlanError` where it cannot do the training at all, as with an optimizer that it lacks.
    """
    from paraplan.interop.export import spreads_experts, why_inexpressible  # all targets: our own runtime needs none

    reason_of = partial(_lacking, workload.framework, partial(why_inexpressible, target))
    executor = Executor(target, reason_of, spreads_experts=spreads_experts(target), rank_orders=(MEGATRON_RANK_ORDER,))
    return _that_trains(executor, title or target, workload)


def _that_trains(executor: Executor, name: str, workload: Workload) -> Executor:
    """Return an executor. Raises `PlanError` where it cannot do the training under any plan."""
    gap = training_gap(executor, workload.training, workload.model.num_blocks)
    if gap is not None:
        is_task = gap.startswith("--task ")
        hint = "use --framework fsdp, hf or deepspeed" if is_task else "change that, or plan for another --framework"
        raise PlanError(f"{name} cannot train so: {gap}", hint=hint)
    return executor
