"""Agreement of ranks: the outcome of each one's own work, and the call that all of them make next."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist

from paraplan.errors import ParaplanError, UnsupportedPlanError, UsageError
from paraplan.runtime.connections import Connections
from paraplan.runtime.exchange import has_cpu_backend
from paraplan.runtime.torch_private import LOST_CONNECTION, default_store
from paraplan.runtime.world import World

_PATIENCE_S = 5.0
"""How long a rank that has failed waits to see whether others have too, before it says so."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.005, 0.1
_WORDS_TRAVEL_S = 1.0
"""How long a rank that has failed in a call waits for the others to fail alike, or for what one of them says."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether `error` says that the process at the other end of a connection has ended."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_CONNECTION)


class FailedElsewhereError(Exception):
    """Another rank has failed, in words of its own; this one has nothing to say."""


@dataclass
class Agreement:
    """The ranks of one job. `number` counts the calls that they have agreed on, the same on every rank.

    `job` is the number of the job among those of this process, which share a store; 0 until the first call. `failures`
    are the calls that have failed on all ranks alike; where one has failed otherwise its `connections` are closed, and
    the job `has_ended`.
    """

    world: World
    connections: Connections = field(default_factory=Connections)
    number: int = 0
    job: int = 0
    failures: int = 0
    has_ended: bool = False

    @contextmanager
    def on(self, call: str, *, parts: bool = False) -> Iterator[None]:
        """Leave this context when every rank does. Raises what the first of them raised where one did.

        With `parts` a rank that has failed closes its connections where others wait for it.
        """
        if not self._has_others():
            yield
            return
        self.number += 1
        prefix = f"{self._prefix()}/agreed/{self.number}"
        try:
            yield
        except Exception as error:
            if not isinstance(error, FailedElsewhereError):
                self._tell(prefix, error)
            self._arrive(prefix)
            if not self._is_soon_there(f"{prefix}/all", _WORDS_TRAVEL_S if parts else _PATIENCE_S) and parts:
                self._part()
            other = None if isinstance(error, ParaplanError) else self._told(prefix)
            if other is not None:
                raise _said_by(*other, call=call) from error  # a connection that was lost, since another rank has ended
            raise
        self._arrive(prefix)
        with suppress(RuntimeError):  # after the store's timeout, or where the rank that held it has ended
            default_store().wait([f"{prefix}/over"])  # without a limit of its own: torch writes warnings of those
        other = self._told(prefix)
        if other is not None:
            raise _said_by(*other, call=call)

    @contextmanager
    def explained(self, call: Callable[[], str]) -> Iterator[None]:
        """Have what a rank raises in this context end the others at once, in the words of that rank.

        They wait for it in a collective, whose connections it closes; not where all ranks raise something.
        """
        if not self._has_others():
            yield
            return
        if self.has_ended:
            raise UsageError(
                f"{call()} after an error in which the ranks of the job have parted",
                hint="begin anew, from the last checkpoint",
            )
        prefix = f"{self._prefix()}/ended/{self.failures}"
        try:
            yield
        except Exception as error:
            self.failures += 1
            if not is_lost_connection(error):
                self._tell(prefix, error)
                self._arrive(prefix)
                if not self._is_soon_there(f"{prefix}/all", _WORDS_TRAVEL_S):
                    self._part()
                raise
            self._is_soon_there(f"{prefix}/over", _WORDS_TRAVEL_S)  # words travel beside the end of a connection
            other = self._told(prefix)
            self._part()
            if other is not None:
                raise _said_by(*other, call=call()) from error
            raise RankLeftError(
                f"a rank has ended while rank {self.world.rank} was in {call()} (connection closed by peer)",
                hint="look for what the other ranks have written; give every rank the same number of batches",
            ) from error

    def _has_others(self) -> bool:
        """Whether there are other ranks: not those that a run without a GPU makes believe, which have no store."""
        return self.world.is_distributed and dist.is_initialized() and dist.get_backend() != "fake"

    def _part(self) -> None:
        self.has_ended = True
        self.connections.close()

    def _prefix(self) -> str:
        """Return where this job writes: what an earlier one was refused with says nothing about it."""
        if not self.job:
            self.job = default_store().add(f"paraplan/jobs/{self.world.rank}", 1)
        return f"paraplan/job/{self.job}"

    def _tell(self, prefix: str, error: Exception) -> None:
        """Have ranks that wait hear of `error` at once; of one that is not in our words only where it is the first."""
        is_known = isinstance(error, ParaplanError)
        words = {
            "rank": self.world.rank,
            "message": error.message if isinstance(error, ParaplanError) else f"{type(error).__name__}: {error}",
            "hint": error.hint if isinstance(error, ParaplanError) else None,
        }
        with suppress(RuntimeError):  # the rank that held the store has ended
            store = default_store()
            if is_known or not store.check([f"{prefix}/over"]):
                number = store.add(f"{prefix}/failures", 1)
                store.set(f"{prefix}/failure/{number}", json.dumps(words))
                store.set(f"{prefix}/over", "")

    def _arrive(self, prefix: str) -> None:
        """Count this rank; the last one has those go on that wait."""
        with suppress(RuntimeError):  # the rank that held the store has ended
            store = default_store()
            if store.add(f"{prefix}/arrived", 1) == self.world.size:
                store.set(f"{prefix}/all", "")
                store.set(f"{prefix}/over", "")

    def _told(self, prefix: str) -> tuple[int, str, str | None] | None:
        """Return rank, message and hint of a failure of another rank: of those that have been told the lowest one's."""
        told = []
        with suppress(RuntimeError):  # the rank that held the store has ended
            store = default_store()
            for number in range(1, store.add(f"{prefix}/failures", 0) + 1):
                if not store.check([f"{prefix}/failure/{number}"]):
                    continue  # a rank that has ended in the midst of it
                words = json.loads(store.get(f"{prefix}/failure/{number}"))
                told.append((int(words["rank"]), str(words["message"]), words["hint"]))
        return min((each for each in told if each[0] != self.world.rank), default=None, key=lambda each: each[0])

    def _is_soon_there(self, key: str, patience_s: float) -> bool:
        """Return whether `key` is there within a while. A rank that has failed asks, each time after a longer pause."""
        ends_s, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
        try:
            while not (is_there := default_store().check([key])) and time.monotonic() < ends_s:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        except RuntimeError:  # the rank that held the store has ended
            return False
        return bool(is_there)


