"""Machines that tell each other what they are: each puts its text into one store and reads those of all."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it from C++ unmarked

from paraplan.errors import ParaplanError, UsageError
from paraplan.launch.nodes.doors import Doors
from paraplan.launch.nodes.endpoint import Endpoint, await_answer, describe_silence

_POLL_S = 0.1
_FAREWELL_S = 10.0
_PARTING_S = 1.0  # for nodes that come after a failure, to read why nobody comes
_STORE_S = 60.0  # for one answer of the store, which a busy host may delay; how long nodes wait is their own affair


class NodesMissingError(ParaplanError):
    """Nodes that did not come in time, or a host that cannot be reached."""

    exit_status = 1


@dataclass(frozen=True)
class NodeText:
    """What one node has to tell: its rank (None: any that is free), its name in messages, and the text."""

    rank: int | None
    name: str
    text: str


def exchange_texts(
    mine: NodeText,
    *,
    endpoint: Endpoint,
    num_nodes: int,
    timeout_s: float,
    token: bytes,
    on_wait: Callable[[str], None] = lambda message: None,
) -> tuple[int, list[str]]:
    """Return this node's rank and the texts of all nodes by rank; every one of `num_nodes` nodes must call it.

    Node 0 hosts the store, on the endpoint's address alone; without ranks it is the node that has that address. Only
    nodes that know `token` are let in.
    `on_wait` is told once that there is something to wait for. Raises `NodesMissingError` after `timeout_s` with the
    nodes that are missing, `RefusedError` for another token, and `UsageError` for ranks and numbers of nodes that
    contradict each other.
    """
    if mine.rank is not None and not 0 <= mine.rank < num_nodes:
        raise UsageError(
            f"--node-rank {mine.rank} is outside the {num_nodes} nodes of --nnodes", hint=f"use 0 to {num_nodes - 1}"
        )
    deadline = time.monotonic() + timeout_s
    listener = _listen(endpoint, rank=mine.rank)
    on_wait(f"waiting for {num_nodes} nodes at {endpoint}" + ("" if listener is None else ", which this node hosts"))
    if listener is None:
        _await_host(endpoint, deadline, timeout_s)
    hosts, address = listener is not None, "" if listener is None else str(listener.getsockname()[0])
    doors, patience = Doors(token, say=on_wait), timedelta(seconds=max(_STORE_S, timeout_s))
    try:
        if listener is not None:
            store = doors.host_store_behind(listener, timeout=patience)
        else:
            doors.enter(endpoint)
            store = TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=patience, wait_for_workers=False)
        exchange = _Exchange(store, endpoint=endpoint, num_nodes=num_nodes, hosts=hosts, hint=_hint(endpoint, address))
        try:
            rank = exchange.enter(mine)
            return rank, exchange.wait_for_all(deadline, timeout_s)
        finally:
            exchange.leave()
    except (RuntimeError, OSError) as error:  # torch's errors of a broken connection, and a gate's
        raise NodesMissingError(
            f"the node that hosts {endpoint} ended before all {num_nodes} nodes had joined",
            hint="see its own message; start all nodes again",
        ) from error
    finally:
        doors.close()


class _Exchange:
    """The keys that the nodes write, and how long they wait for each other's."""

    def __init__(self, store: TCPStore, *, endpoint: Endpoint, num_nodes: int, hosts: bool, hint: str) -> None:
        self._store = store
        self._endpoint = endpoint
        self._num_nodes = num_nodes
        self._hosts = hosts
        self._hint = hint
        self._failed = False

    def enter(self, mine: NodeText) -> int:
        """Write this node's text under its rank, or under the next free one. Returns the rank."""
        self._store.add("came", 1)
        agreed = int(self._store.compare_set("num_nodes", "", str(self._num_nodes)))
        if agreed != self._num_nodes:
            message = (
                f"--nnodes is {agreed} on one node that came to {self._endpoint}, and {self._num_nodes} on another"
            )
            self._end(message)
            raise UsageError(message, hint="give all nodes the same number")
        token = f"{mine.name} {time.time_ns()}"
        rank = mine.rank
        if rank is None:
            rank = 0 if self._hosts else int(self._store.add("next_rank", 1))
        owner = token
        if rank < self._num_nodes:
            owner = self._store.compare_set(f"owner/{rank}", "", token).decode()
        if rank >= self._num_nodes or owner != token:
            self._failed = True
            taken = f"more than {self._num_nodes} nodes" if mine.rank is None else f"--node-rank {rank} is taken"
            raise UsageError(
                f"{taken} at {self._endpoint}" + ("" if owner == token else f", by {owner.rpartition(' ')[0]}"),
                hint="give each node a --node-rank of its own, and all the same --nnodes",
            )
        self._store.set(f"text/{rank}", mine.text)
        return rank

    def wait_for_all(self, deadline: float, timeout_s: float) -> list[str]:
        """Return the texts of all nodes by rank; raise `NodesMissingError` with those that have not come."""
        missing = set(range(self._num_nodes))
        while missing:
            missing = {rank for rank in missing if not self._store.check([f"text/{rank}"])}
            if missing and self._store.check(["ended"]):
                self._failed = True
                raise NodesMissingError(self._store.get("ended").decode(), hint="start all nodes again")
            if missing and time.monotonic() > deadline:
                error = self._error(missing, timeout_s)
                self._end(error.message)
                raise error
            if missing:
                time.sleep(_POLL_S)
        return [self._store.get(f"text/{rank}").decode() for rank in range(self._num_nodes)]

    def _end(self, message: str) -> None:
        """Tell the nodes that wait why the exchange has failed."""
        self._failed = True
        self._store.set("ended", message)

    def leave(self) -> None:
        """Say that this node has read all; the host stays until every node that came has, and for latecomers."""
        with contextlib.suppress(RuntimeError):
            self._store.add("left", 1)
            if not self._hosts:
                return
            started = time.monotonic()
            is_early = self._failed
            while is_early or int(self._store.add("left", 0)) < int(self._store.add("came", 0)):
                time.sleep(_POLL_S / 2)
                elapsed_s = time.monotonic() - started
                is_early = self._failed and elapsed_s < _PARTING_S
                if elapsed_s > _FAREWELL_S:
                    break

    def _error(self, missing: set[int], timeout_s: float) -> NodesMissingError:
        came = [
            f"{rank} ({self._store.get(f'owner/{rank}').decode().rpartition(' ')[0]})"
            for rank in range(self._num_nodes)
            if rank not in missing
        ]
        absent = ", ".join(str(rank) for rank in sorted(missing))
        return NodesMissingError(
            f"{len(missing)} of {self._num_nodes} nodes did not reach {self._endpoint} within {timeout_s:g} s: "
            f"missing {_counted('node', len(missing))} {absent}; here {_counted('is', len(came))} {', '.join(came)}",
            hint=self._hint,
        )


