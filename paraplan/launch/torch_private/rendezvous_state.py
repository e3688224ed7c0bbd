"""The state of torch's dynamic rendezvous, which torch hands to its backend as a pickle, as plain values."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from datetime import datetime

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

Node = tuple[str, int, int]
"""A launcher by its address, its process, and a number for those of one process."""


@dataclass
class RoundState:
    """One state of a rendezvous. Times are of the clock of this node, with their zone."""

    round: int = 0
    is_complete: bool = False
    is_closed: bool = False
    deadline: datetime | None = None
    """When a round with enough nodes begins without others."""
    participants: dict[Node, int] = field(default_factory=dict)
    """The rank of each."""
    waiting: set[Node] = field(default_factory=set)
    redundant: set[Node] = field(default_factory=set)
    last_seen: dict[Node, datetime] = field(default_factory=dict)


def unpickled(state: bytes) -> RoundState:
    """Return what torch has pickled in this process; never bytes that came from another."""
    torchs = pickle.loads(state)  # noqa: S301 (as the docstring says)
    return RoundState(
        round=torchs.round,
        is_complete=torchs.complete,
        is_closed=torchs.closed,
        deadline=torchs.deadline,
        participants={_words(node): rank for node, rank in torchs.participants.items()},
        waiting=set(map(_words, torchs.wait_list)),
        redundant=set(map(_words, torchs.redundancy_list)),
        last_seen={_words(node): seen for node, seen in torchs.last_heartbeats.items()},
    )


def pickled(state: RoundState) -> bytes:
    """Return a state as torch unpickles it in this process."""
    torchs = _RendezvousState()
    torchs.round, torchs.complete, torchs.closed = state.round, state.is_complete, state.is_closed
    torchs.deadline = state.deadline
    torchs.participants = {_NodeDesc(*node): rank for node, rank in state.participants.items()}
    torchs.wait_list = {_NodeDesc(*node) for node in state.waiting}
    torchs.redundancy_list = {_NodeDesc(*node) for node in state.redundant}
    torchs.last_heartbeats = {_NodeDesc(*node): seen for node, seen in state.last_seen.items()}
    return pickle.dumps(torchs)


def _words(node: _NodeDesc) -> Node:
    return (node.addr, node.pid, node.local_id)
