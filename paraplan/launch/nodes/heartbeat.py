"""Signs of life of the nodes of a static rendezvous, of which torch has none: each node watches the one before it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from paraplan.launch.nodes.store import NodeStore

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
                if self._store.is_over(watched):
                    before = self._before(watched)
                    watched, count, seen_s = before, -1, time.monotonic()
                if watched == self._store.node:
                    continue
                beats = self._store.beat(watched, 0)
                if beats != count:
                    count, seen_s = beats, time.monotonic()
                elif time.monotonic() - seen_s > self._patience_s():
                    self._store.note_silent(watched)
                    watched, count, seen_s = self._before(watched), -1, time.monotonic()

    def _patience_s(self) -> float:
        is_over = self._store.is_over(self._store.node)
        return min(self._silence_s, _SILENCE_AT_END_S) if is_over else self._silence_s

    def _before(self, node: int) -> int:
        return (node - 1) % self._store.num_nodes