def _said_by(rank: int, message: str, hint: str | None, *, call: str) -> ParaplanError:
    return UnsupportedPlanError(f"rank {rank} ended {call}: {message}", hint=hint)


Call = Literal["step", "eval_step", "save", "load", "predict"]

_CALLS: tuple[Call, ...] = get_args(Call)
_LEFT = "paraplan/left/{rank}"


class RankLeftError(ParaplanError):
    """A rank has ended while others went on."""

    exit_status = 1


class _Comparison(Protocol):
    def take_digest(self) -> int: ...

    def check(self, digests: Sequence[int]) -> None: ...


class RankSync:
    """The ranks of a job, this one among them. `num_steps` is the number of optimizer steps that this rank has done.

    `wants_stop` says whether this rank is to end after the next step; `has_agreed_to_stop` is True on every rank in the
    first step for which one of them said so. `has_writes` says whether a script has written weights since the last
    step, and `saw_writes` whether one of the ranks said so in the last call.
    Where they meet is on the CPU, by gloo, so that no rank waits for its GPU. `orders` is what they have run since they
    last met, None where no ranks run the same.
    """

    def __init__(self, world: World) -> None:
        self.num_steps = 0
        self.wants_stop: Callable[[], bool] = lambda: False
        self.has_agreed_to_stop = False
        self.has_writes: Callable[[], bool] = lambda: False
        self.saw_writes = False
        self.orders: _Comparison | None = None
        self._world = world
        self._has_left = False

    def meet(self, call: Call, size: int = 0) -> list[int]:
        """Return the `size` that every rank brings to `call`, in order of the ranks; all ranks must make it.

        Raises `UsageError` on every rank where some make another call, and after `leave`; `RankLeftError` where some
        ranks have ended; `UnsupportedPlanError` where ranks have run other blocks that were to run the same.
        """
        if self._has_left:
            raise UsageError(f"engine.{call} after job.close", hint="close the job when all is done")
        if not self._world.is_distributed:
            self.has_agreed_to_stop = call == "step" and self.wants_stop()
            self.saw_writes = self.has_writes()
            return [size]
        device = "cpu" if has_cpu_backend() else self._world.device
        digest = 0 if self.orders is None else self.orders.take_digest()
        answer = [_CALLS.index(call), size, int(self.wants_stop()), digest, int(self.has_writes())]
        mine = torch.tensor(answer, device=device)
        gathered = [torch.empty_like(mine) for _ in range(self._world.size)]
        try:
            dist.all_gather(gathered, mine)
        except RuntimeError as error:
            left = self._who_left()
            if left is None:
                raise
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
        _, sizes, stops, digests, writes = zip(*answers, strict=True)
        if self.orders is not None:
            self.orders.check(digests)
        self.has_agreed_to_stop, self.saw_writes = call == "step" and any(stops), any(writes)
        return list(sizes)

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
