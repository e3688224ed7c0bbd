from __future__ import annotations

import os
import socket

import pytest

from paraplan.launch.faults.ports import find_listener


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
