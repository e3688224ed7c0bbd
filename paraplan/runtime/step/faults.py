"""Faults of a step: a loss that is not a number, and memory that runs out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paraplan.errors import ParaplanError, UnsupportedPlanError, UsageError
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.agreement import is_lost_connection
from paraplan.runtime.data_parallel.wrapping import reads_shards
from paraplan.runtime.exchange import gathered_numbers
from paraplan.runtime.step.totals import StepTotals
from paraplan.runtime.structure.weights import local_shard
from paraplan.runtime.timeouts import waited_s
from paraplan.runtime.torch_private import (
    NO_HOST_MEMORY,
    NO_SHARDING,
    NO_STORAGE,
    ONE_ENTRY,
    SPARSE_GRADIENT,
    USED_TWICE,
    WRITTEN_IN_PLACE,
    is_of_torch,
)
from paraplan.runtime.world import World
from paraplan.units import format_bytes

_LOGGER = logging.getLogger(__name__)
_MOST_EMPTY = 2  # steps from the start that may train nothing


class DivergedError(ParaplanError):
    """A loss that is infinite or not a number."""

    exit_status = 1


@dataclass(frozen=True)
class _Step:
    """The loss of one step over all ranks, and the number of its targets; `own` is the loss of this rank.

    On a GPU `numbers` are on their way to the host, and there when `is_copied` has happened.
    """

    step: int
    numbers: torch.Tensor
    own: torch.Tensor
    is_copied: torch.cuda.Event | None = None

    @classmethod
    def of(cls, step: int, totals: StepTotals, own: torch.Tensor) -> _Step:
        count = torch.ones_like(totals.loss) if totals.count is None else totals.count.to(totals.loss)
        numbers = torch.stack([totals.loss.detach(), count])
        if not numbers.is_cuda:
            return cls(step, numbers, own)
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        on_host.copy_(numbers, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return cls(step, on_host, own, copied)

    def values(self) -> tuple[float, float]:
        """Return loss and count; waits for its own step and for nothing that was started since."""
        if self.is_copied is not None:
            self.is_copied.synchronize()
        loss, count = self.numbers.tolist()
        return loss, count


class LossWatch:
    """The losses of the last steps, looked at before weights made with it are used or kept.

    On a CPU that is at once. On a GPU the loss is copied to the host behind its step, and looked at two steps later:
    meanwhile the GPU has the next step to do. No checkpoint is written and nothing is evaluated before all losses were
    looked at.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[_Step] = []
        self._num_empty = self._num_seen = 0

    def add(self, totals: StepTotals, *, step: int, own: torch.Tensor, is_read: bool) -> None:
        """Watch the loss of `step`: `totals` over all ranks, `own` of this rank. Without `is_read` it has no value."""
        if not is_read:
            return
        self._waiting.append(_Step.of(step, totals, own))
        if self._world.device.type == "cpu":
            self.check()

    def check(self, *, keep: int = 0) -> None:
        """Raise `DivergedError` on every rank where a loss, but the last `keep`, is infinite or not a number.

        A step whose loss goes over no target trains nothing, which is said once; `UsageError` where all of them do.
        """
        while len(self._waiting) > keep:
            waiting = self._waiting.pop(0)
            loss, count = waiting.values()
            if not math.isfinite(loss):
                self._waiting.clear()
                self._fail(waiting, loss)
            self._num_seen += 1
            if count <= 0.0:
                self._note_empty(waiting.step)

    def _note_empty(self, step: int) -> None:
        self._num_empty += 1
        if self._num_empty == self._num_seen == _MOST_EMPTY:
            raise UsageError(
                f"loss_fn has counted 0 targets in each of {self._num_seen} steps: nothing is trained",
                hint="return (loss_sum, count) with the number of targets that the sum goes over, or a mean",
            )
        if self._num_empty == 1 and self._world.rank == 0:
            _LOGGER.warning("step %d trains nothing: its loss goes over 0 targets", step)

    def _fail(self, waiting: _Step, loss: float) -> None:
        losses = gathered_numbers([float(waiting.own.detach())], self._world)
        ranks = [rank for rank, (own,) in enumerate(losses) if not math.isfinite(own)]
        where = f" on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}" if ranks else ""
        raise DivergedError(
            f"the loss is {loss} in step {waiting.step}{where}; the weights of that step were not saved",
            hint="go on from the last checkpoint with a lower learning rate, clipped gradients or other data",
        )


