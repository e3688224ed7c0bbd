"""The end of a job on a node: how it waits for the other nodes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from paraplan.launch.faults.failures import NodeFailure
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.rendezvous import SAY_AFTER_S
from paraplan.launch.nodes.store import NodeEndedError, NodeStore

_LOOK_S = (0.05, 1.0)  # at first, and later
_OTHER_NODES_S = 15.0
_FAILURES_S = 5.0
_LEAVE_S = 30.0
_MOST_NAMED = 4


class FailedElsewhereError(Exception):
    """The ranks of this node have not failed, and the job has: by ranks of another node."""

    def __init__(self, reason: str, failures: Sequence[NodeFailure] = (), *, became: str = "had ended well") -> None:
        """Take a sentence, how ranks failed, where nodes have said so, and what became of the ranks of this node."""
        super().__init__(reason)
        self.reason, self.failures, self.became = reason, list(failures), became


def end_without_restart(store: NodeStore) -> FailedElsewhereError:
    """Return how the job ends for a node that has stopped healthy ranks for a restart which cannot be."""
    failures = store.failures_of_others(timeout_s=_FAILURES_S)
    store.note_stop("a restart without those that had ended well")
    return FailedElsewhereError(
        "ranks of another node had ended well", failures, became="had been stopped to start again"
    )


def require_all_nodes(stores: Sequence[NodeStore]) -> None:
    """Look at the stores of these rounds for a node that does not come to the next one.

    Raises `NodeEndedError` for one whose ranks have ended well, and `FailedElsewhereError` for one that is lost or has
    failed for good.
    """
    for store in stores:
        if store.is_anyone_done():
            raise NodeEndedError
        store.new_stops()
        if store.stops or store.has_failure_elsewhere():
            reason = "; ".join(store.stops.values()) or "ranks of another node have failed"
            failures = [] if store.stops else store.failures_of_others(timeout_s=_FAILURES_S)
            raise FailedElsewhereError(reason, failures, became="wait to start")


def await_other_nodes(store: NodeStore, *, pause: Callable[[float], None] = time.sleep) -> None:
    """Wait until the ranks of all nodes have ended well, however long that takes; a signal ends the wait.

    Raises `FailedElsewhereError` where ranks have failed elsewhere, or a node is lost before its ranks have ended, and
    `StoreLostError`.
    """
    store.note_done()
    says_at: float | None = time.monotonic() + SAY_AFTER_S
    look_s = _LOOK_S[0]
    while at_work := store.nodes_at_work():
        if store.has_failure_elsewhere():
            failures = store.failures_of_others(timeout_s=_OTHER_NODES_S)
            raise FailedElsewhereError("ranks of another node have failed", failures)
        store.new_stops()
        lost = [reason for node, reason in store.stops.items() if node in at_work]
        if lost:
            raise FailedElsewhereError("; ".join(lost))
        if says_at is not None and time.monotonic() > says_at:
            says_at = None
            hosts = ", ".join(store.host_of(node) for node in at_work[:_MOST_NAMED])
            more = f" and {len(at_work) - _MOST_NAMED} more" if len(at_work) > _MOST_NAMED else ""
            say(f"the ranks of {socket.gethostname()} have ended; waiting for those of {hosts}{more}")
        pause(look_s)
        look_s = min(2 * look_s, _LOOK_S[1])
    store.take_leave(timeout_s=_LEAVE_S)
