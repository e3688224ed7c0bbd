"""A pipeline stage as torch's schedules call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paraplan.errors import UsageError
from paraplan.plan.training import TrainingPrecision
from paraplan.runtime.anatomy import HiddenShape
from paraplan.runtime.pipeline.stage_split import Inject, StageEndError
from paraplan.runtime.precision import compute_context
from paraplan.runtime.split.context_parallel import split_tokens
from paraplan.runtime.split.group import TensorGroup
from paraplan.runtime.split.split_tensor import CONTEXT, SplitError, SplitTensor
from paraplan.runtime.step.batches import MicroBatch
from paraplan.runtime.step.loss import StepLoss, split_error
from paraplan.runtime.torch_private import is_view


class StageModule(nn.Module):
    """A stage as torch's schedules call it: a hidden state in and out; on the last stage the loss out.

    The micro-batches of a step are handed over beforehand, whole, and the schedule passes their numbers: every stage
    makes its own masks and positions from the inputs. `context` is the `cp` group, whose ranks have some tokens of each
    sequence: inputs and received hidden states are split, and plain tensors travel.
    """

    def __init__(
        self,
        model: nn.Module,
        inject: Inject | None,
        *,
        is_last: bool,
        loss: StepLoss,
        precision: TrainingPrecision,
        device: torch.device,
        context: TensorGroup | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._inject = inject if inject is None else [inject]  # in a list: it is no second child of this module
        self._is_last = is_last
        self._loss = loss
        self._precision = precision
        self._device = device
        self._context = context
        self.micro_batches: Sequence[MicroBatch] = ()
        self.received: HiddenShape | None = None
        self.sent: HiddenShape | None = None

    def forward(self, received: torch.Tensor, *, number: torch.Tensor) -> torch.Tensor:
        """Return the hidden state after this stage, or the loss, of micro-batch `number`.

        `received` is the hidden state before this stage; the first stage is given the number in its place.
        """
        micro_batch = self.micro_batches[int(number)]
        inputs = micro_batch.inputs if self._context is None else split_tokens(micro_batch.inputs, self._context)
        if self._inject is not None:
            self._inject[0].hold(self._with_context(_with_contiguous_gradient(received)))
        try:
            with compute_context(self._precision, self._device):
                return self._loss.run(self.model, inputs, micro_batch).reshape(1)
        except StageEndError as end:
            return self._sendable(end.hidden)
        except SplitError as error:
            raise split_error(error, self._context) from error
        finally:
            if self._inject is not None:
                self._inject[0].hold(None)

    def _with_context(self, received: torch.Tensor) -> torch.Tensor:
        cut = None if self.received is None else self.received.cut
        if self._context is None or cut is None:
            return received
        whole: torch.Tensor = SplitTensor(received, cut, self._context, CONTEXT)
        return whole

    def _sendable(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `hidden` as the next stage expects it; a buffer of another size would end the process inside gloo."""
        if isinstance(hidden, SplitTensor):
            hidden = hidden.local
        if self.sent is None or hidden.shape != self.sent.shape:
            raise UsageError(
                f"this stage's hidden state has shape {tuple(hidden.shape)}, and {self.sent and self.sent.shape} was "
                "found for these inputs without values",
                hint="use pp=1 for this model",
            )
        sendable = hidden.to(self.sent.dtype).contiguous()
        # A backward pass in halves (zero bubble) detaches it in place, which a view does not allow.
        return sendable.clone() if is_view(sendable) else sendable


def _with_contiguous_gradient(received: torch.Tensor) -> torch.Tensor:
    """Return a received tensor, whose gradient will travel back."""
    passed: torch.Tensor = _ContiguousGradient.apply(received)  # type: ignore[no-untyped-call]
    return passed


class _ContiguousGradient(torch.autograd.Function):
    """Returns a tensor as it is, and its gradient in the layout in which it can be sent."""

    @staticmethod
    def forward(_: Any, received: torch.Tensor) -> torch.Tensor:
        return received.view_as(received)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()
