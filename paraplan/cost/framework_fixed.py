"""Options that a framework switches on whatever a training names, and the axes that it has where no target says so."""

from __future__ import annotations

from paraplan.plan.parallel import Degree, ParallelPlan, Recompute
from paraplan.plan.stack import FusedKernels
from paraplan.plan.training import LossKernel, TrainingSpec
from paraplan.records import Record, Source


class FixedChoices(Record):
    """Settings of a framework that nobody has to ask for; None and False leave what a training names."""

    loss: LossKernel | None = None
    """The kernel of the loss on given sequences, in place of the plain one."""
    fused_kernels: FusedKernels | None = None
    """Fused kernels where a training names none."""
    offloads_activations: bool = False
    """Activations that are kept wait on the host."""
    recompute: Recompute | None = None
    """The kind of recompute of its plans."""
    axes: tuple[Degree, ...] | None = None
    """Degrees of parallelism that it has; None: all, or those that its exported configuration has."""
    sources: tuple[Source, ...] = ()
    """Where the values come from."""

    def applied_to(self, training: TrainingSpec) -> TrainingSpec:
        """Return a training as the framework runs it."""
        changes: dict[str, object] = {}
        if self.loss is not None and training.loss == "plain" and training.task == "sft":
            changes["loss"] = self.loss
        if self.offloads_activations:
            changes["offloads_activations"] = True
        if self.fused_kernels is not None and training.stack.fused_kernels is None:
            changes["stack"] = training.stack.replace(fused_kernels=self.fused_kernels)
        return training.replace(**changes) if changes else training

    def lacking(self, plan: ParallelPlan) -> str | None:
        """Return which degree of a plan the framework lacks, None where it has all."""
        if self.axes is None:
            return None
        lacking = [
            name for name, size in (plan.degrees | {"ep": plan.ep}).items() if size > 1 and name not in self.axes
        ]
        return f"{', '.join(lacking)}: it has {' and '.join(self.axes)} alone" if lacking else None
