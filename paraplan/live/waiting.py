"""Where the ranks of a live run wait: their stacks, grouped by what they wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paraplan.launch.faults.collectives import Call, RankCalls, describe_stopped, find_stuck_calls
from paraplan.launch.ranks.stacks import Frame, Stack, describe_place
from paraplan.live.runs import Run, RunError, ask_run, question
from paraplan.units import ranks_in_words

MAX_PLACES = 8


@dataclass(frozen=True)
class Place:
    """Ranks that stand at the same call of the same line of the user's code; `stack` is that of the first of them."""

    ranks: tuple[int, ...]
    text: str
    stack: Stack


@dataclass(frozen=True)
class WaitingRanks:
    """Where the ranks of a run stand. `waiting` says which wait in which collective, where ranks record that.

    By rank: `hosts`, and the ranks that are `stopped`, have `ended` or do not answer (`mute`). `silent` are hosts that
    have not answered.
    """

    places: tuple[Place, ...]
    waiting: tuple[str, ...]
    hosts: Mapping[int, str]
    stopped: tuple[int, ...]
    ended: tuple[int, ...]
    mute: tuple[int, ...]
    silent: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return who waits for what: collectives, then places, those of most ranks first, then who says nothing."""
        lines = [f"waiting: {line}" for line in self.waiting]
        lines += [f"{self._named(place.ranks)} in {place.text}" for place in self.places[:MAX_PLACES]]
        if len(self.places) > MAX_PLACES:
            lines.append(f"and {len(self.places) - MAX_PLACES} other places")
        lines += describe_stopped(self.stopped, _is_or_are(self.stopped))
        if self.ended:
            lines.append(f"{self._named(self.ended)} {'has' if len(self.ended) == 1 else 'have'} ended")
        if self.mute:
            does = "does" if len(self.mute) == 1 else "do"
            lines.append(f"{self._named(self.mute)} {does} not answer: native code, or not Python; py-spy may read it")
        if self.silent:
            lines.append(
                f"not included: {', '.join(self.silent)} {'has' if len(self.silent) == 1 else 'have'} not answered"
            )
        return lines

    def _named(self, ranks: tuple[int, ...]) -> str:
        """Return ranks in words, with their host where a run has several and they share one."""
        hosts = {self.hosts[rank] for rank in ranks}
        is_told = len(hosts) == 1 and len(set(self.hosts.values())) > 1
        return ranks_in_words(ranks) + (f" ({next(iter(hosts))})" if is_told else "")

    def to_json(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return {
            "waiting": list(self.waiting),
            "places": [
                {
                    "ranks": list(place.ranks),
                    "place": place.text,
                    "stack": [{"path": frame.path, "line": frame.line, "name": frame.name} for frame in place.stack],
                }
                for place in self.places
            ],
            "hosts": {str(rank): host for rank, host in sorted(self.hosts.items())},
            "stopped": list(self.stopped),
            "ended": list(self.ended),
            "not_answering": list(self.mute),
            "silent_hosts": list(self.silent),
        }


def _is_or_are(ranks: tuple[int, ...]) -> str:
    return "is" if len(ranks) == 1 else "are"


def ask_where_ranks_wait(run: Run) -> WaitingRanks:
    """Return where the ranks of a run stand now. Raises `RunError` where it has ended, or has not started them."""
    answers = ask_run(run, question("stacks"))
    states: dict[int, str] = {}
    stacks: dict[int, Stack] = {}
    calls: dict[int, RankCalls] = {}
    hosts: dict[int, str] = {}
    for node in answers.nodes:
        for rank, state in node["states"].items():
            states[int(rank)], hosts[int(rank)] = str(state), str(node["host"])
        for rank, frames in node["stacks"].items():
            stacks[int(rank)] = tuple(Frame(str(path), int(line), str(name)) for path, line, name in frames)
        for rank, found in node["calls"].items():
            made = tuple(Call(**call) for call in found["calls"])
            calls[int(rank)] = RankCalls(made, {name: tuple(ranks) for name, ranks in found["groups"].items()})
    if not states:
        raise RunError(f"the run {run.id} has no ranks now: they are being started", hint="ask again in a moment")
    stopped = tuple(rank for rank in sorted(states) if states[rank] == "stopped")
    mute = tuple(rank for rank in sorted(states) if states[rank] == "running" and not stacks.get(rank))
    stuck = find_stuck_calls({rank: found for rank, found in calls.items() if rank in states})
    return WaitingRanks(
        places=_places({rank: stack for rank, stack in stacks.items() if stack}),
        waiting=tuple(one.describe() for one in stuck),
        hosts=hosts,
        stopped=stopped,
        ended=tuple(rank for rank in sorted(states) if states[rank] == "ended"),
        mute=mute,
        silent=answers.silent,
    )


def _places(stacks: Mapping[int, Stack]) -> tuple[Place, ...]:
    by_text: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        by_text.setdefault(describe_place(stack), []).append(rank)
    places = (Place(tuple(ranks), text, stacks[ranks[0]]) for text, ranks in by_text.items())
    return tuple(sorted(places, key=lambda place: -len(place.ranks)))
