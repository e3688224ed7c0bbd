"""The state of torch's dynamic rendezvous as values of JSON, in the place of the pickle that torch writes to the store.

That pickle runs what its writer wants, with times of each node's own clock. Here the signs of life are counted: a node
is alive while its count grows, by the clock of the node that looks.
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
    """Turns what torch pickles and unpickles in this process into values for the store, and back.

    It keeps when each count was seen to grow, by this node's clock that never jumps.
    """

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.beats: dict[_NodeDesc, tuple[int, float]] = {}
        self.told: dict[_NodeDesc, datetime] = {}
        self.deadlines: dict[str, float] = {}
        self.told_deadline: tuple[datetime, str, float] | None = None

    def to_values(self, pickled: bytes) -> dict[str, Any]:
        """Return what is to be stored of a state of this node; never of bytes that came from another."""
        state = pickle.loads(pickled)  # noqa: S301 (as the docstring says)
        beats = [  # torch sets the time of its own node
            [*_words(node), self.beats.get(node, (0, 0.0))[0] + (self.told.get(node) != seen)]
            for node, seen in state.last_heartbeats.items()
        ]
        return {
            "round": state.round,
            "is_complete": state.complete,
            "is_closed": state.closed,
            "deadline": self.deadline_to_values(state.deadline),
            "participants": [[*_words(node), rank] for node, rank in state.participants.items()],
            "waiting": [*map(_words, state.wait_list)],
            "redundant": [*map(_words, state.redundancy_list)],
            "beats": beats,
        }

    def to_state(self, values: Mapping[str, Any]) -> bytes:
        """Return the state that was stored, as torch unpickles it. Fields that are not known are left out.

        Raises KeyError, TypeError or ValueError for values of another shape.
        """
        now, wall = time.monotonic(), datetime.now(UTC)
        beats = {_node(words): int(words[3]) for words in values["beats"]}
        for node, beat in beats.items():
            known = self.beats.get(node)
            if known is None or known[0] != beat:
                self.beats[node] = (beat, now)
        self.beats = {node: seen for node, seen in self.beats.items() if node in beats}
        self.told = {node: wall - timedelta(seconds=now - seen) for node, (_, seen) in self.beats.items()}
        state = _RendezvousState()
        state.round, state.complete = int(values["round"]), bool(values["is_complete"])
        state.closed, state.deadline = bool(values["is_closed"]), self.deadline_of(values["deadline"])
        state.participants = {_node(words): int(words[3]) for words in values["participants"]}
        state.wait_list = set(map(_node, values["waiting"]))
        state.redundancy_list = set(map(_node, values["redundant"]))
        state.last_heartbeats = dict(self.told)
        if state.complete and len(state.participants) >= self.max_nodes:
            # torch starts all ranks again for any that wait, also where there is no room for one
            state.redundancy_list, state.wait_list = state.redundancy_list | state.wait_list, set()
        return pickle.dumps(state)

    def deadline_to_values(self, deadline: datetime | None) -> dict[str, Any] | None:
        """Return how long a deadline is, with a name of its own: each node counts from when it has first seen it."""
        if deadline is None:
            return None
        if self.told_deadline is not None and self.told_deadline[0] == deadline:
            return {"name": self.told_deadline[1], "seconds": self.told_deadline[2]}
        seconds = (deadline - datetime.now(UTC)).total_seconds()
        return {"name": secrets.token_hex(8), "seconds": seconds}

    def deadline_of(self, values: Mapping[str, Any] | None) -> datetime | None:
        """Return when a deadline is, by this node's clock."""
        if values is None:
            return None
        name, seconds = str(values["name"]), float(values["seconds"])
        now = time.monotonic()
        self.deadlines = {name: self.deadlines.get(name, now + seconds)}
        deadline = datetime.now(UTC) + timedelta(seconds=self.deadlines[name] - now)
        self.told_deadline = (deadline, name, seconds)
        return deadline


def _words(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(words: Iterable[Any]) -> _NodeDesc:
    address, pid, number, *_ = words
    return _NodeDesc(str(address), int(pid), int(number))
