"""Running the micro-batches of a step through a pipeline of stages, by torch's own schedules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.utils import _pytree as pytree

from paraplan.errors import ParaplanError
from paraplan.plan.parallel import ScheduleName
from paraplan.runtime.anatomy import Anatomy, HiddenShape
from paraplan.runtime.batches import MicroBatch
from paraplan.runtime.setting import Setting
from paraplan.runtime.stage_module import StageModule
from paraplan.runtime.ties import TiedGradients

SCHEDULES: dict[ScheduleName, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_KEPT_SHAPES = 4


class PipelineExecution:
    """Micro-batches through the stages of a pipeline, one stage a rank.

    Sizes of the hidden states follow from the shapes of a micro-batch, and a schedule is kept for each: buffers of
    another size would end the process inside gloo.
    """

    def __init__(
        self,
        stage: StageModule,
        called: nn.Module,
        *,
        anatomy: Anatomy,
        bounds: Sequence[tuple[int, int]],
        setting: Setting,
        ties: TiedGradients,
    ) -> None:
        self._stage = stage
        self._called = called
        self._anatomy = anatomy
        self._bounds = bounds
        self._setting = setting
        self._mesh = setting.mesh
        self._ties = ties
        self._runs: OrderedDict[Any, tuple[PipelineScheduleSingle, HiddenShape]] = OrderedDict()

    def train(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Run forward and backward passes, leave the gradients of the mean loss in place, and return that loss."""
        loss = self._run(micro_batches, trains=True)
        self._ties.sum_gradients()
        return loss

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Run forward passes without gradients and return the mean loss."""
        with torch.no_grad():
            return self._run(micro_batches, trains=False)

    def _run(self, micro_batches: Sequence[MicroBatch], *, trains: bool) -> torch.Tensor:
        schedule, self._stage.sent = self._schedule_for(micro_batches, trains=trains)
        self._stage.micro_batches = micro_batches
        numbers = torch.arange(len(micro_batches))
        losses: list[torch.Tensor] = []
        arguments = (numbers,) if self._mesh.is_first_stage else ()
        last: dict[str, Any] = {"target": numbers, "losses": losses} if self._mesh.is_last_stage else {}
        run = schedule.step if trains else schedule.eval
        try:
            run(*arguments, number=numbers, return_outputs=False, **last)
        except RuntimeError as error:
            # torch wraps what a stage raises; what a user can mend is shown as it is.
            if isinstance(error.__cause__, ParaplanError):
                raise error.__cause__ from None
            raise
        finally:
            self._stage.micro_batches = ()
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self._mesh.world.device))

    def _schedule_for(
        self, micro_batches: Sequence[MicroBatch], *, trains: bool
    ) -> tuple[PipelineScheduleSingle, HiddenShape]:
        inputs = micro_batches[0].inputs
        shapes = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in pytree.tree_leaves(inputs)
        )
        key = (trains, len(micro_batches), shapes)
        if key not in self._runs:
            self._runs[key] = self._build(inputs, num_microbatches=len(micro_batches), trains=trains)
            if len(self._runs) > _KEPT_SHAPES:
                self._runs.popitem(last=False)
        self._runs.move_to_end(key)
        return self._runs[key]

    def _build(self, inputs: Any, *, num_microbatches: int, trains: bool) -> tuple[PipelineScheduleSingle, HiddenShape]:
        index = self._mesh.coordinate("pp")
        start, end = self._bounds[index]
        hidden = self._anatomy.hidden_shapes(inputs)
        received = (
            torch.zeros(1, dtype=torch.long) if self._mesh.is_first_stage else self._example(hidden[start], trains)
        )
        is_last = self._mesh.is_last_stage
        sent = torch.zeros(1, requires_grad=trains) if is_last else self._example(hidden[end], trains)
        stage = PipelineStage(
            self._called,
            index,
            self._mesh.size("pp"),
            self._mesh.world.device,
            input_args=(received,),
            output_args=(sent,),
            group=self._mesh.group("pp"),
        )
        # Passes without gradients need no order of their own: forward after forward is what GPipe does.
        kind = SCHEDULES[self._setting.plan.pipeline_schedule or "gpipe"] if trains else ScheduleGPipe
        schedule = kind(stage, num_microbatches, loss_fn=_the_loss, scale_grads=False)
        return schedule, HiddenShape(shape=tuple(sent.shape), dtype=sent.dtype)

    def _example(self, hidden: HiddenShape, trains: bool) -> torch.Tensor:
        # Under mixed precision hidden states travel in 16 bits, whatever the model's residual stream is kept in.
        dtype = torch.bfloat16 if self._setting.precision == "bf16" else hidden.dtype
        return torch.empty(hidden.shape, dtype=dtype, device="meta", requires_grad=trains)


def _the_loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output[0]
