"""Machines that tell each other what they are: each puts its text into one store and reads those of all."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]  # re-exported from C++

from paraplan.errors import UsageError
from paraplan.launch.nodes.endpoint import Endpoint, host_store
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.rendezvous import Arrival, open_store

_POLL_S = 0.05
_FAREWELL_S = 10.0
_PATIENCE = timedelta(seconds=60)  # for one answer of the store, which a busy host may delay
_CAME, _LEFT = "paraplan/came", "paraplan/left"


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
    texts that are signed with `token` are taken. `on_wait` is told once that there is something to wait for. Raises
    `NoRendezvousError` after `timeout_s` with the nodes that are missing, and `UsageError` for a rank beyond them.
    """
    if mine.rank is not None and not 0 <= mine.rank < num_nodes:
        raise UsageError(
            f"--node-rank {mine.rank} is outside the {num_nodes} nodes of --nnodes", hint=f"use 0 to {num_nodes - 1}"
        )
    deadline = time.monotonic() + timeout_s
    hosted = _host(endpoint, rank=mine.rank)
    on_wait(f"waiting for {num_nodes} nodes at {endpoint}" + ("" if hosted is None else ", which this node hosts"))
    patience = timedelta(seconds=timeout_s / 2)  # a store is waited for twice as long
    store = hosted or open_store(endpoint.host, endpoint.port, is_master=False, timeout=patience)
    store.set_timeout(_PATIENCE)
    store.add(_CAME, 1)
    try:
        arrival = Arrival(store, endpoint, num_nodes=num_nodes, seal=Seal(token))
        rank = arrival.come(mine.rank, text=mine.text, name=mine.name)
        return rank, arrival.wait_for_all(max(0.0, deadline - time.monotonic()))
    finally:
        with suppress(RuntimeError):  # the node that hosts the store is gone
            _leave(store, hosts=hosted is not None)


def _host(endpoint: Endpoint, *, rank: int | None) -> TCPStore | None:
    """Return the store of node 0; None on others, and without a rank where another node has the address."""
    if rank is not None and rank > 0:
        return None
    try:
        return host_store(endpoint.host, endpoint.port, timeout=_PATIENCE)
    except DistNetworkError as error:
        if rank is None:
            return None
        raise UsageError(
            f"node 0 cannot listen on {endpoint}: {str(error).partition(': ')[2]}",
            hint="give an address of the node with --node-rank 0, and a free port",
        ) from None


def _leave(store: Store, *, hosts: bool) -> None:
    """Say that this node has read all; the host stays until every node that came has."""
    store.add(_LEFT, 1)
    deadline = time.monotonic() + _FAREWELL_S
    while hosts and int(store.add(_LEFT, 0)) < int(store.add(_CAME, 0)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