_OF_CODE = (RuntimeError, AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)
_NO_VALUES = " meta"  # torch's word for the device of tensors without values, of which blocks of other stages are
_TOLERANCE = 1.1  # what counts as more than predicted: the estimate's own parts are good to some percent


class RankMemoryError(ParaplanError):
    """A rank for whose step the memory of its device is too small."""

    exit_status = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch raised `error` because it could not allocate."""
    return isinstance(error, torch.OutOfMemoryError) or NO_HOST_MEMORY in str(error)


def held_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of the local parts of `tensors`; None counts nothing."""
    held = (local_shard(tensor) for tensor in tensors if tensor is not None)
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


@dataclass(frozen=True)
class FaultContext:
    """The parts of a training on one rank that explain a failure of its next step."""

    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    plan: ParallelPlan
    file: PlanFile | None
    world: World
    step: int


def explained_failures(work: Callable[[], Any], context: FaultContext) -> Any:
    """Return `work()`.

    A lack of memory is said in the parts of the plan's estimate, and so is what ZeRO and pipelines cannot run.
    """
    try:
        return work()
    except _OF_CODE as error:
        known: ParaplanError | None
        if is_out_of_memory(error):
            known = _memory_error(error, context)
        else:
            known = _failure_of_plan(error, context.plan, context.optimizer)
        if known is None:
            raise
        raise known from error


_SENTENCES: tuple[tuple[str, Callable[[ParallelPlan], bool], str, str], ...] = (
    (
        NO_SHARDING,
        lambda plan: True,
        "zero_stage={plan.zero_stage}: {name}, a hook or the model computes with shards of a parameter what torch "
        "cannot: {text}",
        "use zero_stage=0, or an optimizer of torch.optim",
    ),
    (
        _NO_VALUES,
        lambda plan: plan.pp > 1,
        "pp={plan.pp}: the loss, or a hook, computes with a parameter that another pipeline stage holds",
        "compute with it in the forward pass of the module that holds it, or use pp=1",
    ),
    (
        WRITTEN_IN_PLACE,
        lambda plan: plan.pp > 1,
        "pp={plan.pp}: the model writes into a tensor that several stages read, its input perhaps, before their "
        "backward passes",
        "write into a copy (x = x.clamp(...) in place of x.clamp_(...)), or use pp=1",
    ),
    (
        USED_TWICE,
        lambda plan: plan.num_microbatches > 1,
        "num_microbatches={plan.num_microbatches}: what one forward pass has kept is used in the backward pass of "
        "another one",
        "keep nothing that has a gradient from one pass for the next, or use one micro-batch and pp=1",
    ),
    (
        NO_STORAGE,
        lambda plan: plan.zero_stage > 0,
        "zero_stage={plan.zero_stage}: a backward pass within the step (torch.autograd.grad in the model or loss_fn) "
        "needs weights that have been let go since",
        "use zero_stage=0",
    ),
    (
        ONE_ENTRY,
        lambda plan: plan.dp * plan.num_microbatches > 1,
        "micro_batch_size={plan.micro_batch_size}: batch norm has one entry for each channel, and no variance",
        "use a larger micro_batch_size",
    ),
    (
        SPARSE_GRADIENT,
        lambda plan: plan.dp * plan.num_microbatches > 1,
        "a gradient is sparse, of nn.Embedding(sparse=True) perhaps, and is summed over ranks or compared",
        "use sparse=False",
    ),
)
"""Torch's words, the plans for which they are translated, and the sentences in their place."""


