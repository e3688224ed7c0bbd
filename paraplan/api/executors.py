"""Who executes the plans of a workload: paraplan's runtime, or the framework that it is modelled for."""

from __future__ import annotations

from functools import partial

from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.plan.executor import ANYTHING, OWN_RUNTIME, Executor
from paraplan.plan.parallel import MEGATRON_RANK_ORDER, ParallelPlan


def executor_of(workload: Workload) -> Executor:
    """Return what executes plans for a workload: of another framework what its exported configuration can say.

    Raises `PlanError` where the framework cannot do the training at all, as with an optimizer that it lacks.
    """
    framework = workload.framework
    if framework.is_own_runtime:
        return OWN_RUNTIME
    if framework.export_target is None:
        return ANYTHING
    return executor_of_target(framework.export_target, workload)


def executor_of_target(target: str, workload: Workload) -> Executor:
    """Return what executes plans that a target of `paraplan export` can say.

    Raises `PlanError` where it cannot do the training at all, as with an optimizer that it lacks.
    """
    from paraplan.interop.export import spreads_experts, why_inexpressible  # all targets: our own runtime needs none

    plainest = (ParallelPlan(), ParallelPlan(dp=2, zero_stage=3))  # without shards and with: some tools do one alone
    found = [why_inexpressible(target, plan, workload.training, workload.model.num_blocks) for plan in plainest]
    if None not in found:
        raise PlanError(f"{target} cannot train so: {found[-1]}", hint="change that, or leave out --framework")
    return Executor(
        target,
        partial(why_inexpressible, target),
        spreads_experts=spreads_experts(target),
        rank_orders=(MEGATRON_RANK_ORDER,),
    )
