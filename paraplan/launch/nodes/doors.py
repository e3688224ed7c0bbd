"""The stores that a job opens on this node, behind gates, and those of other nodes that let it in."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them from C++ unmarked
    DistNetworkError,
    TCPStore,
)

import paraplan
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.election import Answer, Standing
from paraplan.launch.nodes.endpoint import Endpoint, is_own_address
from paraplan.launch.nodes.gate import Admission, Gate, Launcher
from paraplan.launch.nodes.handshake import RefusedError, close_connection
from paraplan.launch.nodes.interfaces import addresses_of, is_loopback
from paraplan.launch.nodes.job_token import Seal, job_token, random_token
from paraplan.launch.nodes.local_sockets import admit_only, connections_to, end_when_silent, strangers_at
from paraplan.launch.spec import LaunchSpec, NodeRange
from paraplan.launch.torch_private.texts import PORT_TAKEN

_BACKLOG = 4096
_TRIES = 5
_HANDSHAKE_S = 10.0
_COMES_BACK_S = 1.5
"""A launcher that has lost its connection tries again twice a second."""
_READS_THE_END_S = 3.0
"""torch's rendezvous reads the state of a job once a second."""
_LOOKS_EVERY_S = 0.05
_LOOPBACK = "127.0.0.1"


def _short(name: str) -> str:
    """Return the first part of a host's name: some say it with their domain."""
    return name.partition(".")[0]


def _is_named(launcher: Launcher, address: str, pid: int) -> bool:
    """Whether a launcher is the one of these in the rendezvous."""
    return pid == launcher.pid and (address == launcher.source or _short(address) == _short(launcher.host))


def own_facts() -> dict[str, str]:
    """Return what a launcher says of itself to others."""
    versions = {"paraplan": paraplan.__version__, "torch": str(torch.__version__)}
    return {"host": socket.gethostname(), "pid": str(os.getpid()), **versions}


