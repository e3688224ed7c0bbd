"""What one rank's part of a model depends on besides the model."""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.recompute_policy import RecomputePolicy
from paraplan.runtime.split.trial import seen_through
from paraplan.runtime.step.global_batch import GlobalBatch
from paraplan.runtime.step.loss import LossFunction, StepLoss


@dataclass(frozen=True)
class Setting:
    """A plan on a mesh, in a precision, with the loss that is trained.

    `find_unused` says that parameters may take no part in some steps; `recompute` refines what the plan says of it.
    """

    plan: ParallelPlan
    mesh: Mesh
    precision: TrainingPrecision
    loss: StepLoss
    find_unused: bool = False
    recompute: RecomputePolicy | None = None

    @classmethod
    def of(
        cls,
        plan: ParallelPlan,
        mesh: Mesh,
        precision: TrainingPrecision,
        loss_fn: LossFunction,
        *,
        find_unused: bool = False,
        recompute: RecomputePolicy | None = None,
    ) -> Setting:
        """Return the setting of a training by `loss_fn`, which sees split outputs under tp and cp."""
        if plan.tp * plan.cp > 1:
            loss_fn = seen_through(loss_fn)
        loss = StepLoss(loss_fn, mesh.world.device, GlobalBatch(mesh))
        return cls(plan=plan, mesh=mesh, precision=precision, loss=loss, find_unused=find_unused, recompute=recompute)
