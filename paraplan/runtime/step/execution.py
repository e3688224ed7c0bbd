"""Running the micro-batches of a step through a model that one rank holds from start to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.data.batches import MicroBatch
from paraplan.runtime.data_parallel.gradient_sums import GradientSum
from paraplan.runtime.data_parallel.wrapping import gradient_sync
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.precision import compute_context
from paraplan.runtime.step.loss import StepLoss


class Execution(Protocol):
    """Runs micro-batches. What their losses come to is in the tally of `loss`, on ranks with the end of the model."""

    loss: StepLoss

    def train(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run forward and backward passes, and leave the gradients of the weighted loss in place."""
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run forward passes without gradients."""
        ...

    def forget_runs(self) -> None:
        """Let go what is kept of the runs of batches so far."""
        ...


class WholeModelExecution:
    """One micro-batch after another through the whole model: one process, DDP, ZeRO.

    `sums` are those of gradients that no wrapper sums.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        *,
        loss: StepLoss,
        precision: TrainingPrecision,
        sums: Sequence[GradientSum],
    ) -> None:
        self.loss = loss
        self._module, self._mesh, self._precision = module, mesh, precision
        self._sums = [one for one in sums if one.parameters]

    def train(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run forward and backward passes, and leave the gradients of the weighted loss in place."""
        self.loss.start()
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with gradient_sync(self._module, zero_stage=self._mesh.plan.zero_stage, is_last=is_last):
                self._loss_of(micro_batch).backward()  # type: ignore[no-untyped-call]
        for one in self._sums:
            one.sum()

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run forward passes without gradients."""
        self.loss.start()
        with torch.no_grad():
            for micro_batch in micro_batches:
                self._loss_of(micro_batch)

    def forget_runs(self) -> None:
        """Keep nothing of a run."""

    def _loss_of(self, micro_batch: MicroBatch) -> torch.Tensor:
        with compute_context(self._precision, self._mesh.world.device):
            return self.loss.run(self._module, micro_batch.inputs, micro_batch)
