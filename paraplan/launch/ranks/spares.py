"""A process that stands by for a rank: it imports what the script will, and waits for what it is to run.

Standard library only, and importable alone: see `bootstrap`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

_CHUNK = 1 << 16


def stand_by(place: socket.socket, modules: Sequence[str]) -> dict[str, Any]:
    """Import `modules`, wait, and return what the spawner says: `command`, `environment`, `num_threads` and `cpus`.

    The streams and the CPUs of the rank are in force then. The process ends where the spawner closes `place`.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(null, number)
    os.close(null)
    for name in modules:
        with contextlib.suppress(Exception):  # it is the script that says what is wrong
            importlib.import_module(name)
    data, descriptors, _, _ = socket.recv_fds(place, _CHUNK, 2)
    while data and not data.endswith(b"\n"):
        more = place.recv(_CHUNK)
        data = data + more if more else b""
    if not data:
        os._exit(0)
    place.close()
    sys.stdout.flush()
    for number, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    start: dict[str, Any] = json.loads(data)
    if start["cpus"]:
        with contextlib.suppress(OSError):  # CPUs that have been taken from this container since they were read
            os.sched_setaffinity(0, start["cpus"])
    return start