def _failure_of_plan(
    error: Exception, plan: ParallelPlan, optimizer: torch.optim.Optimizer
) -> UnsupportedPlanError | None:
    """Return what is said in place of an error of torch's, None where it is of the script's own code or of a lost rank.

    A script's error says the same under every plan: what it raises itself is left to it.
    """
    text, name = _first_line(error)[:200], type(optimizer).__name__
    if plan.zero_stage and reads_shards(error):
        return UnsupportedPlanError(
            f"zero_stage={plan.zero_stage}: the model computes with a parameter outside of the forward pass of the "
            "module that holds it, where ranks have shards of it",
            hint="compute with it in the forward pass of that module, or use zero_stage=0",
        )
    for words, applies, message, hint in _SENTENCES:
        if words in str(error) and applies(plan):
            return UnsupportedPlanError(message.format(plan=plan, name=name, text=text), hint=hint)
    is_of_others = is_lost_connection(error) or waited_s(error) is not None
    is_split = (
        plan.tp * plan.pp * plan.cp * plan.ep > 1 or plan.zero_stage > 0
    )  # else torch says the same in one process
    if not is_split or is_of_others or not is_of_torch(error):
        return None
    return UnsupportedPlanError(
        f"the model, loss_fn or {name} does not run under '{plan.describe()}', in torch's words: {text}",
        hint="where it runs in plain torch, use another plan (DDP runs any model)",
    )


def _memory_error(error: BaseException, context: FaultContext) -> RankMemoryError:
    """Return what is said in place of `error`: parts that this rank holds against those of the plan's estimate.

    What a GPU held at its peak beside the training state are activations and workspace; on a CPU that is unknown.
    """
    held, device, file = context.parameters, context.world.device, context.file
    states = context.optimizer.state.values()
    found = {
        "parameters": held_bytes(held),
        "gradients": held_bytes(parameter.grad for parameter in held),
        "optimizer state": held_bytes(
            value for state in states for value in state.values() if isinstance(value, torch.Tensor)
        ),
    }
    if device.type == "cuda":
        state_bytes = sum(found.values())
        found["activations and workspace"] = max(0, int(torch.cuda.max_memory_allocated(device)) - state_bytes)
    predicted = _predicted(file)
    words = [
        f"{name} {format_bytes(size)}" + (f" ({format_bytes(predicted[name])} predicted)" if name in predicted else "")
        for name, size in found.items()
    ]
    exceeded = [name for name, size in found.items() if size > _TOLERANCE * predicted.get(name, size)]
    text = f"rank {context.world.rank} is out of memory in step {context.step}: it held {', '.join(words)}"
    if exceeded:
        text += f"; more than predicted: {' and '.join(exceeded)}"
    return RankMemoryError(f"{text}. {_first_line(error)}", hint=_way_out(context.plan, file))


def _predicted(file: PlanFile | None) -> dict[str, int]:
    parts = file.estimate.memory if file is not None and file.estimate is not None else None
    if parts is None:
        return {}
    return {
        "parameters": parts.parameter_bytes,
        "gradients": parts.gradient_bytes,
        "optimizer state": parts.optimizer_state_bytes,
        "activations and workspace": parts.activation_bytes + parts.workspace_bytes,
    }


def _way_out(plan: ParallelPlan, file: PlanFile | None) -> str:
    smaller = file.estimate.smaller_plan if file is not None and file.estimate is not None else None
    if smaller is not None:
        return f"a plan that needs less: {smaller}"
    ways = []
    if plan.micro_batch_size > 1:
        ways.append(f"micro_batch_size={plan.micro_batch_size // 2} with twice the micro-batches")
    if plan.recompute != "full":
        ways.append("recompute=full")
    if plan.dp > 1 and plan.zero_stage < (1 if plan.pp > 1 else 3):
        ways.append(f"zero_stage={1 if plan.pp > 1 else 3}")
    return " or ".join(ways) or "more ranks: paraplan recommend says how many"


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
