"""Bytes carried between pairs of sockets, by one thread for all of them."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

from paraplan.launch.nodes.handshake import close_connection

_CHUNK = 1 << 16
_FULL = 1 << 20  # what waits for a slow reader before its writer has to wait too


class _End:
    """One socket of a pair; `waiting` are the bytes that it has not taken yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.other: _End = self
        self.waiting = bytearray()
        self.is_ended = False
        self.events = 0


class Relay:
    """Carries what one socket of a pair sends to the other, until either ends."""

    def __init__(self, wake: tuple[socket.socket, socket.socket] | None = None) -> None:
        """Take both ends of the pair by which its thread is woken; None: a new one."""
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = wake or socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._ends: set[_End] = set()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def join(self, first: socket.socket, second: socket.socket) -> None:
        """Carry bytes between two sockets, which belong to this relay from here on."""
        for connection in (first, second):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._is_closed:
                close_connection(first)
                close_connection(second)
                return
            self._new.append((first, second))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="paraplan-relay")
                self._thread.start()
            self._wake.send(b".")

    def close(self) -> None:
        """End all connections and the thread."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake.send(b".")  # before the thread, which may be awake, can take the lock and close this socket
        if self._thread is not None:
            self._thread.join()
        else:
            self._close_all()

    def _run(self) -> None:
        while not self._is_closed:
            for key, events in self._selector.select():
                end = key.data
                if end is None:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(4096)
                    self._take_new()
                elif end in self._ends:
                    self._serve(end, events)
        self._close_all()

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for first, second in new:
            ends = _End(first), _End(second)
            ends[0].other, ends[1].other = ends[1], ends[0]
            for end in ends:
                self._ends.add(end)
                self._watch(end)

    def _serve(self, end: _End, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                del end.waiting[: end.connection.send(end.waiting)]
            if events & selectors.EVENT_READ:
                data = end.connection.recv(_CHUNK)
                end.is_ended = not data
                sent = 0
                if data and not end.other.waiting:
                    with contextlib.suppress(BlockingIOError):
                        sent = end.other.connection.send(data)
                end.other.waiting += data[sent:]
        except BlockingIOError:
            pass
        except OSError:
            end.waiting.clear()
            end.other.waiting.clear()
            end.is_ended = True
        is_done = any(one.is_ended and not one.other.waiting for one in (end, end.other))
        if is_done:
            self._drop(end)
        else:
            self._watch(end)
            self._watch(end.other)

    def _watch(self, end: _End) -> None:
        """Have the selector look for what this end can do: take what waits, or give more."""
        wants_write = selectors.EVENT_WRITE if end.waiting else 0
        wants_read = selectors.EVENT_READ if not end.is_ended and len(end.other.waiting) < _FULL else 0
        events = wants_write | wants_read
        if events == end.events:
            return
        if not end.events:
            self._selector.register(end.connection, events, end)
        elif not events:
            self._selector.unregister(end.connection)
        else:
            self._selector.modify(end.connection, events, end)
        end.events = events

    def _drop(self, end: _End) -> None:
        for one in (end, end.other):
            self._ends.discard(one)
            if one.events:
                self._selector.unregister(one.connection)
                one.events = 0
            close_connection(one.connection)

    def _close_all(self) -> None:
        self._take_new()
        for end in list(self._ends):
            if end in self._ends:
                self._drop(end)
        self._selector.close()
        self._wake.close()
        self._woken.close()
