"""The rendezvous of nodes: stores whose waits Ctrl-C ends, who is missing in words, and texts that nodes exchange."""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them from C++ unmarked
    DistNetworkError,
    Store,
    TCPStore,
)

from paraplan.errors import ParaplanError, UsageError
from paraplan.launch.faults.report import say
from paraplan.launch.nodes.endpoint import (
    Endpoint,
    addresses_of,
    await_answer,
    describe_silence,
    find_listener,
    host_of,
    host_store,
    is_loopback,
    is_own_address,
    meaning_of,
    run_interruptibly,
)
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.sealed_values import SealedValues
from paraplan.launch.nodes.store import StoreLostError
from paraplan.launch.spec import DEFAULT_MASTER_PORT, LaunchSpec, NodeRange
from paraplan.launch.torch_private.texts import CLOSED_RENDEZVOUS, LATE_RENDEZVOUS, NOBODY_THERE, PORT_TAKEN

_POLL_S = 0.05
_FAREWELL_S = 10.0
_PATIENCE = timedelta(seconds=60)  # for one answer of the store, which a busy host may delay
_CAME, _LEFT = "paraplan/came", "paraplan/left"
_NNODES, _CONTRADICTION, _NUM_HERE = "nnodes", "contradiction", "number that came"
_HINT = "start the same command on every node, and let the port through their firewalls"


SAY_AFTER_S = 5.0
"""How long nodes are waited for before it is said which are missing."""


class NoRendezvousError(ParaplanError):
    """Nodes that do not find each other, or a port that is taken."""

    exit_status = 1


def open_store(host: str, port: int, *, is_master: bool, timeout: timedelta, **_: Any) -> TCPStore:
    """Return the store at an endpoint, which `is_master` hosts itself; torch's arguments.

    Others wait until something answers there, for as long as torch does: twice `timeout`. Ctrl-C ends the wait at
    once, which in torch's own code it does not. Raises torch's errors where it cannot be hosted, and
    `NoRendezvousError` where nothing answers, or something that is no store.
    """
    endpoint, timeout_s = Endpoint(host, port), 2 * timeout.total_seconds()
    if is_master:
        return run_interruptibly(lambda: host_store(host, port, timeout=timeout))
    named = f"{endpoint}{meaning_of(endpoint.host)}"
    silence = await_answer(endpoint, timeout_s=timeout_s, on_wait=lambda reason: say(f"waiting for {named}: {reason}"))
    if silence is not None:
        raise _nobody_error(endpoint, f"{named}: {describe_silence(silence)}; tried for {timeout_s:g} s")
    try:
        return run_interruptibly(
            lambda: TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False),
            timeout_s=timeout_s,
            on_wait=lambda: say(f"waiting for {named}: it accepts connections and says nothing"),
        )
    except TimeoutError as error:
        raise _stranger_error(endpoint, named, "it accepts connections and says nothing") from error
    except RuntimeError as error:  # torch's DistError is a RuntimeError
        raise _stranger_error(endpoint, named, str(error)) from error


def require_same_nnodes(values: SealedValues, nodes: NodeRange, *, endpoint: str) -> None:
    """Raise `NoRendezvousError` where another node of the rendezvous was given another --nnodes."""
    agreed, host = NodeRange.parse(str(values.claim(_NNODES, str(nodes)))), socket.gethostname()
    if agreed != nodes:
        values.set(_CONTRADICTION, f"{host} came with --nnodes {nodes}, and not {agreed}")
        raise NoRendezvousError(
            f"--nnodes is {agreed} on the first node that came to {endpoint}, and {nodes} here, on {host}",
            hint="give all nodes the same number",
        )


def find_contradiction(values: SealedValues) -> str | None:
    """Return what a node that was sent away contradicted, None where there was no such node."""
    return str(values.get([_CONTRADICTION])[0]) if values.has(_CONTRADICTION) else None