@dataclass
class Doors:
    """The gates of one job on this node. `say` gets what is refused, in words.

    `left` are hosts without a launcher any more, and `gone` launchers, with when they were lost, by time.monotonic().
    `clock_offset_s` is how far the clock of the node that hosts the rendezvous is ahead of this one's; 0 on itself.
    `standing` is what is known of the node that does.
    """

    token: bytes
    say: Callable[[str], None] = lambda text: None
    facts: Mapping[str, str] = field(default_factory=own_facts)
    left: dict[str, float] = field(default_factory=dict)
    gone: dict[Launcher, float] = field(default_factory=dict)
    clock_offset_s: float | None = None
    standing: Standing = field(default_factory=Standing)
    spares: Sequence[tuple[str, int]] = ()
    """Address and process of launchers that wait for a place in the job."""
    elsewhere: Sequence[str] = ()
    """Doors at which the job may be beside its endpoint, as the command line, or a batch system, has them."""
    own_store: TCPStore | None = None
    """The store behind this node's own door, at which others find it."""
    _gates: list[Gate] = field(default_factory=list)
    _line: list[socket.socket] = field(default_factory=list)
    _admissions: dict[tuple[str, int], Admission] = field(default_factory=dict)
    _hosted: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Of `left` and `gone`: guests come and leave in threads of their own."""

    @property
    def seal(self) -> Seal:
        """What signs the texts of this job."""
        return Seal(self.token)

    def close(self) -> None:
        """Close all gates, and leave those of others."""
        self.cut_line()
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
        # A node that came to a store which the job has left would begin another job there.
        self._open_gate(listener, sealed, is_open=lambda: self.standing.leader in ("", self.standing.door))
        self.clock_offset_s = 0.0
        self.own_store = store
        return store

    def open_own_door(self, endpoint: Endpoint, *, timeout: timedelta) -> None:
        """Open a store of this node's own that others may meet at, where this node does not host the endpoint's.

        It listens on the address that this node has towards the endpoint alone: at the endpoint's port, which
        firewalls let through, or at a free one where that is taken.
        """
        admission = self._admissions.get((endpoint.host, endpoint.port))
        if admission is None and self.standing.term:  # its host is away
            leader = Endpoint.parse(self.standing.leader)
            admission = self._admissions.get((leader.host, leader.port))
        if self.own_store is not None or admission is None:
            self.standing.door = str(endpoint) if self.own_store is not None else ""
            return
        try:
            listener = _listen(admission.own_end[0], endpoint.port)
        except DistNetworkError:
            listener = _listen(admission.own_end[0], 0)
        offset_s = self.clock_offset_s
        self.host_store_behind(listener, timeout=timeout)
        self.clock_offset_s = offset_s
        self.standing.door = str(Endpoint(admission.own_end[0], listener.getsockname()[1]))

    def drop_guests(self) -> None:
        """End all connections to the stores of this node: the job is elsewhere, and who waits here looks for it."""
        for gate in self._gates:
            gate.drop_guests()

    def hold_line(self, endpoint: Endpoint, *, silence_s: float) -> None:
        """Have the connections to the store at an endpoint end where its machine says nothing for so long."""
        self.cut_line()
        admission = self._admissions[endpoint.host, endpoint.port]
        admission.end_when_silent(silence_s)
        for connection in connections_to(addresses_of(endpoint.host), endpoint.port):
            if connection.getsockname()[1] == admission.own_end[1]:  # which a launcher that does not see us go minds
                connection.close()
            else:
                end_when_silent(connection, silence_s)
                self._line.append(connection)

    def cut_line(self) -> None:
        """End those connections: calls that wait for the store raise."""
        for connection in self._line:
            close_connection(connection)
        self._line = []

    def host_store_of_ranks(self, host: str, *, timeout: timedelta) -> tuple[TCPStore, int]:
        """Return a store of this node for ranks, and the port at which they reach it."""
        store, sealed = _sealed_store(timeout)
        return store, self._open_gate(_listen(host, 0), sealed)

    def _open_gate(
        self, listener: socket.socket, store: socket.socket, *, is_open: Callable[[], bool] = lambda: True
    ) -> int:
        gate = Gate(
            listener,
            store,
            token=self.token,
            facts=self.facts,
            say=self.say,
            on_came=self._note_came,
            on_left=self._note_left,
            reply=self.standing.reply,
            is_open=is_open,
        )
        self._gates.append(gate)
        self._hosted.add(gate.port)
        return gate.port

    def _note_came(self, launcher: Launcher) -> None:
        with self._lock:
            self.left.pop(launcher.host, None)
            self.gone.pop(launcher, None)

    def _note_left(self, launcher: Launcher) -> None:
        with self._lock:  # or a launcher whose next connection comes in the meantime would be gone for good
            here = self._guests()
            if launcher in here:  # by another connection
                return
            self.gone[launcher] = time.monotonic()
            if launcher.host not in {one.host for one in here}:  # another one may have come in its place
                self.left[launcher.host] = self.gone[launcher]

    def _guests(self) -> set[Launcher]:
        return {launcher for gate in self._gates for launcher in gate.launchers}

    def is_gone(self, address: str, pid: int) -> bool:
        """Whether a launcher, by its name in the rendezvous, was lost a while ago and has not come back."""
        patience = time.monotonic() - _COMES_BACK_S
        return any(moment < patience and _is_named(one, address, pid) for one, moment in list(self.gone.items()))

    def see_off_spares(self) -> None:
        """Leave the store of this node open until launchers that wait for a place have read that the job has ended."""
        until_s = time.monotonic() + _READS_THE_END_S
        while time.monotonic() < until_s and any(
            _is_named(one, address, pid) for one in self._guests() for address, pid in self.spares
        ):
            time.sleep(_LOOKS_EVERY_S)

    def enter(self, endpoint: Endpoint, *, timeout_s: float = _HANDSHAKE_S, again: bool = False) -> None:
        """Be let in at an endpoint of another launcher, once. Raises `RefusedError` and OSError.

        `again` is for a launcher that may be another one by now.
        """
        key = (endpoint.host, endpoint.port)
        if key in self._admissions and not again:
            return
        before = self._admissions.pop(key, None)
        if before is not None:
            before.close()
        admission = Admission(key, token=self.token, facts=self._said_on_coming, timeout_s=timeout_s)
        self._admissions[key] = admission
        if self.clock_offset_s is None:
            self.clock_offset_s = admission.clock_offset_s

    def _said_on_coming(self) -> Mapping[str, Any]:
        return {**self.facts, **self.standing.words()}

    def members_at(self) -> list[str]:
        """Return the hosts of launchers here that were in a round of the job as they came."""
        return sorted({launcher.host for gate in self._gates for launcher in gate.members})

    def job_at(self, endpoint: Endpoint) -> Answer | None:
        """Return what the launcher at an endpoint said of its job on letting this one in.

        None where the job has been at this endpoint from the start.
        """
        try:
            said = Answer.read(self._admissions[endpoint.host, endpoint.port].host_facts)
        except (ValueError, TypeError):
            return None
        return said if said.leader and (said.term or said.leader != said.door) else None

    def others_at(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Return the doors of other nodes of the job that the launcher at an endpoint has named, if it has."""
        admission = self._admissions.get((endpoint.host, endpoint.port))
        try:
            return () if admission is None else Answer.read(admission.host_facts).others
        except (ValueError, TypeError):
            return ()

    def retire(self, *, but: str) -> None:
        """Come back to no launcher whose connection is lost, but to the one at this door, where the job is."""
        for key, admission in self._admissions.items():
            if str(Endpoint(*key)) != but:
                admission.retire()

    def hosts(self, host: str, port: int) -> bool:
        """Whether the store at an address is this node's own."""
        return port in self._hosted and any(map(is_own_address, addresses_of(host)))


def open_doors(spec: LaunchSpec, nodes: NodeRange, environment: Mapping[str, str]) -> Doors:
    """Return the doors of a job. Raises `ArgumentError` where several nodes have no secret in common.

    A job of one node has a token of its own, and so has one under a rendezvous that is not paraplan's to guard.
    """
    if nodes.max == 1 or spec.rdzv_backend not in ("static", "c10d"):
        return Doors(random_token(), say=say)
    return Doors(job_token(environment, job=spec.rdzv_id), say=say, elsewhere=spec.other_endpoints)


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
