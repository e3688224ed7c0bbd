"""Running the micro-batches of a step through a model that one rank holds from start to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.data.batches import MicroBatch
from paraplan.runtime.data_parallel.partial_gradients import PartialGradients
from paraplan.runtime.data_parallel.replica_gradients import ReplicaGradients
from paraplan.runtime.data_parallel.wrapping import GradientSync
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

    `replicas` sums the gradients of parameters that stay whole under ZeRO, `experts` those of experts that no wrapper
    does; those of `partial` are summed over `tp`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        sync: GradientSync,
        loss: StepLoss,
        precision: TrainingPrecision,
        device: torch.device,
        replicas: ReplicaGradients,
        experts: ReplicaGradients,
        partial: PartialGradients | None = None,
    ) -> None:
        self.loss = loss
        self._module = module
        self._replicas = replicas
        self._experts = experts
        self._partial = partial or PartialGradients()
        self._sync = sync
        self._precision = precision
        self._device = device

    def train(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run forward and backward passes, and leave the gradients of the weighted loss in place."""
        self.loss.start()
        for index, micro_batch in enumerate(micro_batches):
            with self._sync.micro_batch(is_last=index == len(micro_batches) - 1):
                self._loss_of(micro_batch).backward()  # type: ignore[no-untyped-call]
        self._replicas.sum()
        self._experts.sum()
        self._partial.sum()

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run forward passes without gradients."""
        self.loss.start()
        with torch.no_grad():
            for micro_batch in micro_batches:
                self._loss_of(micro_batch)

    def forget_runs(self) -> None:
        """Keep nothing of a run."""

    def _loss_of(self, micro_batch: MicroBatch) -> torch.Tensor:
        with compute_context(self._precision, self._device):
            return self.loss.run(self._module, micro_batch.inputs, micro_batch)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Have `module` and its parts in evaluation mode in this context, and in their own modes behind it."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was_training in modes.items():
            part.training = was_training
