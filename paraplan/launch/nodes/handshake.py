"""How two nodes prove to each other that they know the job's token, and what they say on that connection then."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from paraplan.errors import ParaplanError
from paraplan.launch.nodes.job_token import PROTOCOL, sign

GREETING = b"paraplan"
"""What a node says first. torch's clients begin with a byte 0, which its store asks for."""

_MAX_LINE = 1 << 16
_HINT = "another job has this port, or the nodes' secrets differ: see 'Safety' in the launcher's documentation"


class RefusedError(ParaplanError):
    """The other side is no node of this job, or of another version."""

    exit_status = 1


class NoLauncherError(RefusedError):
    """The other side is another program than paraplan launch."""


class _Lines:
    """The lines that come on a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    def next(self) -> bytes:
        """Return a line without its end. Raises OSError for the end of the connection, or of a sensible length."""
        while b"\n" not in self._received:
            data = self._connection.recv(4096)
            if not data or len(self._received) > _MAX_LINE:
                raise ConnectionResetError("the connection has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


class NodeChannel:
    """A connection between two nodes that know the token: lines of JSON, each signed for its place in order."""

    def __init__(self, connection: socket.socket, lines: _Lines, *, key: bytes, is_gate: bool) -> None:
        self.connection = connection
        self._lines = lines
        self._key = key
        self._sides = (b"gate", b"node") if is_gate else (b"node", b"gate")
        self._sent = self._received = 0

    def send(self, **values: Any) -> None:
        """Send one line. Raises OSError where the other side is gone."""
        body = json.dumps(values).encode()
        self._sent += 1
        self.connection.sendall(self._signature(self._sides[0], self._sent, body) + b" " + body + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next line. Raises OSError for the end of the connection, `RefusedError` for a forged line."""
        line = self._lines.next()
        self._received += 1
        signature, _, body = line.partition(b" ")
        if not hmac.compare_digest(signature, self._signature(self._sides[1], self._received, body)):
            raise RefusedError("a message was not written with this job's token", hint=_HINT)
        values = json.loads(body)
        if not isinstance(values, dict):
            raise RefusedError("a message is not an object of JSON", hint=_HINT)
        return values

    def close(self) -> None:
        """End the connection, also for a thread that waits for it."""
        close_connection(self.connection)

    def _signature(self, side: bytes, number: int, body: bytes) -> bytes:
        return sign(self._key, side, str(number).encode(), body).hex().encode()


def close_connection(connection: socket.socket) -> None:
    """Shut a socket down and close it, whatever state it is in."""
    with contextlib.suppress(OSError):  # it is not connected any more
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def greet(connection: socket.socket, token: bytes) -> NodeChannel:
    """Return the channel to the gate at the other end. Raises `RefusedError` and OSError."""
    mine = secrets.token_hex(16).encode()
    connection.sendall(b"%s %d %s\n" % (GREETING, PROTOCOL, mine))
    lines = _Lines(connection)
    words = lines.next().split()
    if len(words) != 4 or words[0] != GREETING:
        raise NoLauncherError("it is not the launcher of a job", hint="see which program listens there")
    _require_version(words[1])
    if not hmac.compare_digest(words[3], _proof(token, mine, words[2])):
        raise RefusedError("it does not know this job's token", hint=_HINT)
    return NodeChannel(connection, lines, key=sign(token, b"session", mine, words[2]), is_gate=False)


def answer(connection: socket.socket, token: bytes) -> NodeChannel:
    """Return the channel to the node that has connected. Whether it knows the token shows in its first line.

    Raises `RefusedError` and OSError.
    """
    lines = _Lines(connection)
    words = lines.next().split()
    if len(words) != 3 or words[0] != GREETING:
        raise RefusedError("it is not a node of a job", hint=_HINT)
    mine = secrets.token_hex(16).encode()
    connection.sendall(b"%s %d %s %s\n" % (GREETING, PROTOCOL, mine, _proof(token, words[2], mine)))
    _require_version(words[1])
    return NodeChannel(connection, lines, key=sign(token, b"session", words[2], mine), is_gate=True)


def ask(address: tuple[str, int], token: bytes, words: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Return what the gate at an address answers to `words`; nobody is let in. Raises `RefusedError` and OSError."""
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        channel = greet(connection, token)
        channel.send(**words)
        return channel.receive()
    finally:
        close_connection(connection)


def _proof(token: bytes, of_node: bytes, of_gate: bytes) -> bytes:
    return sign(token, b"gate", of_node, of_gate).hex().encode()


def _require_version(word: bytes) -> None:
    if word != str(PROTOCOL).encode():
        shown = word.decode(errors="replace")[:20]
        raise RefusedError(
            f"it speaks version {shown} of paraplan's protocol, and this node version {PROTOCOL}",
            hint="install the same version of paraplan on every node",
        )