class Arrival:
    """The nodes of a fixed number that come to one store, each with its rank, the name of its host and a text."""

    def __init__(self, store: Store, endpoint: Endpoint, *, num_nodes: int, seal: Seal) -> None:
        self._values, self._endpoint, self._num_nodes = SealedValues(store, seal), str(endpoint), num_nodes

    def come(self, rank: int | None, *, text: str = "") -> None:
        """Say that this node is here, under the next free rank where it has none.

        Raises `NoRendezvousError` for another number of nodes, and for a rank that is taken.
        """
        nodes = NodeRange(self._num_nodes, self._num_nodes)
        require_same_nnodes(self._values, nodes, endpoint=self._endpoint)
        mine = {"host": socket.gethostname(), "id": secrets.token_hex(8), "text": text}
        wanted = range(self._num_nodes) if rank is None else (rank,)
        for one in wanted:
            owner = self._values.claim(f"here/{one}", mine)
            if owner == mine:
                self._values.add(_NUM_HERE, 1)
                return
        taken = f"more than {self._num_nodes} nodes came to" if rank is None else f"--node-rank {rank} is taken at"
        raise NoRendezvousError(
            f"{taken} {self._endpoint}" + ("" if rank is None else f" by {owner['host']}"),
            hint="give each node a --node-rank of its own, and all the same --nnodes",
        )

    def wait_for_all(self, timeout_s: float) -> list[str]:
        """Return the texts of all nodes by rank. A look is one call of the store, however many nodes there are.

        Raises `NoRendezvousError` with the nodes that have not come in time.
        """
        deadline, says_at = time.monotonic() + timeout_s, time.monotonic() + SAY_AFTER_S
        while self._values.add(_NUM_HERE, 0) < self._num_nodes or self._missing():
            if time.monotonic() > min(says_at, deadline):
                missing = self._missing()
                words = f"{'node' if len(missing) == 1 else 'nodes'} {', '.join(map(str, missing))}"
                if time.monotonic() > deadline:
                    raise self._missing_error(missing, words, timeout_s)
                say(f"waiting at {self._endpoint} for {words} of {self._num_nodes}")
                contradiction = find_contradiction(self._values)
                if contradiction is not None:
                    say(contradiction)
                says_at = deadline + SAY_AFTER_S  # once
            time.sleep(_POLL_S)
        return [str(one["text"]) for one in self._nodes([*range(self._num_nodes)])]

    def _missing(self) -> list[int]:
        names = [f"here/{rank}" for rank in range(self._num_nodes)]
        return [] if self._values.has(*names) else [n for n, name in enumerate(names) if not self._values.has(name)]

    def _nodes(self, ranks: Sequence[int]) -> list[Any]:
        return self._values.get([f"here/{rank}" for rank in ranks])

    def _missing_error(self, missing: Sequence[int], words: str, timeout_s: float) -> NoRendezvousError:
        ranks = [rank for rank in range(self._num_nodes) if rank not in missing]
        here = ", ".join(f"{rank} ({one['host']})" for rank, one in zip(ranks, self._nodes(ranks), strict=True))
        return NoRendezvousError(
            f"{len(missing)} of {self._num_nodes} nodes did not reach {self._endpoint} within {timeout_s:g} s: "
            f"missing {words}; here {'is' if len(ranks) == 1 else 'are'} {here}",
            hint=_loopback_hint(host_of(self._endpoint)) or _HINT,
        )


def _nobody_error(endpoint: Endpoint, where: str) -> NoRendezvousError:
    addresses = addresses_of(endpoint.host)
    hint = "start the same command on the node that has this address, and let the port through the firewalls"
    if not addresses:
        hint = "give the first node's address"
    elif any(map(is_loopback, addresses)):
        hint = _loopback_hint(endpoint.host) or hint
    elif any(map(is_own_address, addresses)):
        hint = (
            "it is an address of this node: start the first node (--node-rank 0) here too, or have this one host the "
            "rendezvous with --rdzv-conf is_host=true"
        )
    return NoRendezvousError(f"nothing answers at {where}", hint=hint)


def _stranger_error(endpoint: Endpoint, named: str, said: str) -> NoRendezvousError:
    """Return the error of something that accepts connections and is not torch's store."""
    is_here = any(map(is_own_address, addresses_of(endpoint.host)))
    listener = find_listener(endpoint.port) if is_here else None
    who = f"another program, {listener}," if listener else "another program"
    return NoRendezvousError(
        f"{who} listens at {named}, or a launcher that has stopped: {said.splitlines()[0].rstrip('.')}",
        hint="give the address of the first node, and a port that no other program has",
    )


