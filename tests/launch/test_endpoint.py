"""Endpoints where nobody, or somebody else, answers, and calls of torch that a signal gets away from."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from launching import free_port
from waiting import PATIENCE_S

from paraplan.errors import UsageError
from paraplan.launch.nodes.endpoint import (
    Endpoint,
    addresses_of,
    await_answer,
    describe_silence,
    find_listener,
    is_own_address,
    run_interruptibly,
)
from paraplan.launch.nodes.rendezvous import NoRendezvousError, open_store

SHORT = timedelta(seconds=0.5)


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """Give the port of a program that answers each connection so; None takes connections and says nothing."""
    server = socket.create_server(("127.0.0.1", 0))
    taken = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            taken.append(connection)
            if answer is not None:
                connection.sendall(answer)
                connection.close()

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    serving.join()  # what it has just taken is closed below
    server.close()
    for connection in taken:
        connection.close()


def test_an_endpoint_that_takes_connections_is_not_waited_for() -> None:
    with listener(None) as port:
        assert await_answer(Endpoint("127.0.0.1", port), timeout_s=PATIENCE_S) is None


@pytest.mark.parametrize(
    ("host", "reason"),
    [("127.0.0.1", "connection refused: no launcher listens"), ("no-such-host.invalid", "no address is known for it")],
)
def test_why_nothing_answers_is_said_in_words(host: str, reason: str) -> None:
    silence = await_answer(Endpoint(host, free_port()), timeout_s=0.3)
    assert silence is not None
    assert describe_silence(silence).startswith(reason)


@pytest.mark.parametrize("host", ["a" * 64, "gpu..a"])
def test_what_cannot_be_a_host_name_is_refused_at_once(host: str) -> None:
    assert addresses_of(host) == []
    with pytest.raises(UsageError, match=f"'{host}' is not a host name"):
        await_answer(Endpoint(host, free_port()), timeout_s=PATIENCE_S)


def test_a_connection_that_nothing_answers_may_be_a_firewalls_doing() -> None:
    assert "firewall" in describe_silence(TimeoutError("timed out"))
    assert describe_silence(OSError(101, "Network is unreachable")) == "network is unreachable"


def test_addresses_of_this_node_are_known_from_those_of_others() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1")  # an address of documentation, RFC 5737
    assert not is_own_address("fe80::1234")  # one of a link, and no interface beside it


def test_nobody_at_the_endpoint_is_told_with_what_it_means_and_how_long_it_was_tried() -> None:
    port = free_port()
    with pytest.raises(NoRendezvousError) as caught:
        open_store("localhost", port, is_master=False, timeout=SHORT)
    assert caught.value.message.startswith(f"nothing answers at localhost:{port} (")
    assert "127.0.0.1" in caught.value.message
    assert caught.value.message.endswith("no launcher listens on this port of the machine; tried for 1 s")
    assert "no other node reaches" in str(caught.value.hint)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_another_program_at_the_endpoint_is_named(answer: bytes | None) -> None:
    with listener(answer) as port, pytest.raises(NoRendezvousError) as caught:
        open_store("127.0.0.1", port, is_master=False, timeout=SHORT, multi_tenant=True)
    assert f"(pid {os.getpid()}), listens at 127.0.0.1:{port}" in caught.value.message


def test_a_program_that_takes_connections_and_says_nothing_is_told_before_it_is_given_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with listener(None) as port, pytest.raises(NoRendezvousError) as caught:
        open_store("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=3.5))
    silence = f"127.0.0.1:{port}: it accepts connections and says nothing"
    assert capsys.readouterr().err == f"paraplan: waiting for {silence}\n"
    assert caught.value.message.endswith("it accepts connections and says nothing")


def test_a_call_that_blocks_is_left_by_a_signal() -> None:
    never = threading.Event()

    def call() -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return never.wait(PATIENCE_S)

    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(call)
    never.set()


def test_a_call_gives_its_answer_or_its_error_and_is_told_of_when_it_lasts() -> None:
    said: list[str] = []
    assert run_interruptibly(lambda: 7, on_wait=lambda: said.append("long")) == 7
    with pytest.raises(ZeroDivisionError):
        run_interruptibly(lambda: 1 // 0, on_wait=lambda: said.append("long"))
    assert said == []
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        run_interruptibly(lambda: threading.Event().wait(1), timeout_s=0.1)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_process_that_listens_on_a_port_is_found(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip(f"this host has no {address}")
        port = server.getsockname()[1]
        assert find_listener(port) is None  # bound, but nobody listens yet
        server.listen()
        found = find_listener(port)
        assert found is not None
        assert found.endswith(f"(pid {os.getpid()})")
    assert find_listener(port) is None
