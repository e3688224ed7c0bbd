"""torch's store on this node, which listens at one address: on loopback for one node, else at the endpoint's."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them from C++ unmarked
    DistNetworkError,
    TCPStore,
)

from paraplan.launch.nodes.endpoint import Endpoint
from paraplan.launch.nodes.interfaces import addresses_of, is_loopback
from paraplan.launch.torch_private.texts import PORT_TAKEN

_BACKLOG = 4096
_LOOPBACK = "127.0.0.1"


def host_store(host: str, port: int, *, timeout: timedelta) -> TCPStore:
    """Return a new store of this node that others reach at `host` and `port`; port 0 takes a free one.

    torch itself listens on every interface, whatever host it is given. Raises torch's DistNetworkError where the port
    is taken.
    """
    listener = _listen(host, port)
    address, number = listener.getsockname()[:2]
    return TCPStore(
        _LOOPBACK if address == "0.0.0.0" else address,  # noqa: S104 (of a socket that listens there already)
        number,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address of `host` alone.

    A name that means a loopback address here, and another elsewhere, as Debian has a host's own name, is listened for
    on all addresses.
    """
    addresses = addresses_of(host) or [host]
    address = next((one for one in addresses if not is_loopback(one)), addresses[0])
    if is_loopback(address):
        is_literal = host == "localhost" or host in addresses
        address = _LOOPBACK if host == "localhost" else address if is_literal else ""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        name = PORT_TAKEN if error.errno == errno.EADDRINUSE else error.strerror
        raise DistNetworkError(f"cannot listen at {Endpoint(host, port)}: {name}, port: {port}") from error
