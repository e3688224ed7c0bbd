"""Running the micro-batches of a step through a model that one rank holds from start to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from paraplan.errors import UsageError
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.data_parallel import GradientSync
from paraplan.runtime.pipeline.replica_gradients import ReplicaGradients
from paraplan.runtime.precision import compute_context
from paraplan.runtime.split.context_parallel import context_error, split_tokens
from paraplan.runtime.split.group import TensorGroup
from paraplan.runtime.split.split_tensor import SplitError
from paraplan.runtime.step.batches import MicroBatch, call_model

LossFunction = Callable[[Any, Any], torch.Tensor]


class Execution(Protocol):
    """Runs micro-batches. Losses are sums by the weights of these, 0 on ranks without the end of the model."""

    def train(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Run forward and backward passes, leave the gradients of the weighted loss in place, and return it."""
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Run forward passes without gradients and return the weighted loss."""
        ...


class WholeModelExecution:
    """One micro-batch after another through the whole model: one process, DDP, ZeRO.

    `context` is the `cp` group, where each rank has some of the tokens. `apart` are parameters that stay whole under
    ZeRO, whose gradients `replicas` averages.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        sync: GradientSync,
        loss_fn: LossFunction,
        precision: TrainingPrecision,
        device: torch.device,
        replicas: ReplicaGradients,
        context: TensorGroup | None = None,
        apart: Sequence[nn.Parameter] = (),
    ) -> None:
        self._module = module
        self._replicas = replicas
        self._apart = apart
        self._context = context
        self._copies = 1 if context is None else context.size  # of the loss, which all ranks of `cp` have
        self._sync = sync
        self._loss_fn = loss_fn
        self._precision = precision
        self._device = device

    def train(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Run forward and backward passes, leave the gradients of the weighted loss in place, and return it."""
        total = torch.zeros((), device=self._device)
        for index, micro_batch in enumerate(micro_batches):
            with self._sync.micro_batch(is_last=index == len(micro_batches) - 1):
                loss = self._loss(micro_batch)
                # Ranks of `cp` have parts of one gradient, and data parallelism takes the mean over them too.
                (loss * self._copies).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / self._copies
        self._replicas.start(self._apart)
        self._replicas.finish()
        return total

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Run forward passes without gradients and return the weighted loss."""
        total = torch.zeros((), device=self._device)
        with torch.no_grad():
            for micro_batch in micro_batches:
                total += self._loss(micro_batch) / self._copies
        return total

    def _loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        inputs = micro_batch.inputs
        if self._context is not None:
            inputs = split_tokens(inputs, self._context)
        try:
            with compute_context(self._precision, self._device):
                outputs = call_model(self._module, inputs)
                return weighted_loss(self._loss_fn(outputs, micro_batch.targets), micro_batch)
        except SplitError as error:
            if self._context is None:
                raise
            raise context_error(error, self._context) from error


def scalar_loss(loss: Any) -> torch.Tensor:
    """Return `loss` as a tensor without dimensions; raise `UsageError` where it is no number to train by."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UsageError(f"loss_fn returned {found}, not one number", hint="return the mean loss over the micro-batch")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UsageError(
            "loss_fn returned a number that has no gradient",
            hint="compute it from the model's outputs, without detach, item or torch.no_grad",
        )
    return loss.reshape(())


def weighted_loss(loss: Any, micro_batch: MicroBatch) -> torch.Tensor:
    """Return what `loss_fn` returned for `micro_batch` by its weight in the step; 0 where that is 0, whatever it was.

    A micro-batch whose targets are all masked has no mean: its loss is NaN, and its gradients are 0.
    """
    weight = micro_batch.weight
    assert weight is not None
    return torch.where(weight > 0, scalar_loss(loss).float() * weight, 0.0)
