"""The other ranks: before each call that all of them must make together, each says which one it makes."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.distributed as dist

from paraplan.errors import ParaplanError, UsageError
from paraplan.runtime.torch_private import LOST_PEER, default_store
from paraplan.runtime.world import World

Call = Literal["step", "eval_step", "save", "load", "predict"]

_CALLS: tuple[Call, ...] = get_args(Call)
_LEFT = "paraplan/left/{rank}"


class RankLeftError(ParaplanError):
    """A rank has ended while others went on."""

    exit_status = 1


class Peers:
    """The ranks of a job, this one among them. `num_steps` is the number of optimizer steps that this rank has done.

    Where they meet is on the CPU, by gloo, so that no rank waits for its GPU.
    """

    def __init__(self, world: World) -> None:
        self.num_steps = 0
        self._world = world
        self._has_left = False

    def meet(self, call: Call, size: int = 0) -> list[int]:
        """Return the `size` that every rank brings to `call`, in order of the ranks; all ranks must make it.

        Raises `UsageError` on every rank where some make another call, and after `leave`; `RankLeftError` where some
        ranks have ended.
        """
        if self._has_left:
            raise UsageError(f"engine.{call} after job.close", hint="close the job when all is done")
        if not self._world.is_distributed:
            return [size]
        device = "cpu" if _has_cpu_backend() else self._world.device
        mine = torch.tensor([_CALLS.index(call), size], device=device)
        gathered = [torch.empty_like(mine) for _ in range(self._world.size)]
        try:
            dist.all_gather(gathered, mine)
        except RuntimeError as error:
            left = self._who_left()
            if left is None and LOST_PEER not in str(error):
                raise
            if left is None:
                raise RankLeftError(
                    f"a rank has ended, and rank {self._world.rank} goes on with {call} after {self.num_steps} steps "
                    "(connection closed by peer)",
                    hint="look for what the other ranks have written; give every rank the same number of batches",
                ) from error
            rank, num_steps = left
            raise RankLeftError(
                f"rank {rank} has ended after {num_steps} steps, and rank {self._world.rank} goes on with "
                f"{call} after {self.num_steps} (connection closed by peer)",
                hint="give every rank the same number of batches; job.shard does",
            ) from error
        answers = torch.stack(gathered).tolist()
        calls = [_CALLS[answer[0]] for answer in answers]
        if len(set(calls)) > 1:
            other = next(rank for rank, name in enumerate(calls) if name != calls[0])
            raise UsageError(
                f"after {self.num_steps} steps rank 0 calls engine.{calls[0]}, and rank {other} engine.{calls[other]}",
                hint="every rank must make the same calls, and have the same number of batches; job.shard gives these",
            )
        return [answer[1] for answer in answers]

    def leave(self) -> None:
        """Say that this rank is done, so that ranks which still wait for it can say so. Safe to call twice."""
        if self._has_left or not dist.is_initialized():
            return
        self._has_left = True
        try:
            default_store().set(_LEFT.format(rank=self._world.rank), str(self.num_steps))
        except RuntimeError:  # the rank that held the store has ended before
            return

    def _who_left(self) -> tuple[int, int] | None:
        """Return a rank that has ended as it should, with its steps; None where none has said so."""
        try:
            for rank in range(self._world.size):
                key = _LEFT.format(rank=rank)
                if rank != self._world.rank and default_store().check([key]):
                    return rank, int(default_store().get(key))
        except RuntimeError:
            return None
        return None


def _has_cpu_backend() -> bool:
    return "gloo" in str(dist.get_backend_config())
