"""How a command reaches a launcher of this machine: a Unix socket without a file, for processes of the same user alone.

The socket has a name in the kernel and none in a file system: it is gone with its launcher, however that ends. Both
sides ask the kernel whose process the other one is (SO_PEERCRED), before either reads a byte. A request and its answer
are one line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
from pathlib import Path
from typing import Any

VERSION = 1
"""Version of questions and answers: those of another one are refused with a sentence."""

_NAME = re.compile(r"@(paraplan-launch-(?P<pid>\d+)-[0-9a-f]{16})$")
_LISTENS = "00010000"  # flag of unix(7) sockets in /proc/net/unix: linux/net.h, __SO_ACCEPTCON
_CREDENTIALS = struct.Struct("=iII")  # struct ucred of socket(7): process, user, group
_MAX_REQUEST_BYTES = 1 << 16
# largest answer: stacks of thousands of ranks are a few MiB, and what is larger does not come from a launcher
_MAX_ANSWER_BYTES = 64 << 20
_REQUEST_S = 5.0  # for a request to come whole, and for its answer to be taken: both are at hand


def launchers(*, proc: Path = Path("/proc")) -> list[str]:
    """Return the names of the sockets at which launchers of this machine listen, of other users too."""
    try:
        text = (proc / "net" / "unix").read_text(errors="replace")
    except OSError:
        return []
    listening = (line for line in text.splitlines() if line.split()[3:4] == [_LISTENS])
    names = {found[1] for line in listening if (found := _NAME.search(line)) is not None}
    return sorted(names, key=lambda name: int(name.split("-")[2]))


def is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1]) == os.geteuid()


def ask(name: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any] | None:
    """Return the answer of the launcher that listens at `name`; None for another user's, or one that has ended.

    Raises TimeoutError where nothing comes within `timeout_s`.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(f"\0{name}")
            if not is_own(connection):
                return None
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = _receive_line(connection, _MAX_ANSWER_BYTES)
        except TimeoutError:
            raise
        except OSError:
            return None
    return _as_object(answer)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the request of a command that has connected; None for what is none, and for another user's process."""
    with contextlib.suppress(OSError):
        if is_own(connection):
            connection.settimeout(_REQUEST_S)
            return _as_object(_receive_line(connection, _MAX_REQUEST_BYTES))
    return None


def answer(connection: socket.socket, value: dict[str, Any]) -> None:
    """Send an answer; a command that is gone gets none."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(value).encode() + b"\n")


def _receive_line(connection: socket.socket, most_bytes: int) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n") and len(data) < most_bytes and (more := connection.recv(1 << 16)):
        data += more
    return bytes(data)


def _as_object(line: bytes) -> dict[str, Any] | None:
    value = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(line)
    return value if isinstance(value, dict) else None


MAX_BYTES = 1 << 16
"""Largest piece of a log."""


def read_log(path: str, offset: int) -> tuple[int, str]:
    """Return where the next bytes of a log begin, and those behind `offset`, one character for each byte."""
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size + offset) if offset < 0 else min(offset, size))
            data = file.read(MAX_BYTES)
            return file.tell(), data.decode("latin-1")
    except OSError:
        return max(0, offset), ""
