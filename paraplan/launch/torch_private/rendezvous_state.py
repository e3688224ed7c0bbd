"""The state of torch's dynamic rendezvous as values of JSON: torch writes it to the store as a pickle.

A pickle from the network runs what its writer wants, and torch's has times of each node's own clock. Here the others'
signs of life are counted: a node is alive while its count grows, by the clock of the node that looks.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState


class StateTranslator:
    """Turns torch's pickle of a state, which this process has made, into values for the store, and back.

    It keeps when each count was seen to grow, by this node's clock that never jumps.
    """

    def __init__(self) -> None:
        self._beats: dict[_NodeDesc, tuple[int, float]] = {}
        self._told: dict[_NodeDesc, datetime] = {}
        self._deadlines: dict[str, float] = {}
        self._told_deadline: tuple[datetime, str, float] | None = None

    def to_values(self, state: bytes) -> dict[str, Any]:
        """Return what is to be stored of a state that torch has pickled here."""
        torchs = pickle.loads(state)  # noqa: S301 (of this process: torch's holder hands it to the backend so)
        beats = {}
        for node, seen in torchs.last_heartbeats.items():
            count = self._beats.get(node, (0, 0.0))[0]
            beats[node] = count + (self._told.get(node) != seen)  # torch sets the time of its own node alone
        return {
            "round": torchs.round,
            "is_complete": torchs.complete,
            "is_closed": torchs.closed,
            "deadline": self._deadline_to_values(torchs.deadline),
            "participants": [[*_words(node), rank] for node, rank in torchs.participants.items()],
            "waiting": [_words(node) for node in torchs.wait_list],
            "redundant": [_words(node) for node in torchs.redundancy_list],
            "beats": [[*_words(node), beat] for node, beat in beats.items()],
        }

    def to_state(self, values: Mapping[str, Any]) -> bytes:
        """Return torch's pickle of a state that was stored. Fields that are not known are left out.

        Raises KeyError, TypeError or ValueError for values of another shape.
        """
        state = _RendezvousState()
        state.round, state.complete = int(values["round"]), bool(values["is_complete"])
        state.closed = bool(values["is_closed"])
        state.deadline = self._deadline_of(values["deadline"])
        state.participants = {_node(words): int(words[3]) for words in values["participants"]}
        state.wait_list = {_node(words) for words in values["waiting"]}
        state.redundancy_list = {_node(words) for words in values["redundant"]}
        now, wall = time.monotonic(), datetime.now(UTC)
        beats = {_node(words): int(words[3]) for words in values["beats"]}
        for node, beat in beats.items():
            known = self._beats.get(node)
            if known is None or known[0] != beat:
                self._beats[node] = (beat, now)
            self._told[node] = state.last_heartbeats[node] = wall - timedelta(seconds=now - self._beats[node][1])
        self._beats = {node: seen for node, seen in self._beats.items() if node in beats}
        return pickle.dumps(state)

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
        ends = self._deadlines.setdefault(name, now + seconds)
        self._deadlines = {name: ends}
        deadline = datetime.now(UTC) + timedelta(seconds=ends - now)
        self._told_deadline = (deadline, name, seconds)
        return deadline


def _words(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(words: Iterable[Any]) -> _NodeDesc:
    addr, pid, local_id, *_ = words
    return _NodeDesc(str(addr), int(pid), int(local_id))
