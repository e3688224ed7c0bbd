"""The gradients of DDP's buckets, summed over replicas, with those that a rank has not reached."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paraplan.runtime.precision import ReduceType
from paraplan.runtime.torch_private import default_store, version_of


class ReplicaReduction:
    """Sums the gradients of DDP's buckets, where DDP by itself takes their mean.

    DDP waits for every parameter, and some take no part in some passes: those that a rank lacks are given to it as
    zeros (`complete`), and those that all ranks lack stay without a gradient (`drop_unused`), as in one process.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, reduce_dtype: ReduceType) -> None:
        self._parameters = parameters
        self._group = group
        self._is_narrow = reduce_dtype == "bf16"
        self._is_complete = False
        self._versions: list[int] = []
        self._missing: list[int] = []
        self._unreached: list[int] = []
        self._step = self._told_step = self._number = 0

    def sum(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Sum one bucket over the replicas. Buckets go in order, each once all its gradients are there."""
        buffer = bucket.buffer()
        sent = buffer.to(torch.bfloat16) if self._is_narrow else buffer
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None
        self._is_complete = self._is_complete or bucket.is_last()
        # What follows a sum is dropped by a thread of gloo's, perhaps after all else. It does not hold `self`, and with
        # it the group: the end of a group waits for its threads, and a thread that waits for itself aborts the rank.
        is_narrow = self._is_narrow
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(
            lambda future: buffer.copy_(future.value()[0]) if is_narrow else future.value()[0]
        )
        return summed

    def begin(self) -> None:
        """Take note of the gradients before the last backward pass of a step."""
        self._is_complete, self._missing, self._unreached = False, [], []
        self._step += 1
        self._versions = [-1 if one.grad is None else version_of(one.grad) for one in self._parameters]

    def leave_out(self, parameters: Collection[nn.Parameter]) -> None:
        """Take the zeros of those of `parameters` away that no replica has reached: who holds them too may have."""
        for place in [place for place in self._missing if self._parameters[place] in parameters]:
            gradient = self._parameters[place].grad
            if gradient is not None and not bool(gradient.any()):
                self._parameters[place].grad = None
                self._missing.remove(place)

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of the step are summed or on their way."""
        return self._is_complete

    def complete(self) -> None:
        """Let DDP have zeros for the parameters that the backward pass has not reached, if there are any."""
        if self._is_complete:
            return
        self._missing = [
            place
            for place, (one, version) in enumerate(zip(self._parameters, self._versions, strict=True))
            if one.grad is None or version_of(one.grad) == version
        ]
        reached = [(self._parameters[place] * 0.0).sum() for place in self._missing]
        torch.autograd.backward(reached)

    def drop_unused(self) -> None:
        """Take away the zeros of parameters that no rank has reached; called when all ranks have summed."""
        if not self._unreached:
            return
        if self._parameters[0].is_cuda:  # what the others have told is there once their sums are
            torch.cuda.current_stream().synchronize()
        if default_store().add(self._key(self._step), 0) < self._group.size():
            return  # a rank has reached all
        nowhere = torch.zeros(len(self._parameters), dtype=torch.uint8, device=self._parameters[0].device)
        nowhere[self._unreached] = 1
        dist.all_reduce(nowhere, op=dist.ReduceOp.MIN, group=self._group)
        for place in nowhere.nonzero().flatten().tolist():
            self._parameters[place].grad = None

    def tell(self) -> None:
        """Count this rank among those that lack some parameters in a step, before all ranks sum their losses.

        Those that an earlier micro-batch of it has reached have gradients.
        """
        self._unreached = [place for place in self._missing if self._versions[place] == -1]
        if not self._unreached:
            return
        if default_store().add(self._key(self._step), 1) == 1 and self._told_step:
            default_store().delete_key(self._key(self._told_step))  # which all have left behind them
        self._told_step = self._step

    def _key(self, step: int) -> str:
        """Return where the ranks of the group are counted; all of them have begun as many steps."""
        first = dist.get_process_group_ranks(self._group)[0]
        if not self._number:  # another job of this process may have had the same group
            self._number = default_store().add(f"paraplan/reductions/{dist.get_rank()}", 1)
        return f"paraplan/unused/{first}/{self._number}/{step}"
