"""What one rank's part of a model depends on besides the model."""

from __future__ import annotations

from dataclasses import dataclass

from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.step.execution import LossFunction


@dataclass(frozen=True)
class Setting:
    """A plan on a mesh, in a precision, with the loss that is trained."""

    plan: ParallelPlan
    mesh: Mesh
    precision: TrainingPrecision
    loss_fn: LossFunction
