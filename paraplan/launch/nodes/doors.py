"""The stores that a job opens on this node, behind gates, and those of other nodes that let it in."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them from C++ unmarked
    DistNetworkError,
    TCPStore,
)

import paraplan
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.endpoint import Endpoint, is_own_address
from paraplan.launch.nodes.gate import Admission, Gate, Launcher
from paraplan.launch.nodes.handshake import RefusedError
from paraplan.launch.nodes.interfaces import addresses_of, is_loopback
from paraplan.launch.nodes.job_token import Seal, job_token, random_token
from paraplan.launch.nodes.local_sockets import admit_only, strangers_at
from paraplan.launch.spec import LaunchSpec, NodeRange
from paraplan.launch.torch_private.texts import PORT_TAKEN

_BACKLOG = 4096
_TRIES = 5
_HANDSHAKE_S = 10.0
_COMES_BACK_S = 1.5
"""A launcher that has lost its connection tries again twice a second."""
_LOOPBACK = "127.0.0.1"


def _short(name: str) -> str:
    """Return the first part of a host's name: some say it with their domain."""
    return name.partition(".")[0]


def own_facts() -> dict[str, str]:
    """Return what a launcher says of itself to others."""
    versions = {"paraplan": paraplan.__version__, "torch": str(torch.__version__)}
    return {"host": socket.gethostname(), "pid": str(os.getpid()), **versions}


@dataclass
class Doors:
    """The gates of one job on this node. `say` gets what is refused, in words.

    `left` are hosts without a launcher any more, and `gone` launchers, with when they were lost, by time.monotonic().
    `clock_offset_s` is how far the clock of the node that hosts the rendezvous is ahead of this one's; 0 on itself.
    """

    token: bytes
    say: Callable[[str], None] = lambda text: None
    facts: Mapping[str, str] = field(default_factory=own_facts)
    left: dict[str, float] = field(default_factory=dict)
    gone: dict[Launcher, float] = field(default_factory=dict)
    clock_offset_s: float | None = None
    _gates: list[Gate] = field(default_factory=list)
    _admissions: dict[tuple[str, int], Admission] = field(default_factory=dict)
    _hosted: set[int] = field(default_factory=set)

    @property
    def seal(self) -> Seal:
        """What signs the texts of this job."""
        return Seal(self.token)

    def close(self) -> None:
        """Close all gates, and leave those of others."""
        for admission in self._admissions.values():
            admission.close()
        for gate in self._gates:
            gate.close()
        self._admissions, self._gates = {}, []

    def host_store(self, host: str, port: int, *, timeout: timedelta) -> TCPStore:
        """Return a new store of this node. Others of the job reach it at `host` and `port`; with port 0 nobody does.

        Raises torch's DistNetworkError where the port is taken, as torch does.
        """
        if port:
            return self.host_store_behind(_listen(host, port), timeout=timeout)
        store, listener = _sealed_store(timeout)
        listener.close()
        self.clock_offset_s = 0.0
        return store

    def host_store_behind(self, listener: socket.socket, *, timeout: timedelta) -> TCPStore:
        """Return a new store of this node that others of the job reach at a socket which listens already."""
        store, sealed = _sealed_store(timeout)
        self._open_gate(listener, sealed)
        self.clock_offset_s = 0.0
        return store

    def host_store_of_ranks(self, host: str, *, timeout: timedelta) -> tuple[TCPStore, int]:
        """Return a store of this node for ranks, and the port at which they reach it."""
        store, sealed = _sealed_store(timeout)
        return store, self._open_gate(_listen(host, 0), sealed)

    def _open_gate(self, listener: socket.socket, store: socket.socket) -> int:
        gate = Gate(
            listener,
            store,
            token=self.token,
            facts=self.facts,
            say=self.say,
            on_came=self._note_came,
            on_left=self._note_left,
        )
        self._gates.append(gate)
        self._hosted.add(gate.port)
        return gate.port

    def _note_came(self, launcher: Launcher) -> None:
        self.left.pop(launcher.host, None)
        self.gone.pop(launcher, None)

    def _note_left(self, launcher: Launcher) -> None:
        self.gone[launcher] = time.monotonic()
        if not any(gate.has(launcher.host) for gate in self._gates):  # another one may have come in its place
            self.left[launcher.host] = self.gone[launcher]

    def is_gone(self, address: str, pid: int) -> bool:
        """Whether a launcher, by its name in the rendezvous, was lost a while ago and has not come back."""
        patience = time.monotonic() - _COMES_BACK_S
        return any(
            pid == one.pid and moment < patience and (address == one.source or _short(address) == _short(one.host))
            for one, moment in list(self.gone.items())
        )

    def enter(self, endpoint: Endpoint, *, timeout_s: float = _HANDSHAKE_S) -> None:
        """Be let in at an endpoint of another launcher, once. Raises `RefusedError` and OSError."""
        key = (endpoint.host, endpoint.port)
        if key in self._admissions:
            return
        admission = Admission(key, token=self.token, facts=self.facts, timeout_s=timeout_s)
        self._admissions[key] = admission
        if self.clock_offset_s is None:
            self.clock_offset_s = admission.clock_offset_s

    def hosts(self, host: str, port: int) -> bool:
        """Whether the store at an address is this node's own."""
        return port in self._hosted and any(map(is_own_address, addresses_of(host)))


def open_doors(spec: LaunchSpec, nodes: NodeRange, environment: Mapping[str, str]) -> Doors:
    """Return the doors of a job. Raises `ArgumentError` where several nodes have no secret in common.

    A job of one node has a token of its own, and so has one under a rendezvous that is not paraplan's to guard.
    """
    if nodes.max == 1 or spec.rdzv_backend not in ("static", "c10d"):
        return Doors(random_token(), say=say)
    return Doors(job_token(environment, job=spec.rdzv_id), say=say)


def _sealed_store(timeout: timedelta) -> tuple[TCPStore, socket.socket]:
    """Return a store that takes no connection, and its listening socket."""
    for _ in range(_TRIES):
        listener = socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG)
        kept = listener.dup()
        port = listener.getsockname()[1]
        store = TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        admit_only(kept, None)
        if not strangers_at(port):  # who found the port in the moment before it was closed
            return store, kept
        kept.close()
    raise RefusedError(f"other users of this machine ({os.uname().nodename}) connect to every store")


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address of `host` alone.

    A name that means a loopback address here, and another elsewhere, as Debian has a host's own name, is listened for
    on all addresses. Raises DistNetworkError.
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
