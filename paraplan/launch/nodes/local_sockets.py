"""What the kernel knows of TCP connections on this node: whose they are, and who may make them."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_LOAD_WORD, _LOAD_HALF, _IF_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06  # linux/bpf_common.h: classic BPF
_NETWORK_HEADER = 0xFFF00000  # linux/filter.h: SKF_NET_OFF, from which the source address of IPv4 is 12 bytes away
_WHOLE, _NOTHING = 0xFFFFFFFF, 0
_CLOSING = {"06", "07", "08", "0B"}  # net/tcp_states.h: states in which the process has let go of the socket


@dataclass(frozen=True)
class Connection:
    """A TCP connection as the side sees it to which `local` belongs: addresses with their ports, and the user."""

    local: tuple[str, int]
    remote: tuple[str, int]
    uid: int


def connections(*, proc: Path = Path("/proc")) -> Iterator[Connection]:
    """Yield the TCP connections of this network namespace; none where the kernel does not tell."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] not in _CLOSING:
                    yield Connection(_address(fields[1]), _address(fields[2]), int(fields[7]))


def _address(text: str) -> tuple[str, int]:
    """Read `0100007F:1F90`: words of four bytes in this machine's order."""
    words, _, port = text.partition(":")
    raw = b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    return plain_address(socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)), int(port, 16)


def plain_address(text: str) -> str:
    """Return an address as IPv4 where IPv6 only wraps it, and without the name of an interface."""
    address = ipaddress.ip_address(text.partition("%")[0])
    wrapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(wrapped or address)


def is_known_of_connections(*, proc: Path = Path("/proc")) -> bool:
    """Whether the kernel tells whose connections are."""
    return (proc / "net" / "tcp").exists()


def is_own_connection(local: tuple[str, int], remote: tuple[str, int]) -> bool:
    """Whether the socket of this node with these ends is of this user or of root."""
    users = (0, os.geteuid())
    return any(one.uid in users for one in connections() if (one.local, one.remote) == (local, remote))


def strangers_at(port: int) -> set[int]:
    """Return the other users of this node who have a connection to the loopback `port`."""
    users = {one.uid for one in connections() if one.remote[1] == port and one.remote[0].startswith("127.")}
    return users - {0, os.geteuid()}


def admit_only(listener: socket.socket, source: tuple[str, int] | None) -> None:
    """Have a listening IPv4 socket take no connection but one from `source`; None takes none.

    The kernel drops what others send to it. Connections that it has taken already go on. Where there is no such
    filter, nothing is done.
    """
    if sys.platform != "linux":
        return
    program = [(_RETURN, 0, 0, _NOTHING)]
    if source is not None:
        address = int.from_bytes(socket.inet_aton(source[0]), "big")
        program = [
            (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12),
            (_IF_EQUAL, 0, 3, address),
            (_LOAD_HALF, 0, 0, 0),  # the source port, with which the header of TCP begins
            (_IF_EQUAL, 0, 1, source[1]),
            (_RETURN, 0, 0, _WHOLE),
            *program,
        ]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("HL", len(program), ctypes.addressof(buffer))
    with contextlib.suppress(OSError):  # a kernel, or a sandbox, without filters
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
