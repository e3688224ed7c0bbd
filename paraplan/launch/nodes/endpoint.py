"""Hosts and ports: addresses and interfaces of this node, who answers or listens where, and calls that stay in C."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them from C++ unmarked
    DistNetworkError,
    TCPStore,
)

from paraplan.errors import UsageError
from paraplan.launch.torch_private.texts import PORT_TAKEN

ResultT = TypeVar("ResultT")

WAIT_S = 10.0
"""How long an answer may take before it is said that it is waited for."""

DEFAULT_PORT = 29400
"""The port of an endpoint that names none, as torchrun has it."""

_TRY_S = 5.0
_PAUSES_S = (0.05, 0.5)  # between tries: at first, and later
_SAY_AFTER_S = 5.0
_LISTENING = "0A"  # the state TCP_LISTEN in /proc/net/tcp
_NUM_READS = 5
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_IPV6_TABLE = Path("/proc/net/if_inet6")
_NCCL_FILES = (Path("/etc/nccl.conf"), Path.home() / ".nccl.conf")
_BACKLOG = 4096
_LOOPBACK = "127.0.0.1"


def run_interruptibly(
    call: Callable[[], ResultT], *, timeout_s: float | None = None, on_wait: Callable[[], None] | None = None
) -> ResultT:
    """Return what `call` returns, made in a thread: it may stay in C, where no signal reaches it and ends the wait.

    `on_wait` is called once when that takes `WAIT_S`, and `timeout_s` counts from there. Raises TimeoutError after
    `timeout_s` (None: never); `call` then goes on, and nobody waits for it.
    """
    answer: Future[ResultT] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # raised again where it is waited for
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="paraplan-call").start()
    if on_wait is not None and not wait([answer], timeout=WAIT_S).done:
        on_wait()
    if not wait([answer], timeout=timeout_s).done:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return answer.result()


def interface_towards(host: str) -> str | None:
    """Return the name of the interface whose address packets to `host` carry; None for loopback or where unknown."""
    address = address_towards(host)
    if address is None or is_loopback(address):
        return None
    if ":" in address:
        return _interface_of_ipv6(address)
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def address_towards(host: str) -> str | None:
    """Return this node's address for packets to `host`, None where it has no way there. Sends nothing.

    Of a host with addresses of both kinds the first is taken to which there is a way, IPv4 before IPv6.
    """
    for there in sorted(addresses_of(host), key=lambda address: ":" in address):
        family = socket.AF_INET6 if ":" in there else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:  # the first: a kernel without IPv6
            probe.connect((there, 9))
            return str(probe.getsockname()[0]).partition("%")[0]
    return None


def addresses_of(host: str) -> list[str]:
    """Return the addresses that `host` means on this node; none where it is unknown.

    Ctrl-C ends the wait for a name service that does not answer.
    """
    with suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    try:
        found = run_interruptibly(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # the latter for an invalid name, as one with a label of 64 characters
        return []
    return sorted({str(entry[4][0]) for entry in found})


def is_loopback(address: str) -> bool:
    """Whether only this node can reach `address`."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _address_of(name: str) -> str | None:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _interface_of_ipv6(address: str) -> str | None:
    """Return the interface that has an address of IPv6, by the kernel's table: address, four numbers, name a line."""
    digits, rows = ipaddress.ip_address(address).packed.hex(), list[list[str]]()
    with suppress(OSError):
        rows = [line.split() for line in _IPV6_TABLE.read_text().splitlines()]
    return next((words[-1] for words in rows if words[0] == digits), None)


def interface_variables(
    host: str, environment: Mapping[str, str], *, has_gpus: bool, nccl_files: tuple[Path, ...] = _NCCL_FILES
) -> dict[str, str]:
    """Return the variables that put gloo, and NCCL where there are GPUs, on the interface towards `host`.

    gloo takes the address of the host's own name, which often means loopback; NCCL takes the first interface. Nothing
    that the environment or a file of NCCL's sets is overruled.
    """
    name = interface_towards(host)
    if name is None:
        return {}
    has_file = any(path.is_file() and "NCCL_SOCKET_IFNAME" in path.read_text(errors="replace") for path in nccl_files)
    chosen = {"GLOO_SOCKET_IFNAME": name}
    if has_gpus and not has_file:
        chosen["NCCL_SOCKET_IFNAME"] = f"={name}"  # exactly this one, not all that begin like it
    return {variable: value for variable, value in chosen.items() if variable not in environment}


@dataclass(frozen=True)
class Endpoint:
    """Host and port of a rendezvous."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read `HOST:PORT`, `HOST` or `[IPV6]:PORT`. Raises UsageError for anything else."""
        host, port = _split(text)
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise UsageError(f"--rdzv-endpoint {text!r} is not HOST:PORT", hint="write gpu-a:29400, or [fd00::1]:29400")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def host_of(endpoint: str) -> str:
    """Return the host of what may be an endpoint: `HOST:PORT`, `HOST` or `[IPV6]:PORT`."""
    return _split(endpoint)[0]


def _split(text: str) -> tuple[str, str]:
    """Return host and port. An IPv6 address is all colons: only brackets set a port apart."""
    text = text.strip()
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, str(DEFAULT_PORT)
    return host.removeprefix("[").removesuffix("]"), port


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
        started, elapsed_s, is_said = time.monotonic(), 0.0, False
        while True:
            try:
                patience_s = min(_TRY_S, max(timeout_s - elapsed_s, 0.1))
                socket.create_connection((endpoint.host, endpoint.port), timeout=patience_s).close()
            except OSError as error:
                elapsed_s = time.monotonic() - started
                if elapsed_s >= timeout_s or is_given_up.is_set():
                    return error
                if elapsed_s >= _SAY_AFTER_S and not is_said:
                    is_said = True
                    on_wait(describe_silence(error))
                is_given_up.wait(min(_PAUSES_S[elapsed_s > 1], timeout_s - elapsed_s))
                elapsed_s = time.monotonic() - started
            except UnicodeError as error:
                wrong = f"{endpoint.host!r} is not a host name: {error.__cause__ or error}"
                raise UsageError(wrong, hint="give the first node's address") from None
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
    # not another's address, one that needs an interface beside it, nor one of IPv6 for a kernel without it
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


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
            with suppress(OSError):
                return f"{(folder / 'comm').read_text().strip()} (pid {folder.name})"
    return None


def _open_files(folder: Path) -> Iterator[str]:
    """Yield what the descriptors of a process are open on; some, such as the one that lists them, are gone by then."""
    with suppress(OSError):
        for descriptor in list(folder.iterdir()):
            with suppress(OSError):
                yield descriptor.readlink().name


def _listening_sockets(port: int, proc: Path) -> set[str]:
    """Return the names `socket:[inode]` of sockets that listen on `port`."""
    names = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    names.add(f"socket:[{fields[9]}]")
    return names


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
