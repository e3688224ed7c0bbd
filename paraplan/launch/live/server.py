"""Answers commands about a job while it runs: of this node at once, of others through the store that they share."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from paraplan.errors import ParaplanError
from paraplan.launch.elastic.records import JobRecord
from paraplan.launch.faults.collectives import ANSWER_S
from paraplan.launch.live.answers import answer
from paraplan.launch.live.channel import answer as send_answer
from paraplan.launch.live.channel import receive
from paraplan.launch.nodes.store import NodeStore

_NODES_S = 0.5  # how often a node looks whether another one asks: as often as it looks whether another one has failed
_ELSEWHERE_S = 2 * ANSWER_S + 4.0  # how long other nodes get to answer: two waits for their ranks, and some looks
_MAX_TALKS = 16  # commands that are answered at the same time; others are closed


def listen() -> socket.socket:
    """Return a socket that listens for this process. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0paraplan-launch-{os.getpid()}-{secrets.token_hex(8)}")
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


class LiveServer:
    """Threads of the launcher, from the start of the job to its end. They never end the job, whatever they meet."""

    def __init__(self, job: JobRecord, *, elsewhere_s: float = _ELSEWHERE_S) -> None:
        """Listen, where this system has such sockets. Other nodes get `elsewhere_s` to answer."""
        self._job, self._elsewhere_s = job, elsewhere_s
        self._listener: socket.socket | None = None
        self._talks = threading.BoundedSemaphore(_MAX_TALKS)
        self._woken, self._wake = os.pipe()
        self._is_over = threading.Event()
        with contextlib.suppress(OSError):
            self._listener = listen() if hasattr(socket, "SO_PEERCRED") else None  # else nobody's user is known
        self._thread = threading.Thread(target=self._serve, daemon=True, name="paraplan-live")
        self._thread.start()

    def close(self) -> None:
        """Listen no more; answers that are being made are not waited for. A second call does nothing."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        os.close(self._wake)
        self._thread.join(timeout=_NODES_S)
        if not self._thread.is_alive():
            os.close(self._woken)
        if self._listener is not None:
            self._listener.close()

    def _serve(self) -> None:
        waited_for = [self._woken] + ([self._listener.fileno()] if self._listener is not None else [])
        patience_s = _NODES_S if self._job.max_nodes > 1 else None
        while not self._is_over.is_set():
            ready, _, _ = select.select(waited_for, [], [], patience_s)
            if self._is_over.is_set():
                return
            if self._listener is not None and self._listener.fileno() in ready:
                with contextlib.suppress(OSError):
                    connection, _ = self._listener.accept()
                    if not self._begin(self._talk, connection):
                        connection.close()
            store = self._store_of_nodes()
            if store is not None:
                with contextlib.suppress(RuntimeError, TimeoutError, ParaplanError, KeyError, TypeError):
                    # the store's host may be gone, and another version of paraplan may write otherwise
                    for number, question in store.new_questions():
                        self._begin(self._answer_node, store, number, question)

    def _begin(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Call in a thread of its own; return whether there are not too many yet."""
        if not self._talks.acquire(blocking=False):
            return False

        def run() -> None:
            try:
                with contextlib.suppress(RuntimeError, TimeoutError, OSError, ParaplanError):
                    call(*arguments)
            finally:
                self._talks.release()

        threading.Thread(target=run, daemon=True, name="paraplan-live-answer").start()
        return True

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.closing(connection):
            question = receive(connection)
            if question is not None:
                send_answer(connection, self._answer_of_all(question))

    def _answer_node(self, store: NodeStore, number: int, question: Mapping[str, Any]) -> None:
        store.answer(number, answer(self._job, question))

    def _answer_of_all(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answers of this node and, unless it alone is asked, of the others, and who is silent."""
        store = None if question.get("is_local") else self._store_of_nodes()
        if store is None:
            return {"nodes": [answer(self._job, question)], "silent": []}
        number, answers = None, dict[int, Mapping[str, Any]]()
        with contextlib.suppress(RuntimeError, TimeoutError, ParaplanError):
            number = store.ask(question)
        answers[store.node] = answer(self._job, question)
        with contextlib.suppress(RuntimeError, TimeoutError, ParaplanError):
            answers |= {} if number is None else store.answers(number, timeout_s=self._elsewhere_s)
        silent = [store.host_of(node) for node in range(store.num_nodes) if node not in answers]
        return {"nodes": [answers[node] for node in sorted(answers)], "silent": silent}

    def _store_of_nodes(self) -> NodeStore | None:
        store = self._job.store
        return store if store is not None and not store.is_lost else None