def _hint(endpoint: Endpoint, address: str) -> str:
    """Return what to do about missing nodes; `address` is what this node listens on, "" where it does not."""
    if address.startswith("127.") and not endpoint.host.startswith(("127.", "localhost")):
        return f"{endpoint.host} means {address} on this node, which no other node reaches: give its network address"
    return "run the same command on every node, and let the port through its firewall"


def _counted(word: str, count: int) -> str:
    several = {"node": "nodes", "is": "are"}
    return word if count == 1 else several[word]


def _listen(endpoint: Endpoint, *, rank: int | None) -> socket.socket | None:
    """Return a socket that listens on the endpoint's address, None where another node hosts.

    Raises UsageError where the name means no address, and where node 0 cannot listen.
    """
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UsageError(
            f"--rdzv-endpoint {endpoint}: no address of {endpoint.host} is known: {error.strerror}",
            hint="give the address of the first node",
        ) from None
    if rank is not None and rank > 0:
        return None
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        # Another machine's address, or a port that a node on this machine hosts already: that node is the first.
        if rank is None and error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise UsageError(
            f"node 0 cannot listen on {endpoint}: {error.strerror}",
            hint="give an address of the node with --node-rank 0, and a free port",
        ) from None
    return listener


def _await_host(endpoint: Endpoint, deadline: float, timeout_s: float) -> None:
    """Wait until the endpoint accepts connections; raise `NodesMissingError` where it does not in time."""
    silence = await_answer(endpoint, timeout_s=deadline - time.monotonic())
    if silence is not None:
        raise NodesMissingError(
            f"node 0 is missing: nothing listens at {endpoint} after {timeout_s:g} s ({describe_silence(silence)})",
            hint="start the same command on the node that has this address, and let the port through its firewall",
        )
