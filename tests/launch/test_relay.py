"""The relay between the connections of a gate and its store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from paraplan.launch.nodes.relay import Relay


class _LateSocket(socket.socket):
    """A socket whose thread loses the processor before each word that it sends."""

    def send(self, data: bytes, flags: int = 0, /) -> int:  # type: ignore[override]  # takes any buffer there
        time.sleep(0.3)
        return super().send(data, flags)


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Two connections of TCP, each by its ends."""
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:
        made = []
        for _ in range(2):
            there = stack.enter_context(socket.create_connection(server.getsockname()))
            here, _ = server.accept()
            made.append((there, stack.enter_context(here)))
        yield made


def test_bytes_go_both_ways_until_one_side_ends(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    (guest, at_gate), (store, to_store) = pairs
    relay = Relay()
    relay.join(at_gate, to_store)
    guest.sendall(b"question")
    assert store.recv(64) == b"question"
    store.sendall(b"answer")
    assert guest.recv(64) == b"answer"
    guest.close()
    assert store.recv(64) == b""
    relay.close()
    relay.close()  # safe to call twice


def test_a_relay_closes_while_bytes_wake_its_thread(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    wake, woken = socket.socketpair()
    (guest, at_gate), (_, to_store) = pairs
    relay = Relay((_LateSocket(fileno=wake.detach()), woken))
    relay.join(at_gate, to_store)
    wakes = threading.Timer(0.1, guest.sendall, (b"bytes while close() is on its way",))
    wakes.start()
    relay.close()
    wakes.join()
    assert guest.recv(64) == b""
