"""A job that hangs: seen by its ranks standing still, and told by where their Python stacks stand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paraplan.launch.faults.activity import Activity, read_activities
from paraplan.launch.faults.collectives import (
    RankCalls,
    Whereabouts,
    ask_for_calls,
    describe_stopped,
    find_stuck_calls,
    ranks_by_place,
)
from paraplan.launch.ranks.live import LiveRank
from paraplan.launch.ranks.stacks import describe_place, main_stack
from paraplan.units import ranks_in_words

HANG_EXIT_STATUS = 124
"""Exit status of a job that was ended because it hung: that of timeout(1)."""

_MAX_FRAMES = 12
_MAX_PLACES = 3  # of each other node
_NUM_SAMPLES = 3
_WAITS_OF_AN_ANSWER = 3


@dataclass(frozen=True)
class HangVerdict:
    """No rank has moved for `still_s`."""

    still_s: float
    where: Whereabouts
    elsewhere: tuple[str, ...] = ()
    """Sentences of the other nodes on their ranks, and which ranks of theirs this node's wait for."""

    def note(self, host: str) -> dict[str, Any]:
        """Return what other nodes are to know of this verdict, as values of JSON."""
        return {
            "host": host,
            "ranks": sorted({*self.where.stacks, *self.where.stopped}),
            "calls": [
                {"name": stuck.call.name, "number": stuck.call.number, "of": stuck.ranks, "waiting": stuck.waiting}
                for stuck in find_stuck_calls(self.where.calls)
            ],
            "places": self._stopped_in_words()
            + [f"rank {rank} in {describe_place(stack)}" for rank, stack in self.where.stacks.items() if stack],
        }

    def _stopped_in_words(self) -> list[str]:
        return describe_stopped(self.where.stopped, "is" if len(self.where.stopped) == 1 else "are")

    def render(self) -> str:
        """Return the report: the stack of each place where ranks stand, then who stands where, the fewest last."""
        by_number = sorted(ranks_by_place(self.where.stacks), key=lambda place: -len(place[1]))
        lines = []
        for stack, ranks in by_number:
            lines.append(f"paraplan: stack of {ranks_in_words(ranks)}, innermost call first")
            lines += [f"  {frame.path}:{frame.line} in {frame.name}" for frame in stack[:_MAX_FRAMES]]
        lines.append(f"paraplan: the job hangs: no rank has moved for {self.still_s:.0f} s; ending it")
        lines += [f"  waiting: {stuck.describe()}" for stuck in find_stuck_calls(self.where.calls)[:3]]
        lines += [f"  {ranks_in_words(ranks)} in {describe_place(stack)}" for stack, ranks in by_number[:8]]
        lines += [f"  {line}" for line in (*self._stopped_in_words(), *self.elsewhere)]
        return "\n".join(lines) + "\n"


def describe_elsewhere(mine: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return which ranks never came to what the ranks of this node wait in, by their hosts, and where others stand.

    The arguments are what `HangVerdict.note` returns on each node; fields that are missing are left out.
    """
    lines = []
    hosts = {rank: str(note.get("host", "")) for note in (mine, *others) for rank in note.get("ranks", ())}
    for call in mine.get("calls", ())[:1]:
        like = [
            other
            for note in (mine, *others)
            for other in note.get("calls", ())
            if (other["name"], other["number"], list(other["of"])) == (call["name"], call["number"], list(call["of"]))
        ]
        absent = sorted(set(call["of"]) - {rank for other in like for rank in other["waiting"]})
        if absent:
            named = [f"rank {rank}" + (f" on {hosts[rank]}" if hosts.get(rank) else "") for rank in absent[:8]]
            lines.append(f"never came to {call['name']} number {call['number']}: {', '.join(named)}")
    for note in others:
        lines += [f"on host {note.get('host', '')}: {place}" for place in note.get("places", ())[:_MAX_PLACES]]
    return tuple(lines)


class HangWatch:
    """Looks at running ranks every now and then, and gives a verdict once none of them has moved for long.

    A rank moves when it makes a step or a collective, writes a line, reads or writes data, or its child processes work.
    One that computes moves too when its main thread begins to wait for something, or its stacks change. One that does
    nothing but wake up, as to poll for a file, does not. A single call that only computes must be shorter than
    `timeout_s`.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        request_stacks: Callable[[Sequence[LiveRank]], None],
        read: Callable[[Sequence[LiveRank]], Mapping[int, Activity]] = read_activities,
        ask: Callable[[Sequence[LiveRank]], Mapping[int, RankCalls]] = ask_for_calls,
        count_questions: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch ranks. `count_questions` counts when others began and ended to ask for stacks, which moves nothing."""
        self._timeout_s = timeout_s
        self._interval_s = min(5.0, timeout_s / 5)
        self._request, self._read, self._ask_for_calls = request_stacks, read, ask
        self._count_questions, self._num_questions = count_questions, count_questions()
        self._clock = clock
        self._looked_at = -self._interval_s
        self._quiet_since = clock()
        self._activities: Mapping[int, Activity] = {}
        self._calls: Mapping[int, RankCalls] | None = None
        self._samples: list[dict[int, str]] = []
        self._is_asked = False

    def check(self, running: Sequence[LiveRank]) -> HangVerdict | None:
        """Take a look at the ranks `running` if it is time; return the verdict if they hang."""
        now = self._clock()
        if now - self._looked_at < self._interval_s:
            return None
        self._looked_at = now
        if self._num_questions != self._count_questions():  # answers move ranks: the samples are taken anew
            self._num_questions, self._samples, self._is_asked = self._count_questions(), [], False
            self._activities = self._read(running)
            return None
        if self._has_moved(running):
            self._quiet_since, self._samples, self._is_asked, self._calls = now, [], False, None
            return None
        quiet_s = now - self._quiet_since
        if self._calls is None and quiet_s >= self._timeout_s / 2:
            self._calls = self._ask_for_calls(running)
            self._activities = self._read(running)  # to answer is no movement
        if quiet_s < self._timeout_s:
            return None
        if len(self._samples) == _NUM_SAMPLES:
            stacks = {rank: main_stack(text) for rank, text in self._samples[-1].items()}
            return HangVerdict(quiet_s, Whereabouts(stacks))
        for one in running:
            if one.stack_file is not None:
                one.stack_file.write_text("")
        self._request(running)
        self._is_asked = True
        return None

    def _has_moved(self, running: Sequence[LiveRank]) -> bool:
        activities = self._read(running)
        before, self._activities = self._activities, activities
        files = {one.rank: one.stack_file for one in running}
        if activities.keys() != before.keys() or not all(files.values()):
            return True
        pairs = {rank: (activities[rank], before[rank]) for rank in activities}
        if any(now.has_progressed_since(then) for now, then in pairs.values()):
            return True
        working = [rank for rank, (now, then) in pairs.items() if now.works_since(then)]
        # to answer for its stack interrupts what a thread waits for, which then begins anew
        allowance = _WAITS_OF_AN_ANSWER if self._is_asked else 0
        if any(pairs[rank][0].waits - pairs[rank][1].waits > allowance for rank in working):
            return True
        if self._is_asked:
            self._samples.append({rank: file.read_text() for rank, file in files.items() if file is not None})
        if any(sample[rank] != self._samples[0][rank] for sample in self._samples for rank in working):
            return True
        if len(self._samples) < _NUM_SAMPLES:
            return False
        # at last, whether a rank has made or ended a collective since half of the time without movement
        earlier, calls = self._calls or {}, self._ask_for_calls(running)
        return any(one.calls != earlier[rank].calls for rank, one in calls.items() if rank in earlier)
