"""The network interface by which this node reaches the others, for the libraries that would look for one themselves."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paraplan.launch.nodes.native_calls import run_interruptibly

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_IPV6_TABLE = Path("/proc/net/if_inet6")
_NCCL_FILES = (Path("/etc/nccl.conf"), Path.home() / ".nccl.conf")


def interface_towards(host: str) -> str | None:
    """Return the name of the interface whose address packets to `host` carry; None for loopback or where unknown."""
    address = address_towards(host)
    if address is None or is_loopback(address):
        return None
    if ":" in address:
        return _interface_of_ipv6(address)
    for _, name in socket.if_nameindex():
        if _address_of(name) == address:
            return name
    return None


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
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _address_of(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _interface_of_ipv6(address: str) -> str | None:
    """Return the interface that has an address of IPv6, by the kernel's table: address, four numbers, name a line."""
    digits = ipaddress.ip_address(address).packed.hex()
    with suppress(OSError):
        for line in _IPV6_TABLE.read_text().splitlines():
            words = line.split()
            if words[0] == digits:
                return words[-1]
    return None


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
    chosen = {}
    if "GLOO_SOCKET_IFNAME" not in environment:
        chosen["GLOO_SOCKET_IFNAME"] = name
    has_file = any(path.is_file() and "NCCL_SOCKET_IFNAME" in path.read_text(errors="replace") for path in nccl_files)
    if has_gpus and "NCCL_SOCKET_IFNAME" not in environment and not has_file:
        chosen["NCCL_SOCKET_IFNAME"] = f"={name}"  # exactly this one, not all that begin like it
    return chosen
