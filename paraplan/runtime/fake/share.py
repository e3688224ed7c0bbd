"""How many micro-batches of a step a fake run does: as many as tell of all, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.fake.collective_count import CollectiveCount
from paraplan.runtime.fake.storage_tracking import ALLOCATOR_UNIT_BYTES, StorageTracker, StorageUse
from paraplan.runtime.fake.torch_private import (
    START_OF_STAGE,
    START_OF_STAGES,
    PipelineStageBase,
    RecvInfo,
    replaced,
    stages_of,
)
from paraplan.runtime.pipeline.execution import PipelineExecution
from paraplan.runtime.pipeline.schedules import Schedule
from paraplan.runtime.step.execution import Execution

_GPIPE_FIRST = (
    4  # forward passes, of which the third tells what one keeps; the last of as many backward passes is alone
)


@dataclass(frozen=True)
class StepShare:
    """`count` of a step's micro-batches are run and `left` are not, in `left_rounds` equal parts."""

    count: int
    left: int
    left_rounds: int = 0

    @classmethod
    def of_step(cls, plan: ParallelPlan, num_steps: int) -> StepShare:
        """Return the share of the step after `num_steps`: the second does one more, which tells what one sends.

        Memory is the same in every micro-batch from the second on; in a pipeline from when as many are in flight as
        ever will be, but for what is kept of each (`KeptOfLeft`, and of GPipe `forward_passes_of_left`). Where stages
        of one rank take turns, `pp` micro-batches are a round of them: three rounds have a whole one in the middle.
        """
        whole = cls(count=plan.num_microbatches, left=0)
        turn = plan.pp if plan.virtual_pipeline_size > 1 else 1
        if plan.num_microbatches % turn:
            return whole
        if turn > 1:
            first = 2 * turn
        elif plan.pipeline_schedule == "gpipe":
            first = _GPIPE_FIRST
        else:
            first = 2 if plan.pp == 1 else plan.pp + 1
        if plan.num_microbatches <= first + turn:
            return whole
        count = first + num_steps * turn
        left = plan.num_microbatches - count
        return cls(count=count, left=left, left_rounds=left // turn)


@contextmanager
def forward_passes_of_left(tracker: StorageTracker, share: StepShare) -> Iterator[None]:
    """Count in this context, a step under GPipe, what the forward passes of micro-batches that are not run would keep.

    They come before the last one that is run, and all but one of the backward passes before the last. What each keeps
    is what the third one does.
    """
    held: list[Counter[StorageUse]] = []
    ends: list[Callable[[], None]] = []
    plain_forward, plain_backward = PipelineStageBase.forward_one_chunk, PipelineStageBase.backward_one_chunk

    def forward(stage: Any, index: int, *args: Any, **options: Any) -> Any:
        out = plain_forward(stage, index, *args, **options)
        if index < _GPIPE_FIRST - 1:
            held.append(tracker.held())
        if index == _GPIPE_FIRST - 2:
            each = {use: held[-1][use] - held[-2][use] for use in held[-1]}
            if stage.is_last:
                each["activation"] -= ALLOCATOR_UNIT_BYTES  # the loss, which outlives the pass
            ends.append(tracker.add({use: share.left * size_bytes for use, size_bytes in each.items()}))
        return out

    def backward(stage: Any, index: int, *args: Any, **options: Any) -> Any:
        if index == share.count - 1:
            ends.pop()()
        return plain_backward(stage, index, *args, **options)

    stage = PipelineStageBase
    with replaced((stage, "forward_one_chunk", forward), (stage, "backward_one_chunk", backward)):
        yield


@dataclass(frozen=True)
class KeptOfLeft:
    """Tensors like those that a pipeline keeps of each of its micro-batches, for the ones that are not run.

    `buffers` are made at the start of a schedule, to receive in, and the last stage keeps each loss beside them. Zero
    bubble also keeps the gradient of each input (`gradients`), since it takes the backward pass in halves.
    """

    buffers: Sequence[torch.Tensor] = field(default=(), repr=False)
    gradients: Sequence[torch.Tensor] = field(default=(), repr=False)

    @classmethod
    def of(cls, execution: Execution, left: int, *, in_halves: bool) -> KeptOfLeft:
        """Return them for `left` micro-batches, under zero bubble `in_halves`.

        Drops the schedules that `execution` has, with their buffers.
        """
        if not isinstance(execution, PipelineExecution) or not left:
            return cls()
        schedules = [schedule for schedule, _ in execution._runs.values()]
        execution._runs.clear()
        there = [one for schedule in schedules for one in _received_first(schedule, "args_recv_info")]
        back = [one for schedule in schedules for one in _received_first(schedule, "grad_recv_info")]
        losses = [torch.empty(()) for schedule in schedules if stages_of(schedule)[-1].is_last for _ in range(left)]
        return cls(
            buffers=[*losses, *(torch.empty_like(one) for one in there + back for _ in range(left))],
            gradients=[torch.empty_like(one) for one in there for _ in range(left)] if in_halves else (),
        )


def _received_first(schedule: Schedule, way: str) -> list[torch.Tensor]:
    """Return the buffers in which `schedule` receives its first micro-batch."""
    received = [info for stage in stages_of(schedule) for info in getattr(stage, way).get(0, ())]
    return [info.buffer for info in received if isinstance(info, RecvInfo) and info.buffer is not None]


@contextmanager
def starts_uncounted(collectives: CollectiveCount) -> Iterator[None]:
    """Leave out what neighbours send each other when a schedule is first used, and not in later steps."""
    places: list[tuple[Any, str]] = [
        (PipelineScheduleSingle, START_OF_STAGE),
        (PipelineScheduleMulti, START_OF_STAGES),
    ]
    with ExitStack() as stack:
        for owner, name in places:
            plain = getattr(owner, name)

            def start(schedule: Any, *args: Any, _plain: Any = plain, **options: Any) -> Any:
                with collectives.paused():
                    return _plain(schedule, *args, **options)

            stack.enter_context(replaced((owner, name, start)))
        yield
