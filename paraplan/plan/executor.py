"""Executors of plans: paraplan's own runtime, or another framework as far as its configuration can say a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.plan.support import training_reason, unsupported_reason
from paraplan.plan.training import TrainingSpec

ReasonOf = Callable[[ParallelPlan, TrainingSpec, int], "str | None"]
"""Returns why a plan, for a training of a model with so many blocks, cannot be executed; None where it can."""


@dataclass(frozen=True, eq=False)
class Executor:
    """One that executes plans."""

    name: str
    reason_of: ReasonOf
    is_own: bool = False
    """True of paraplan's runtime."""
    spreads_experts: bool | None = None
    """Whether it spreads experts over ranks, None where the profile of its framework says so."""
    rank_orders: tuple[tuple[Axis, ...], ...] | None = None
    """The orders of ranks that it can lay out; None for all."""


def _own_reason(plan: ParallelPlan, training: TrainingSpec, num_blocks: int) -> str | None:
    del num_blocks  # stages that are too many are ruled out before
    return training_reason(training, plan) or unsupported_reason(
        plan, precision=training.precision, compiled=training.compiled
    )


OWN_RUNTIME = Executor("paraplan.runtime", _own_reason, is_own=True)
ANYTHING = Executor("any framework", lambda plan, training, num_blocks: None)
"""Executes every plan that makes sense, of a framework whose configuration nobody here writes."""


def training_gap(executor: Executor, training: TrainingSpec, num_blocks: int) -> str | None:
    """Return why an executor cannot do a training at all, under the plainest plans; None where it can."""
    sharded = ParallelPlan(dp=2, zero_stage=3)
    plainest = (ParallelPlan(recompute="full"), sharded.replace(recompute="full"), ParallelPlan(), sharded)
    found = [executor.reason_of(plan, training, num_blocks) for plan in plainest]  # some tools do one of these alone
    if None in found:
        return None
    plain = TrainingSpec(global_batch_size=2, seq_length=1024)  # of plans that it cannot execute anyway it says that
    executed = [
        reason
        for plan, reason in zip(plainest, found, strict=True)
        if executor.reason_of(plan, plain, num_blocks) is None
    ]
    return (executed or found)[0]