def exchange_texts(
    text: str,
    *,
    rank: int | None,
    endpoint: Endpoint,
    num_nodes: int,
    timeout_s: float,
    token: bytes,
    on_wait: Callable[[str], None] = lambda message: None,
) -> list[str]:
    """Return the texts of all nodes by rank; every one of `num_nodes` nodes must call it, with its rank or None.

    Node 0 hosts the store, on the endpoint's address alone; without ranks it is the node that has that address. Only
    texts that are signed with `token` are taken. `on_wait` is told once that there is something to wait for. Raises
    `NoRendezvousError` after `timeout_s` with the nodes that are missing, and `UsageError` for a rank beyond them.
    """
    if rank is not None and not 0 <= rank < num_nodes:
        raise UsageError(
            f"--node-rank {rank} is outside the {num_nodes} nodes of --nnodes", hint=f"use 0 to {num_nodes - 1}"
        )
    deadline = time.monotonic() + timeout_s
    hosted = _host(endpoint, rank) if rank in (None, 0) else None
    on_wait(f"waiting for {num_nodes} nodes at {endpoint}" + ("" if hosted is None else ", which this node hosts"))
    patience = timedelta(seconds=timeout_s / 2)  # a store is waited for twice as long
    store = hosted or open_store(endpoint.host, endpoint.port, is_master=False, timeout=patience)
    store.set_timeout(_PATIENCE)
    store.add(_CAME, 1)
    try:
        arrival = Arrival(store, endpoint, num_nodes=num_nodes, seal=Seal(token))
        arrival.come(rank, text=text)
        return arrival.wait_for_all(max(0.0, deadline - time.monotonic()))
    finally:
        with suppress(RuntimeError):  # the node that hosts the store is gone
            store.add(_LEFT, 1)
            deadline = time.monotonic() + _FAREWELL_S
            while hosted and store.add(_LEFT, 0) < store.add(_CAME, 0) and time.monotonic() < deadline:
                time.sleep(_POLL_S)  # every node that came is to read all


def _host(endpoint: Endpoint, rank: int | None) -> TCPStore | None:
    """Return the store of node 0; None without a rank where another node has the address."""
    try:
        return host_store(endpoint.host, endpoint.port, timeout=_PATIENCE)
    except DistNetworkError as error:
        if rank is None:
            return None
        raise UsageError(
            f"node 0 cannot listen on {endpoint}: {str(error).partition(': ')[2]}",
            hint="give an address of the node with --node-rank 0, and a free port",
        ) from None


def rendezvous_warnings(spec: LaunchSpec) -> tuple[str, ...]:
    """Return what may make a rendezvous of several nodes fail."""
    host = host_of(_endpoint(spec))
    addresses = addresses_of(host) if spec.rdzv_backend in ("static", "c10d") and host else None
    if addresses is not None and any(map(is_loopback, addresses)):
        named = host if host in addresses else f"{host} ({' or '.join(addresses)})"
        return (f"other machines cannot reach the rendezvous at {named}: give another address with --rdzv-endpoint",)
    return () if addresses != [] else (f"this node knows no address of {host}, where the rendezvous is; asking again",)


def _endpoint(spec: LaunchSpec) -> str:
    return spec.rdzv_endpoint or str(Endpoint(spec.master_addr, spec.master_port or DEFAULT_MASTER_PORT))


def rendezvous_error(
    said: str, spec: LaunchSpec, nodes: NodeRange, *, came: Sequence[str] = (), has_begun: bool = False
) -> NoRendezvousError | StoreLostError:
    """Return what torch `said` about a failed rendezvous as one sentence with something to do.

    `came` are the nodes that have joined an elastic rendezvous, where known; `has_begun` says that ranks have run.
    """
    port = re.search(r"\bport: (\d+)", said)
    if port is not None and PORT_TAKEN in said:
        listener = find_listener(int(port[1]))
        return NoRendezvousError(
            f"port {port[1]} of this host is taken" + (f" by {listener}" if listener else ""),
            hint="give another --master-port or --rdzv-endpoint; without them one node takes a free port by itself",
        )
    endpoint = _endpoint(spec)
    host = host_of(endpoint)
    addresses = addresses_of(host)
    if not addresses:
        return NoRendezvousError(f"this node knows no address of {host}", hint="give the first node's address")
    means = meaning_of(host)
    if CLOSED_RENDEZVOUS in said:
        return NoRendezvousError(
            f"the job at {endpoint} has ended: another node has closed the rendezvous", hint="see its own messages"
        )
    if has_begun and LATE_RENDEZVOUS not in said:
        return StoreLostError()
    if any(words in said for words in NOBODY_THERE):
        return NoRendezvousError(f"nothing answers at {endpoint}{means}", hint=_loopback_hint(host) or _HINT)
    if came or LATE_RENDEZVOUS in said:
        seen = f"; here {'is' if len(came) == 1 else 'are'} {', '.join(came)}" if came else ""
        return NoRendezvousError(
            f"fewer than {nodes.min} nodes reached {endpoint}{means} in time{seen}",
            hint=_loopback_hint(host) or f"{_HINT}; --rdzv-conf join_timeout=SECONDS waits longer",
        )
    return NoRendezvousError(f"rendezvous at {endpoint}{means} failed: {said.splitlines()[0].rstrip('.')}", hint=_HINT)


def _loopback_hint(host: str) -> str | None:
    """Return what to do where other nodes are given an address that only this one reaches; None where they are not."""
    loopback = [address for address in addresses_of(host) if is_loopback(address)]
    if not loopback:
        return None
    means = f"{host} is an address that" if host == loopback[0] else f"{host} means {loopback[0]} here, which"
    return f"{means} no other node reaches: give the network address of the first node"
