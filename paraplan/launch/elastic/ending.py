"""The other nodes of a job: signs of life of those of a static rendezvous, and how the end waits for them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from paraplan.launch.faults.failures import NodeFailure
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.rendezvous import SAY_AFTER_S
from paraplan.launch.nodes.store import NodeEndedError, NodeStore

_LOOK_S = (0.05, 1.0)  # at first, and later
_OTHER_NODES_S = 15.0
_LEAVE_S = 30.0
_MOST_NAMED = 4


class FailedElsewhereError(Exception):
    """The ranks of this node have not failed, and the job has: by ranks of another node."""

    def __init__(self, reason: str, failures: Sequence[NodeFailure] = (), *, became: str = "had ended well") -> None:
        """Take a sentence, how ranks failed, where nodes have said so, and what became of the ranks of this node."""
        super().__init__(reason)
        self.reason, self.failures, self.became = reason, list(failures), became


def require_all_nodes(stores: Sequence[NodeStore]) -> None:
    """Look at the stores of these rounds for a node that does not come to the next one.

    Raises `NodeEndedError` for one whose ranks have ended well, and `FailedElsewhereError` for one that is lost or has
    failed for good.
    """
    for store in stores:
        if store.is_anyone_done():
            raise NodeEndedError
        store.new_stops()
        if store.lacks_node():
            reason = "; ".join(store.stops.values()) or "ranks of another node have failed"
            failures = [] if store.stops else store.failures_of_others()
            raise FailedElsewhereError(reason, failures, became="wait to start")


def await_other_nodes(store: NodeStore) -> None:
    """Wait until the ranks of all nodes have ended well, however long that takes; a signal ends the wait.

    Raises `FailedElsewhereError` where ranks have failed elsewhere, or a node is lost before its ranks have ended, and
    `StoreLostError`.
    """
    store.publish("done", True)
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
        time.sleep(look_s)
        look_s = min(2 * look_s, _LOOK_S[1])
    store.take_leave(timeout_s=_LEAVE_S)


_INTERVAL_S = 1.0
_SILENCE_S = 15.0  # as torch's dynamic rendezvous: keep_alive_interval times keep_alive_max_attempt
_SILENCE_AT_END_S = 5.0  # once the ranks of this node have ended or failed, which a lost node explains


class Heartbeat:
    """A thread that beats for this node, and tells all when the node before it does not: two calls a second."""

    def __init__(self, store: NodeStore, *, silence_s: float = _SILENCE_S, interval_s: float = _INTERVAL_S) -> None:
        self._store, self._silence_s, self._interval_s = store, silence_s, interval_s
        self._is_over = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="paraplan-heartbeat").start()

    def close(self) -> None:
        """Beat no more."""
        self._is_over.set()

    def _beat(self) -> None:
        watched, count, seen_s = self._before(self._store.node), -1, time.monotonic()
        with suppress(RuntimeError):  # a store that is gone: the look of this node says so
            while not self._is_over.wait(self._interval_s):
                self._store.beat(self._store.node, 1)
                if self._store.has_ended(watched):
                    watched, count, seen_s = self._before(watched), -1, time.monotonic()
                if watched == self._store.node:
                    continue
                beats = self._store.beat(watched, 0)
                if beats != count:
                    count, seen_s = beats, time.monotonic()
                elif time.monotonic() - seen_s > self._patience_s():
                    self._store.note_silent(watched)
                    watched, count, seen_s = self._before(watched), -1, time.monotonic()

    def _patience_s(self) -> float:
        has_ended = self._store.has_ended(self._store.node)
        return min(self._silence_s, _SILENCE_AT_END_S) if has_ended else self._silence_s

    def _before(self, node: int) -> int:
        return (node - 1) % self._store.num_nodes
