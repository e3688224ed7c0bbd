"""Watching the loss: a training whose loss is not a number ends, and says at which step and on which rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from paraplan.errors import ParaplanError
from paraplan.runtime.world import World


class DivergedError(ParaplanError):
    """A loss that is infinite or not a number."""

    exit_status = 1


@dataclass(frozen=True)
class _Step:
    """The loss of one step. On a GPU `mean` is on its way to the host, and there when `is_copied` has happened."""

    step: int
    mean: torch.Tensor
    own: torch.Tensor
    is_copied: torch.cuda.Event | None = None

    @classmethod
    def of(cls, step: int, mean: torch.Tensor, own: torch.Tensor) -> _Step:
        if not mean.is_cuda:
            return cls(step, mean, own)
        on_host = torch.empty(mean.shape, dtype=mean.dtype, pin_memory=True)
        on_host.copy_(mean.detach(), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return cls(step, on_host, own, copied)

    def value(self) -> torch.Tensor:
        """Return the mean; waits for its own step and for nothing that was started since."""
        if self.is_copied is not None:
            self.is_copied.synchronize()
        return self.mean


class LossWatch:
    """The losses of the last steps, looked at before weights made with it are used or kept.

    On a CPU that is at once. On a GPU the loss is copied to the host behind its step, and looked at two steps later:
    meanwhile the GPU has the next step to do. No checkpoint is written and nothing is evaluated before all losses were
    looked at.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[_Step] = []

    def add(self, *, step: int, mean: torch.Tensor, own: torch.Tensor, is_read: bool) -> None:
        """Watch the loss of `step`: `mean` over all ranks, `own` of this rank. Without `is_read` it has no value."""
        if not is_read:
            return
        self._waiting.append(_Step.of(step, mean, own))
        if self._world.device.type == "cpu":
            self.check()

    def check(self, *, keep: int = 0) -> None:
        """Raise `DivergedError` on every rank where a loss, but the last `keep`, is infinite or not a number."""
        while len(self._waiting) > keep:
            waiting = self._waiting.pop(0)
            if not bool(waiting.value().isfinite()):
                self._waiting.clear()
                self._fail(waiting)

    def _fail(self, waiting: _Step) -> None:
        own = waiting.own.detach().reshape(1)
        gathered = [own]
        if self._world.is_distributed:
            gathered = [torch.empty_like(own) for _ in range(self._world.size)]
            dist.all_gather(gathered, own)
        ranks = [rank for rank, loss in enumerate(gathered) if not bool(loss.isfinite())]
        where = f" on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}" if ranks else ""
        raise DivergedError(
            f"the loss is {waiting.mean.item()} in step {waiting.step}{where}; the weights of that step were not saved",
            hint="go on from the last checkpoint with a lower learning rate, clipped gradients or other data",
        )
