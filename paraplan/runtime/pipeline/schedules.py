"""Torch's pipeline schedules by the names of the plan, built for the stages of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from paraplan.plan.parallel import ScheduleName
from paraplan.runtime.data_parallel.gradient_sums import GradientSum
from paraplan.runtime.torch_private import stage_backward_weight

Schedule = PipelineScheduleSingle | PipelineScheduleMulti

SINGLE: dict[ScheduleName, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
# With one stage a rank the zero-bubble schedule is ZB-H1 (Qi et al. 2024, section 2.2), of 1F1B's memory.
MULTI: dict[ScheduleName, type[PipelineScheduleMulti]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


_COUNTS_TWICE = torch.__version__ < "2.13"
"""Whether torch's second half of a backward pass counts twice what one saved gradient of a group gives to another."""


class ReplicatedStage(PipelineStage):
    """A stage of which a schedule of several stages says when its gradients are complete."""

    replicas: GradientSum
    averaged: Sequence[torch.nn.Parameter] = ()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Let the gradients of the stage travel: shards by FSDP, replicas by `GradientSum`."""
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
        groups = disjoint_groups(bwd_kwargs["param_groups"])
        if _COUNTS_TWICE:
            _give_weights_their_gradients(groups)
            return (), None
        return stage_backward_weight(self.submod.parameters(), groups, retain_graph=True), None


def disjoint_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of weights of a backward pass, of which each weight is in one alone.

    Where a weight joins groups that torch has made before, it leaves one of them beside what they become: a weight that
    works in several blocks, and those around it, would get a gradient from each. Nodes that nothing arrived at, and
    groups of such alone, are left out.
    """
    found: list[dict[str, Any]] = []
    for group in groups:
        arrived = group.pop("grads", None) or ()
        saved = {
            node: gradients
            for node, gradients in zip(group.pop("intermediates"), arrived, strict=False)
            if gradients is not None
        }
        params = set(group["params"])
        sharing = [one for one in found if not params.isdisjoint(one["params"])]
        found = [one for one in found if params.isdisjoint(one["params"])]
        for other in sharing:
            params |= other["params"]
            saved |= dict(zip(other["intermediates"], other["grads"], strict=True))
        found.append({"params": params, "intermediates": [*saved], "grads": [*saved.values()]})
    return [group for group in found if group["grads"]]


def _give_weights_their_gradients(groups: Sequence[dict[str, Any]]) -> None:
    """Run the second half of a backward pass from what the first has saved, once for each gradient that it saved.

    A group holds nodes of the graph ("intermediates"), what arrived at each of them in the first half ("grads"; None
    where nothing did), and the ends of its parameters ("params"). A node that lies behind another one is given what it
    had, not the sum of that and what comes to it again.
    """
    for group in groups:
        arrived = group.pop("grads", None) or ()
        nodes = zip(group.pop("intermediates"), arrived, strict=False)
        saved = [(node, gradients) for node, gradients in nodes if gradients is not None]
        starts = [
            (GradientEdge(node, number), gradient)
            for node, gradients in saved
            for number, gradient in enumerate(gradients)
            if gradient is not None
        ]
        if not starts:
            continue
        hooks = [node.register_prehook(lambda _, gradients=gradients: gradients) for node, gradients in saved]
        try:
            found = torch.autograd.grad(
                [edge for edge, _ in starts],
                [GradientEdge(end, 0) for end in group["params"]],
                grad_outputs=[gradient for _, gradient in starts],
                retain_graph=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        for end, gradient in zip(group["params"], found, strict=True):
            parameter = end.variable
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


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
