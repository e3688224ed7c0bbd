"""The state of torch's dynamic rendezvous as values of JSON.

torch itself writes it to the store as a pickle, which runs what its writer wants, with times of each node's own clock.
Here the signs of life are counted: a node is alive while its count grows, by the clock of the node that looks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from paraplan.launch.torch_private.rendezvous_state import Node, RoundState


class StateTranslator:
    """Turns a state into values for the store, and back.

    It keeps when each count was seen to grow, by this node's clock that never jumps.
    """

    def __init__(self) -> None:
        self._beats: dict[Node, tuple[int, float]] = {}
        self._told: dict[Node, datetime] = {}
        self._deadlines: dict[str, float] = {}
        self._told_deadline: tuple[datetime, str, float] | None = None

    def to_values(self, state: RoundState) -> dict[str, Any]:
        """Return what is to be stored of a state of this node."""
        beats = []
        for node, seen in state.last_seen.items():
            count = self._beats.get(node, (0, 0.0))[0]
            beats.append([*node, count + (self._told.get(node) != seen)])  # torch sets the time of its own node alone
        return {
            "round": state.round,
            "is_complete": state.is_complete,
            "is_closed": state.is_closed,
            "deadline": self._deadline_to_values(state.deadline),
            "participants": [[*node, rank] for node, rank in state.participants.items()],
            "waiting": [list(node) for node in state.waiting],
            "redundant": [list(node) for node in state.redundant],
            "beats": beats,
        }

    def to_state(self, values: Mapping[str, Any]) -> RoundState:
        """Return the state that was stored. Fields that are not known are left out.

        Raises KeyError, TypeError or ValueError for values of another shape.
        """
        now, wall = time.monotonic(), datetime.now(UTC)
        beats = {_node(words): int(words[3]) for words in values["beats"]}
        for node, beat in beats.items():
            known = self._beats.get(node)
            if known is None or known[0] != beat:
                self._beats[node] = (beat, now)
        self._beats = {node: seen for node, seen in self._beats.items() if node in beats}
        self._told = {node: wall - timedelta(seconds=now - seen) for node, (_, seen) in self._beats.items()}
        return RoundState(
            round=int(values["round"]),
            is_complete=bool(values["is_complete"]),
            is_closed=bool(values["is_closed"]),
            deadline=self._deadline_of(values["deadline"]),
            participants={_node(words): int(words[3]) for words in values["participants"]},
            waiting=set(map(_node, values["waiting"])),
            redundant=set(map(_node, values["redundant"])),
            last_seen=dict(self._told),
        )

    def _deadline_to_values(self, deadline: datetime | None) -> dict[str, Any] | None:
        """Return how long a deadline is, with a name of its own: each node counts from when it has first seen it."""
        if deadline is None:
            return None
        if self._told_deadline is not None and self._told_deadline[0] == deadline:
            return {"name": self._told_deadline[1], "seconds": self._told_deadline[2]}
        seconds = (deadline - datetime.now(UTC)).total_seconds()
        return {"name": secrets.token_hex(8), "seconds": seconds}

    def _deadline_of(self, values: Mapping[str, Any] | None) -> datetime | None:
        if values is None:
            return None
        name, seconds = str(values["name"]), float(values["seconds"])
        now = time.monotonic()
        self._deadlines = {name: self._deadlines.get(name, now + seconds)}
        deadline = datetime.now(UTC) + timedelta(seconds=self._deadlines[name] - now)
        self._told_deadline = (deadline, name, seconds)
        return deadline


def _node(words: Iterable[Any]) -> Node:
    address, pid, number, *_ = words
    return (str(address), int(pid), int(number))
