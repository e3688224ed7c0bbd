"""What the kernel knows of TCP connections on this node: whose they are, and who may make them."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Collection
from pathlib import Path

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_LOAD_WORD, _LOAD_HALF, _IF_EQUAL, _RETURN = 0x20, 0x28, 0x15, 0x06  # linux/bpf_common.h: classic BPF
_NETWORK_HEADER = 0xFFF00000  # linux/filter.h: SKF_NET_OFF, from which the source address of IPv4 is 12 bytes away
_WHOLE, _NOTHING = 0xFFFFFFFF, 0
_WRAPPED = "0" * 16 + ("FFFF0000" if sys.byteorder == "little" else "0000FFFF")  # IPv4 in an address of IPv6
_HELD = {"01", "08"}  # net/tcp_states.h: established, and closed by the other side alone
_LISTENS = "0A"
_NOBODY_KNOWS = -1  # a user's number that there is not
_DESCRIPTORS = Path("/proc/self/fd")
_NO_INODE = "0"  # of a socket that its process has let go of: the kernel tells root's number for its user then


def plain_address(text: str) -> str:
    """Return an address as IPv4 where IPv6 only wraps it, and without the name of an interface."""
    address = ipaddress.ip_address(text.partition("%")[0])
    wrapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(wrapped or address)


def is_known_of_connections(*, proc: Path = Path("/proc")) -> bool:
    """Whether the kernel tells whose connections are."""
    return (proc / "net" / "tcp").exists()


def is_own_connection(local: tuple[str, int], remote: tuple[str, int], *, proc: Path = Path("/proc")) -> bool:
    """Whether the socket of this node with these ends is of this user or of root."""
    for table, wrap in (("tcp", ""), ("tcp6", _WRAPPED)):
        for one_wrap in dict.fromkeys((wrap, "")):
            ends = f" {one_wrap}{_hexadecimal(*local)} {one_wrap}{_hexadecimal(*remote)} "
            if any(_user(line) in (0, os.geteuid()) for line in _lines(table, ends, proc)):
                return True
    return False


def is_established(local: tuple[str, int], remote: tuple[str, int], *, proc: Path = Path("/proc")) -> bool:
    """Whether the kernel has both ends of a connection to this node; its other side may not have been taken yet."""
    ends = f" {_hexadecimal(*local)} {_hexadecimal(*remote)} "
    return any(ends in line and line.split()[3] == "01" for line in _text("tcp", proc).splitlines())


def strangers_at(port: int, *, proc: Path = Path("/proc")) -> set[int]:
    """Return the other users of this node who have a connection to the loopback `port`."""
    end = f":{port:04X}"
    rows = [line.split() for table in ("tcp", "tcp6") for line in _text(table, proc).splitlines() if f"{end} " in line]
    to_it = [words for words in rows if words[2].endswith(end) and words[3] != _LISTENS]
    users = {_NOBODY_KNOWS if words[9] == _NO_INODE else int(words[7]) for words in to_it}
    return users - {0, os.geteuid()}


def _lines(table: str, part: str, proc: Path) -> list[str]:
    """Return the connections of a table of this network namespace with `part` in their line that a process holds."""
    text = _text(table, proc)
    if part not in text:
        return []
    return [line for line in text.splitlines() if part in line and _is_held(line.split())]


def _text(table: str, proc: Path) -> str:
    try:
        return (proc / "net" / table).read_text()
    except OSError:
        return ""


def _is_held(words: list[str]) -> bool:
    return words[3] in _HELD and words[9] != _NO_INODE


def _user(line: str) -> int:
    return int(line.split()[7])


def _hexadecimal(address: str, port: int) -> str:
    """Return an end of a connection as the kernel's tables have it: words of four bytes in this machine's order."""
    raw = ipaddress.ip_address(address).packed
    words = (int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(0, len(raw), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def connections_to(addresses: Collection[str], port: int) -> list[socket.socket]:
    """Return the connections of this process to a port, each as a socket of its own beside the one that uses it."""
    found = []
    for path in [*_DESCRIPTORS.iterdir()] if _DESCRIPTORS.is_dir() else []:
        with contextlib.suppress(OSError):  # closed meanwhile, no socket, or one that is not connected
            if not str(path.readlink()).startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(path.name)))
            there = connection.getpeername() if connection.family in (socket.AF_INET, socket.AF_INET6) else None
            if there is not None and plain_address(there[0]) in addresses and there[1] == port:
                found.append(connection)
            else:
                connection.close()
    return found


def end_when_silent(connection: socket.socket, seconds: float) -> None:
    """Have the kernel end a connection whose other machine says nothing for so long, as without a network."""
    third = max(1, int(seconds / 3))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", third),
        ("TCP_KEEPINTVL", third),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(seconds * 1000)),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


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
