"""Ports for tests that start something which listens."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket

_FIRST, _PER_WORKER, _NUM_WORKERS = 20_000, 3_000, 4


def free_port() -> int:
    """Return a port that nobody listens on, below those that the kernel gives to connections by itself.

    Workers of pytest-xdist take theirs from different ones: what one has found free, another does not take meanwhile.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + worker % _NUM_WORKERS * _PER_WORKER
    while True:
        port = first + secrets.randbelow(_PER_WORKER)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
