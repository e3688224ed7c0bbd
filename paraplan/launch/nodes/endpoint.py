"""A host and a port: what they mean on this node, whether anybody answers there, and which process listens here."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them from C++ unmarked
    DistNetworkError,
    TCPStore,
)

from paraplan.errors import UsageError
from paraplan.launch.nodes.interfaces import addresses_of, is_loopback
from paraplan.launch.nodes.native_calls import run_interruptibly
from paraplan.launch.torch_private.texts import PORT_TAKEN

DEFAULT_PORT = 29400
"""The port of an endpoint that names none, as torchrun has it."""

_TRY_S = 5.0
_PAUSES_S = (0.05, 0.5)  # between tries: at first, and later
_SAY_AFTER_S = 5.0
_LISTENING = "0A"  # the state TCP_LISTEN in /proc/net/tcp
_NUM_READS = 5


@dataclass(frozen=True)
class Endpoint:
    """Host and port of a rendezvous."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read `HOST:PORT`, `HOST` or `[IPV6]:PORT`. Raises UsageError for anything else."""
        text = text.strip()
        host, colon, port = text.rpartition(":")
        if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
            host, port = text, str(DEFAULT_PORT)  # an IPv6 address is all colons: only brackets set a port apart
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UsageError(f"--rdzv-endpoint {text!r} is not HOST:PORT", hint="write gpu-a:29400, or [fd00::1]:29400")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def host_of(endpoint: str) -> str:
    """Return the host of what may be an endpoint: `HOST:PORT`, `HOST` or `[IPV6]:PORT`."""
    text = endpoint.strip()
    host, colon, _ = text.rpartition(":")
    is_whole = not colon or text.endswith("]") or (":" in host and not host.startswith("["))
    return (text if is_whole else host).strip("[]")


def meaning_of(host: str) -> str:
    """Return ` (10.0.0.1 on this node)` for a name, "" for an address or a name that is unknown."""
    addresses = addresses_of(host)
    return f" ({' or '.join(addresses)} on this node)" if addresses and addresses != [host] else ""


def await_answer(
    endpoint: Endpoint, *, timeout_s: float, on_wait: Callable[[str], None] = lambda reason: None
) -> OSError | None:
    """Return None once something accepts connections at `endpoint`; after `timeout_s` why nothing does.

    `on_wait` is told the reason once, when it has taken a while. Ctrl-C ends the wait at once, also where a name
    service or a network swallows what is asked of it. Raises `UsageError` for what cannot be the name of a host.
    """
    is_given_up = threading.Event()

    def try_until_answered() -> OSError | None:
        started = time.monotonic()
        is_said = False
        while True:
            elapsed_s = time.monotonic() - started
            try:
                left_s = max(timeout_s - elapsed_s, 0.1)
                socket.create_connection((endpoint.host, endpoint.port), timeout=min(_TRY_S, left_s)).close()
            except OSError as error:
                elapsed_s = time.monotonic() - started
                if elapsed_s >= timeout_s or is_given_up.is_set():
                    return error
                if elapsed_s >= _SAY_AFTER_S and not is_said:
                    is_said = True
                    on_wait(describe_silence(error))
                is_given_up.wait(min(_PAUSES_S[elapsed_s > 1], timeout_s - elapsed_s))
            except UnicodeError as error:
                raise UsageError(
                    f"{endpoint.host!r} is not a host name: {error.__cause__ or error}",
                    hint="give the first node's address",
                ) from None
            else:
                return None

    try:
        return run_interruptibly(try_until_answered)
    finally:
        is_given_up.set()


def describe_silence(error: OSError) -> str:
    """Return in words why nothing has answered a connection."""
    if isinstance(error, socket.gaierror):
        return f"no address is known for it here ({(error.strerror or 'unknown').lower()})"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: no launcher listens on this port of the machine"
    if isinstance(error, TimeoutError):
        return "no answer: no machine has this address, or a firewall drops what is sent to it"
    reason = error.strerror or str(error)
    return f"{reason[:1].lower()}{reason[1:]}"


def is_own_address(address: str) -> bool:
    """Whether `address` is one of this node's own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:  # another's address, one that needs an interface beside it, or a kernel without IPv6
        return False
    return True


def find_listener(port: int, *, proc: Path = Path("/proc")) -> str | None:
    """Return the process that listens on TCP `port` as `python (pid 812)`; None where nobody does or it is hidden.

    Processes of other users and of other containers cannot be seen.
    """
    # the kernel may leave out sockets of its table while others are opened and closed
    sockets = next(filter(None, (_listening_sockets(port, proc) for _ in range(_NUM_READS))), None)
    if sockets is None:
        return None
    for folder in sorted(proc.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        if any(name in sockets for name in _open_files(folder / "fd")):
            with contextlib.suppress(OSError):
                return f"{(folder / 'comm').read_text().strip()} (pid {folder.name})"
    return None


def _open_files(folder: Path) -> Iterator[str]:
    """Yield what the descriptors of a process are open on; some, such as the one that lists them, are gone by then."""
    with contextlib.suppress(OSError):
        for descriptor in list(folder.iterdir()):
            with contextlib.suppress(OSError):
                yield descriptor.readlink().name


def _listening_sockets(port: int, proc: Path) -> set[str]:
    """Return the names `socket:[inode]` of sockets that listen on `port`."""
    names = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    names.add(f"socket:[{fields[9]}]")
    return names


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
