"""What the spawner and a rank that is kept say to each other: lines of JSON over a Unix socket, with descriptors.

Towards the rank `do`: park (leave the script), run (with environment, command and two descriptors), import (modules),
tell (what is imported), end. Towards the spawner `event`: held (the script has failed), parked, refused, modules.
Standard library only, and importable alone.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

_CHUNK = 1 << 20
_MOST_DESCRIPTORS = 8


class Channel:
    """One end of a channel. `descriptors` are those that have come and that nobody has taken."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.descriptors: list[int] = []
        self._received = b""
        self._is_sending = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self.connection.fileno()

    def send(self, *, with_descriptors: tuple[int, ...] = (), **words: Any) -> None:
        """Send one line, from any thread. Raises OSError where the other side is gone."""
        data = json.dumps(words).encode() + b"\n"
        with self._is_sending:
            sent = socket.send_fds(self.connection, [data], with_descriptors) if with_descriptors else 0
            self.connection.sendall(data[sent:])

    def receive(self) -> list[dict[str, Any]]:
        """Wait for the other side, and return its lines, if any is whole. Raises EOFError where it is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.connection, _CHUNK, _MOST_DESCRIPTORS)
        except ConnectionError:
            data, descriptors = b"", []
        self.descriptors += descriptors
        if not data:
            raise EOFError
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]


def open_channel(descriptor: int) -> Channel:
    """Return the channel whose end this process has as `descriptor`."""
    return Channel(socket.socket(fileno=descriptor))
