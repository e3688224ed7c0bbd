"""The connections that gloo opens between ranks: closed by a rank that fails, so that none waits for it.

torch closes them with the last reference to a group, of which a model, its hooks and a traceback hold some.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """The sockets that groups of this process were made with. Where the system does not tell, there are none.

    Those of the store, at `store_port` of either end, are left out: by it ranks say why they fail.
    """

    def __init__(self, store_port: str | None = None) -> None:
        self._names: set[str] = set()
        self._store_port = store_port

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take note of the sockets that are opened in this context."""
        before = _sockets().values()
        yield
        self._names |= set(_sockets().values()) - set(before)

    def close(self) -> None:
        """Close them: who waits at the other end is told at once, and who comes later too."""
        for number, name in _sockets().items():
            if name not in self._names:
                continue
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo listens until the end
                    continue
                ports = {str(one.getsockname()[1]), str(one.getpeername()[1])}
                if self._store_port not in ports:
                    one.shutdown(socket.SHUT_RDWR)
        self._names.clear()


def _sockets() -> dict[int, str]:
    """Return the names of open sockets, by descriptor."""
    found = {}
    with suppress(OSError):
        for path in _DESCRIPTORS.iterdir():
            with suppress(OSError):  # the descriptor of this very look
                target = str(path.readlink())
                if target.startswith("socket:"):
                    found[int(path.name)] = target
    return found
