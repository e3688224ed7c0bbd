"""Follows the steps of all ranks while a job runs; says which is slow once that is known, and when it is over.

Each launcher reads the rings of its ranks. Over several nodes they tell them to the first one, which judges.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paraplan.launch.nodes.store import NodeStore
from paraplan.launch.stragglers.causes import Cause, describe, find_cause, name_of
from paraplan.launch.stragglers.host_state import HostState, read_host
from paraplan.launch.stragglers.judge import Judge, Lateness
from paraplan.launch.stragglers.steps import Step, StepReader, as_rows, of_rows

_INTERVAL_S = 0.1
_INTERVAL_OF_NODES_S = 0.5
# a look may take this share of one core of the launcher's: with very many ranks they are rarer
_SHARE_OF_LAUNCHER = 0.05
# steps of each rank that a node tells the first one: more than a window, and what may come between two looks
_TOLD_STEPS = 48
_STATE_S = 5.0  # counters of a machine are told for one to two times as long
_CONFIRMING_STEPS = 4  # for so many steps more a case must stand before it is said
_CLOSING_STEPS = 20  # after so many steps without it a case is over


@dataclass
class Case:
    """Something that is late, as it was found first, and as it is now. `text` is what was said of it.

    `first_seen` and `last_seen` are steps; `cost` and `slower` are those of when it was worst.
    """

    late: Lateness
    cause: Cause | None
    text: str
    first_seen: int
    last_seen: int
    said_at: int | None = None
    over_at: int | None = None
    host: str = ""
    """Where it is, "" for what is in no one place."""

    def at_end(self) -> str:
        """Return the line for the end of the job."""
        until = "to the end" if self.over_at is None else f"until step {self.over_at:,}"
        return f"{self.text}, {until}"

    def to_json(self) -> dict[str, Any]:
        """Return it for run.json."""
        return {
            "kind": self.late.kind,
            "ranks": list(self.late.ranks),
            "host": self.host or None,
            "part": self.cause.part if self.cause is not None else None,
            "since_step": self.late.since_step,
            "said_at_step": self.said_at,
            "over_at_step": self.over_at,
            "slower": round(self.late.slower, 4),
            "cost": round(self.late.cost, 4),
            "text": self.text,
        }


class StragglerWatch:
    """Looks at the ranks of this node, whose rings are in `folders` by global rank.

    `places` name the GPU of a rank, "" for none. `peers` gives the groups of ranks that do the same work. `cases` gets
    what was said.
    """

    def __init__(
        self,
        folders: Mapping[int, Path],
        *,
        host: str,
        gpus: Mapping[int, str],
        num_ranks: int,
        peers: Sequence[Sequence[int]],
        store: NodeStore | None,
        cases: list[Case],
        say: Callable[[str], None],
        read_state: Callable[[], HostState] = read_host,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._readers = {rank: StepReader(folder) for rank, folder in folders.items()}
        self._host, self._gpus, self._num_ranks, self._peers = host, dict(gpus), num_ranks, peers
        self._store = store
        self.cases = cases
        self._open: dict[tuple[str, tuple[int, ...]], Case] = {}
        self._say, self._read_state, self._clock = say, read_state, clock
        self._judge: Judge | None = None
        self._hosts: dict[int, str] = {}
        self._states: dict[str, HostState] = {}
        self._places: dict[int, str] = {}
        self._seen: dict[int, int] = {}
        self._recent: dict[int, list[Step]] = {rank: [] for rank in folders}
        self._state_before = self._state_later = read_state()
        self._state_s = clock()
        self._next_s = 0.0

    def look(self) -> None:
        """Read what is new, if it is time, and say what has changed."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        interval_s = _INTERVAL_S if self._store is None else _INTERVAL_OF_NODES_S
        new = {rank: reader.read() for rank, reader in self._readers.items()}
        for rank, steps in new.items():
            self._recent[rank] = (self._recent[rank] + steps)[-_TOLD_STEPS:]
        if self._store is None:
            self._take(self._note(new))
        elif any(new.values()):
            for note in self._store.gather("steps", self._note(self._recent)).values():
                self._take(note)
        if self._judge is not None and any(new.values()):
            self._judge_now(self._judge)
        took_s = self._clock() - now_s
        self._next_s = now_s + max(interval_s, took_s / _SHARE_OF_LAUNCHER)

    def _note(self, steps: Mapping[int, Sequence[Step]]) -> dict[str, Any]:
        """Return the steps of this node's ranks, and what its counters grew by in the last seconds."""
        if self._clock() - self._state_s > _STATE_S:
            self._state_before, self._state_later = self._state_later, self._read_state()
            self._state_s = self._clock()
        return {
            "host": self._host,
            "gpus": {str(rank): name for rank, name in self._gpus.items()},
            "state": asdict(self._read_state().since(self._state_before)),
            "steps": {str(rank): as_rows(found) for rank, found in steps.items()},
        }

    def _take(self, note: Mapping[str, Any]) -> None:
        """Take what a node says of its ranks; those steps that are known already are left out."""
        ranks, host = sorted(int(rank) for rank in note["steps"]), str(note["host"])
        self._states[host] = HostState.of_json(note["state"])
        for rank in ranks:
            gpu = note["gpus"].get(str(rank), "")
            self._hosts[rank], self._places[rank] = host, f"{host}, {gpu}" if gpu else host
        if self._judge is None and len(self._hosts) == self._num_ranks:
            self._judge = Judge(self._hosts, self._peers)
        for rank in ranks if self._judge is not None else ():
            new = [step for step in of_rows(note["steps"][str(rank)]) if step.step > self._seen.get(rank, 0)]
            if new and self._judge is not None:
                self._seen[rank] = new[-1].step
                self._judge.add(rank, new)

    def _judge_now(self, judge: Judge) -> None:
        if not judge.rows:
            return
        step = next(iter(judge.rows[-1].values())).step
        known = {rank for case in self._open.values() if case.said_at is not None for rank in case.late.ranks}
        found = {late.subject: late for late in judge.judge(known)}
        for subject, late in found.items():
            case = self._open.get(subject)
            if case is None:
                case = self._open[subject] = Case(late, None, "", first_seen=step, last_seen=step)
            case.last_seen = step
            if case.said_at is None and late.is_sure and step - case.first_seen >= _CONFIRMING_STEPS:
                self._tell(judge, case, late, step)
            elif late.cost > case.late.cost:
                case.late = late if case.said_at is None else case.late
        for subject, case in list(self._open.items()):
            quiet = step - case.last_seen
            if subject not in found and (case.said_at is None or quiet >= _CLOSING_STEPS):
                del self._open[subject]
                if case.said_at is not None:
                    self._end(case, step)

    def _tell(self, judge: Judge, case: Case, late: Lateness, step: int) -> None:
        case.late, case.said_at = late, step
        if late.ranks:
            peers = next((group for group in self._peers if set(late.ranks) <= set(group)), range(self._num_ranks))
            rows = [row for row in judge.rows if next(iter(row.values())).step >= late.since_step]
            case.cause = find_cause(late, rows or list(judge.rows)[-1:], peers)
        case.text = describe(late, case.cause, places=self._places, states=self._states)
        case.host = late.host or (self._places[late.ranks[0]].partition(",")[0] if late.ranks else "")
        self.cases.append(case)
        self._say(case.text)

    def _end(self, case: Case, step: int) -> None:
        case.over_at = case.last_seen + 1
        verb = "is" if case.late.kind in ("rank", "host") else "are"
        self._say(f"{name_of(case.late, self._places)} {verb} as fast as before since step {case.over_at:,}")
