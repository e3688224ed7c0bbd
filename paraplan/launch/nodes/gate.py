"""The gate before a store: torch's store lets in whoever connects, and a gate only ranks and launchers of the job.

The store itself listens on a loopback port that takes connections from the gate alone. The gate listens where the nodes
look for the store. A launcher proves there that it knows the job's token, and stays connected. From its node's address
connections of torch are then let in, if that launcher says that they are this user's; from this node's own addresses,
if they are this user's here. All others are closed before a byte of theirs has reached the store.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paraplan.launch.nodes.endpoint import is_own_address
from paraplan.launch.nodes.handshake import (
    GREETING,
    NodeChannel,
    RefusedError,
    answer,
    close_connection,
    greet,
)
from paraplan.launch.nodes.local_sockets import (
    admit_only,
    end_when_silent,
    is_established,
    is_known_of_connections,
    is_own_connection,
    plain_address,
)
from paraplan.launch.nodes.relay import Relay

_FIRST_WORD_S = 10.0  # for a connection to say what it is
_ANSWER_S = 5.0  # for a launcher to say whose connection one is
_MAX_WAITING = 64
"""How many connections of one unknown address may be waited for to say what they are."""
_MAX_OWN_WAITING = 2048
"""The same of this node's own addresses, which its ranks have."""
_GREETING_S = 30.0  # for a launcher to prove itself


class Launcher(NamedTuple):
    """A launcher that has proved itself; `pid` is 0 where it does not say."""

    host: str
    source: str
    """The address that it comes from."""
    pid: int = 0


class _Node:
    """A launcher's connection; `asks_ports` where its node's ports are those that the gate sees."""

    def __init__(self, channel: NodeChannel, *, launcher: Launcher, asks_ports: bool) -> None:
        self.channel = channel
        self.launcher = launcher
        self.asks_ports = asks_ports
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[bool]] = {}
        self._number = 0

    def owns(self, local: tuple[str, int], remote: tuple[str, int]) -> bool:
        """Ask whether a connection from its node is this user's."""
        if not self.asks_ports:
            return True
        reply: queue.SimpleQueue[bool] = queue.SimpleQueue()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = reply
            try:
                self.channel.send(whose=[local, remote], number=number)
            except OSError:
                return False
        try:
            return reply.get(timeout=_ANSWER_S)
        except queue.Empty:
            return False
        finally:
            self._answers.pop(number, None)

    def listen(self) -> None:
        """Take its answers until the connection ends. Raises OSError then."""
        while True:
            values = self.channel.receive()
            reply = self._answers.get(int(values.get("number", 0)))
            if reply is not None:
                reply.put(bool(values.get("own")))


class Gate:
    """Lets connections through to the store whose listening socket is `store`."""

    def __init__(
        self,
        listener: socket.socket,
        store: socket.socket,
        *,
        token: bytes,
        facts: Mapping[str, str],
        say: Callable[[str], None],
        on_came: Callable[[Launcher], None] = lambda launcher: None,
        on_left: Callable[[Launcher], None] = lambda launcher: None,
        reply: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda asked: {},
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        """Take the listening sockets of both; `on_came` and `on_left` get launchers that come and are gone.

        `reply` returns what launchers that come, or only ask, are told beside the facts. To the store nobody is let
        in while it `is_open` to none.
        """
        self._listener, self._store = listener, store
        self._token, self._facts, self._say = token, dict(facts), say
        self._on_came, self._on_left = on_came, on_left
        self._reply, self._is_open = reply, is_open
        self._relay = Relay()
        self._lock = threading.Lock()
        self._nodes: dict[str, list[_Node]] = {}
        self._members: set[Launcher] = set()
        self._waiting: Counter[str] = Counter()
        self._told: set[str] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True, name="paraplan-gate")
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._listener.getsockname()[1])

    @property
    def launchers(self) -> set[Launcher]:
        """Those that are connected."""
        with self._lock:
            return {node.launcher for known in self._nodes.values() for node in known}

    @property
    def members(self) -> set[Launcher]:
        """Those that are connected, and were in a round of the job as they came."""
        return self._members & self.launchers

    def close(self) -> None:
        """End all connections."""
        self._is_closed = True
        close_connection(self._listener)
        self._thread.join()
        with self._lock:
            nodes = [node for known in self._nodes.values() for node in known]
        for node in nodes:
            node.channel.close()
        self._relay.close()
        self._store.close()

    def drop_guests(self) -> None:
        """End the connections to the store. Launchers stay."""
        with self._lock:
            relay, self._relay = self._relay, Relay()
        relay.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # out of descriptors, perhaps
                continue
            source = plain_address(address[0])
            with self._lock:
                is_flood = source not in self._nodes and self._waiting[source] >= _MAX_WAITING
            if is_flood and not (is_own_address(source) and self._waiting[source] < _MAX_OWN_WAITING):
                close_connection(connection)
                continue
            with self._lock:
                self._waiting[source] += 1
            guest = threading.Thread(target=self._serve, args=(connection, source), daemon=True, name="paraplan-guest")
            try:
                guest.start()
            except RuntimeError:  # no more threads: the next one may find one
                with self._lock:
                    self._waiting[source] -= 1
                close_connection(connection)

    def _serve(self, connection: socket.socket, source: str) -> None:
        try:
            connection.settimeout(_FIRST_WORD_S)
            first = connection.recv(1, socket.MSG_PEEK)
            if first == GREETING[:1]:
                self._serve_node(connection, source)
                return
            # an empty one is somebody who looks whether anything listens here
            if first and self._is_of_this_job(connection, source):
                if self._is_open():
                    self._relay.join(connection, self._connect_to_store())
                    return
            elif first:
                self._tell(source, "it is no rank or launcher of this job and this user")
        except OSError:
            pass  # it has gone, or said nothing
        finally:
            with self._lock:
                self._waiting[source] -= 1
        close_connection(connection)

    def _is_of_this_job(self, connection: socket.socket, source: str) -> bool:
        there = (source, int(connection.getpeername()[1]))
        here = connection.getsockname()
        ends = there, (plain_address(here[0]), int(here[1]))
        if is_own_address(source):
            return not is_known_of_connections() or is_own_connection(*ends)
        with self._lock:
            nodes = list(self._nodes.get(source, ()))
        return any(node.owns(*ends) for node in nodes)

    def _connect_to_store(self) -> socket.socket:
        """Return a connection to the store, which takes none but the one with this source."""
        connection = socket.socket()
        connection.settimeout(_ANSWER_S)
        source = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}.{random.randint(2, 254)}"  # noqa: S311
        connection.bind((source, 0))
        with self._lock:
            here, there = connection.getsockname(), self._store.getsockname()
            admit_only(self._store, here)
            connection.connect(there)
            # The last word of the handshake passes the filter too; then nobody can take this source's place.
            patience = time.monotonic() + _ANSWER_S
            while is_known_of_connections() and time.monotonic() < patience:
                if is_established(there, here):
                    admit_only(self._store, None)
                    break
        return connection

    def _serve_node(self, connection: socket.socket, source: str) -> None:
        node: _Node | None = None
        is_known = False
        try:
            deadline = threading.Timer(_GREETING_S, close_connection, (connection,))
            deadline.daemon = True
            deadline.start()
            try:
                channel = answer(connection, self._token)
                hello = channel.receive()
            finally:
                deadline.cancel()
            is_known = True
            reply = self._reply(hello)
            if hello.get("asks"):
                channel.send(**reply)
                return
            launcher = Launcher(str(hello.get("host", source)), source, int(hello.get("pid", 0)))
            if hello.get("others"):  # of its last round
                self._members.add(launcher)
            mine = list(connection.getpeername()[:2])
            mine[0] = source
            node = _Node(channel, launcher=launcher, asks_ports=hello.get("address") == mine)
            with self._lock:
                self._nodes.setdefault(source, []).append(node)
            self._on_came(launcher)
            channel.send(time_s=time.time(), **self._facts, **reply)
            connection.settimeout(None)
            node.listen()
        except RefusedError as error:
            self._tell(source, error.message)
        except (OSError, ValueError, TypeError, RecursionError):
            if not is_known and not self._is_closed:
                self._tell(source, "it does not know this job's token")
        finally:
            close_connection(connection)
            if node is not None:
                with self._lock:
                    left = [one for one in self._nodes[source] if one is not node]
                    self._nodes[source] = left
                    if not left:
                        del self._nodes[source]
                if not self._is_closed:
                    self._on_left(node.launcher)

    def _tell(self, source: str, reason: str) -> None:
        """Say once for each address that it was refused."""
        with self._lock:
            is_new = source not in self._told and len(self._told) < _MAX_WAITING
            self._told.add(source)
        if is_new:
            self._say(f"refused a connection from {source}: {reason}")


