"""Torch's pipeline schedules by the names of the plan, built for the stages of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from paraplan.plan.parallel import ScheduleName
from paraplan.runtime.replica_gradients import ReplicaGradients

Schedule = PipelineScheduleSingle | PipelineScheduleMulti

SINGLE: dict[ScheduleName, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
# With one stage a rank the zero-bubble schedule is ZB-H1 (Qi et al. 2024, section 2.2), of 1F1B's memory.
MULTI: dict[ScheduleName, type[PipelineScheduleMulti]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class ReplicatedStage(PipelineStage):
    """A stage of which a schedule of several stages says when its gradients are complete."""

    replicas: ReplicaGradients
    averaged: Sequence[torch.nn.Parameter] = ()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Let the gradients of the stage travel: shards by FSDP, replicas by `ReplicaGradients`."""
        if not self.has_backward:
            return
        if isinstance(self.submod, FSDPModule):
            super().perform_reduce_grad(grad_scale_factor)
        self.replicas.start(self.averaged)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward pass or a half of one. The second half keeps its graph, which weights may share."""
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if isinstance(self.submod, FSDPModule):  # what the parent does: REDUCE_GRAD is the last
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        return stage_backward_weight(self.submod.parameters(), bwd_kwargs["param_groups"], retain_graph=True), None


def build_schedule(
    name: ScheduleName, stages: Sequence[PipelineStage], *, num_microbatches: int, trains: bool
) -> Schedule:
    """Return the schedule `name` over this rank's `stages`, the last of which returns the loss as its output.

    Passes without gradients need no order of their own: forward after forward is what GPipe does.
    """
    options: dict[str, Any] = {"n_microbatches": num_microbatches, "loss_fn": _the_loss, "scale_grads": False}
    if name in SINGLE:
        (stage,) = stages
        return (SINGLE[name] if trains else ScheduleGPipe)(stage, **options)
    return MULTI[name](list(stages), **options)


def _the_loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.sum()  # of one number; no view, which a backward pass in halves could not detach
