"""Hosts for tests: network namespaces with addresses of their own, on a bridge that only they are on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SUBNET = "10.231.7"
IP = shutil.which("ip") or "ip"


@dataclass(frozen=True)
class Place:
    """Where a process is that is on a host."""

    namespace: str
    host_name: str


@dataclass(frozen=True)
class Hosts:
    """Hosts with the addresses 10.231.7.1, .2, ...; none has a name service."""

    name: str
    count: int

    @property
    def addresses(self) -> list[str]:
        return [f"{SUBNET}.{number}" for number in range(1, self.count + 1)]

    def command(self, index: int, *words: str) -> list[str]:
        """Return the command that runs `words` on a host, where the host has a host name of its own too."""
        inner, place = 'hostname "$0" && exec "$@"', self.place(index)
        shell = ["unshare", "--uts", "sh", "-c", inner, place.host_name]
        return ["ip", "netns", "exec", place.namespace, *shell, *words]

    def place(self, index: int) -> Place:
        return Place(f"{self.name}h{index}", f"node{index}")

    def set_link(self, index: int, state: str) -> None:
        """Take a host off the network (`down`) or put it back (`up`)."""
        _ip("link", "set", f"{self.name}v{index}", state)


def missing_for_hosts() -> str | None:
    """Return why hosts cannot be made here, None where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "hostname"):
        if shutil.which(program) is None:
            return f"there is no program {program}"
    probe = f"pp{os.getpid()}x"
    if subprocess.run([IP, "netns", "add", probe], capture_output=True, check=False).returncode:
        return "this kernel or container gives no network namespaces"
    _ip("netns", "del", probe)
    return None


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Make hosts, and take them away at the end."""
    made = Hosts(f"pp{os.getpid()}", count)
    bridge = f"{made.name}b"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for index, address in enumerate(made.addresses):
            namespace, link = f"{made.name}h{index}", f"{made.name}v{index}"
            _ip("netns", "add", namespace)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", link, "master", bridge, "up")
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for index in range(count):
            subprocess.run([IP, "link", "del", f"{made.name}v{index}"], capture_output=True, check=False)
            subprocess.run([IP, "netns", "del", f"{made.name}h{index}"], capture_output=True, check=False)
        subprocess.run([IP, "link", "del", bridge], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True, capture_output=True)
