"""Ranks that stay in their processes from one attempt to the next: which do, and how they leave their script."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from paraplan.launch.elastic.records import AttemptSettings
from paraplan.launch.faults.failures import Cause, RankFailure
from paraplan.launch.faults.report import say
from paraplan.launch.ranks.cores import waited_for_cpu_s
from paraplan.launch.ranks.spawning import RankExit, SpawnerHandle
from paraplan.units import ranks_in_words

LEAVES_WITHIN_S = 5.0
"""How long a rank gets to leave its script, without the time that others had its CPU: it is killed then, and begins in
another process."""

_WAITS_FOR_CPU_S = 25.0
"""How much longer it gets at most where others have its CPU."""

_LOOK_S = 0.05


@dataclass
class RankKeeper:
    """The ranks of one attempt that are kept, by local rank.

    `pids` are their processes, `exits` is where those are that have ended or failed. `held` wait after
    an error, `parked` have left their script, `stayed` run in the process of the attempt before.
    """

    spawner: SpawnerHandle
    settings: AttemptSettings
    pids: Mapping[int, int]
    exits: dict[int, RankExit]
    name: Callable[[int], int]
    """The global rank of a local one."""
    hold: Callable[[], AbstractContextManager[None]]
    """Lets signals wait while a message is sent."""
    held: set[int] = field(default_factory=set)
    parked: set[int] = field(default_factory=set)
    stayed: frozenset[int] = frozenset()
    reasons: dict[int, str] = field(default_factory=dict)
    """Why ranks could not be kept."""

    def begin(self, ranks: Iterable[int], *, is_restart: bool) -> None:
        """Take note of the start of the ranks, and say which have stayed."""
        self.stayed, spares = self.spawner.stayed, self.spawner.took_spares
        if not is_restart or self.settings.keeping is None:
            return
        anew = set(ranks) - self.stayed - spares
        parts = [
            f"{self._words(some)} {one if len(some) == 1 else many}"
            for some, one, many in (
                (self.stayed, "stays in its process", "stay in their processes"),
                (spares, "takes a spare process", "take spare processes"),
                (anew, "begins in a new one", "begin in new ones"),
            )
            if some
        ]
        say("; ".join(parts))

    def _words(self, ranks: Iterable[int]) -> str:
        return ranks_in_words(sorted(map(self.name, ranks)))

    def take_exits(self, ends: Iterable[RankExit]) -> None:
        """Take note of processes that have ended, and of what others say."""
        for end in ends:
            self.exits[end.local_rank] = end
            self.held.discard(end.local_rank)
        for event in self.spawner.events():
            rank = event.local_rank
            if event.kind == "held":
                self.held.add(rank)
                self.exits[rank] = RankExit(rank, event.code, event.time_ns, 0)
            elif event.kind == "parked":
                self.parked.add(rank)
                self.held.discard(rank)
                self.exits.setdefault(rank, RankExit(rank, -signal.SIGTERM, event.time_ns, 0))
            else:
                self.reasons[rank] = event.reason
                self._expect_exits([rank])

    def _expect_exits(self, ranks: Iterable[int]) -> None:
        """Have ranks that were held count as running until their processes have ended."""
        for rank in ranks:
            self.held.discard(rank)
            self.exits.pop(rank, None)

    def release_own_errors(self, failures: Iterable[RankFailure]) -> None:
        """Let ranks end at once that failed by an error of their own: others notice by their connections."""
        own = [one.local_rank for one in failures if not self._is_healthy(one) and one.local_rank in self.held]
        if own:
            with self.hold():
                self.spawner.release(own)
            self._expect_exits(own)

    def release(self, collect: Callable[[float], None], *, timeout_s: float) -> None:
        """Let all ranks end that are held. `collect` takes exits for a number of seconds."""
        ranks = sorted(self.held)
        if not ranks:
            return
        with self.hold():
            self.spawner.release(ranks)
        self._expect_exits(ranks)
        deadline = time.monotonic() + timeout_s
        while not self.exits.keys() >= {*ranks} and time.monotonic() < deadline:
            collect(_LOOK_S)

    def park(self, running: Iterable[int], collect: Callable[[float], None]) -> bool:
        """Have `running` ranks, and those that are held, leave their script and stay; return whether all did, or ended.

        Says why one does not stay.
        """
        asked = {*running, *self.held}
        waited_s = {rank: waited_for_cpu_s(self.pids[rank]) for rank in asked}
        with self.hold():
            self.spawner.park(sorted(asked))
        deadline = time.monotonic() + LEAVES_WITHIN_S
        while stuck := self._waits_for(asked):
            later_s = max(0.0, *(waited_for_cpu_s(self.pids[rank]) - waited_s[rank] for rank in stuck))
            if time.monotonic() > deadline + min(later_s, _WAITS_FOR_CPU_S):
                break
            collect(_LOOK_S)
        for rank in stuck:
            self.reasons[rank] = f"it has not left its script within {LEAVES_WITHIN_S:.0f} s, and is killed"
        for rank, reason in sorted(self.reasons.items()):
            say(f"{self._words([rank])} does not stay: {reason}")
        return not stuck

    def _waits_for(self, asked: set[int]) -> set[int]:
        return {rank for rank in asked if rank in self.held or rank not in self.exits}

    def _is_healthy(self, failure: RankFailure) -> bool:
        return self.settings.restarts_in_process and failure.cause is Cause.COMMUNICATION

    def is_cause_known(self, failures: Iterable[RankFailure]) -> bool:
        """Whether a rank has failed by itself: others that are kept need not be waited for."""
        return any(failure.cause is Cause.OWN_ERROR for failure in failures)

    def may_keep(self, failures: Iterable[RankFailure]) -> bool:
        """Whether ranks are to leave their script and stay: not after an error of one that had done so before."""
        if not self.settings.restarts_in_process:
            return False
        again = [
            failure.local_rank
            for failure in failures
            if failure.cause is Cause.OWN_ERROR and failure.record is not None and failure.local_rank in self.stayed
        ]
        if again:
            say(f"{self._words(again)} failed in a process that had stayed: all ranks begin in new ones")
        return not again