class Admission:
    """This node's connection to the gate of another: while it lasts, connections from here are let in."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        token: bytes,
        facts: Callable[[], Mapping[str, Any]],
        timeout_s: float,
    ) -> None:
        """Prove this node, which says its `facts` whenever it comes.

        Raises `RefusedError` where it, or the other, does not know the token, and OSError.
        """
        self._address, self._token, self._facts = address, token, facts
        self._is_closed = self._is_retired = False
        self.clock_offset_s = 0.0
        """How far the clock of the other node is ahead of this one's."""
        self.host_facts: dict[str, Any] = {}
        """What the other node says of itself."""
        self.own_end = ("", 0)
        """The address and port that this connection has here."""
        self._channel = self._enter(timeout_s)
        threading.Thread(target=self._answer, daemon=True, name="paraplan-admission").start()

    def _enter(self, timeout_s: float) -> NodeChannel:
        connection = socket.create_connection(self._address, timeout=timeout_s)
        try:
            channel = greet(connection, self._token)
            here = connection.getsockname()
            self.own_end = (plain_address(here[0]), int(here[1]))
            before = time.time()
            channel.send(address=[plain_address(here[0]), here[1]], **self._facts())
            self.host_facts = channel.receive()
            self.clock_offset_s = float(self.host_facts["time_s"]) - (before + time.time()) / 2
        except BaseException:
            close_connection(connection)
            raise
        connection.settimeout(None)
        return channel

    def close(self) -> None:
        """Leave."""
        self._is_closed = True
        self._channel.close()

    def end_when_silent(self, seconds: float) -> None:
        """Take the connection for lost where the other machine says nothing for so long."""
        with contextlib.suppress(OSError):
            end_when_silent(self._channel.connection, seconds)

    def retire(self) -> None:
        """Stay for as long as the connection lasts, and do not come back: the job is elsewhere.

        To leave would say that this launcher has ended, to one that does not know of the other place.
        """
        self._is_retired = True

    def _answer(self) -> None:
        """Say whose connections are, and come back where the connection is lost."""
        while True:
            try:
                values = self._channel.receive()
                local, remote = ((str(end[0]), int(end[1])) for end in values["whose"])
                self._channel.send(number=values["number"], own=is_own_connection(local, remote))
            except (OSError, RefusedError, ValueError, KeyError, TypeError):
                self._channel.close()
                while not (self._is_closed or self._is_retired):
                    time.sleep(0.5)
                    with contextlib.suppress(OSError, RefusedError, ValueError, KeyError, TypeError):
                        self._channel = self._enter(_ANSWER_S)
                        if self._is_closed:  # meanwhile
                            self._channel.close()
                        break
                if self._is_closed or self._is_retired:
                    return
