"""The rendezvous of a fixed number of nodes whose ranks are given: torch's, with rounds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch re-exports it from C++ unmarked
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from paraplan.launch.nodes.endpoint import Endpoint, host_store
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.rendezvous import Arrival, open_store
from paraplan.launch.nodes.store import NodeStore

_OWN_STORE = timedelta(seconds=60)  # for the store of this very node, which a busy machine may delay


class StaticRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous, whose nodes and ranks find nothing of an earlier round in their stores.

    torch gives every round the same store. After a restart nodes take what they said before for what the others say
    now, and ranks connect to addresses of ranks that are gone.
    """

    def __init__(self, *arguments: Any, seal: Seal) -> None:
        """Take torch's arguments, and what signs what nodes say."""
        super().__init__(*arguments)
        self._seal, self._num_rounds = seal, 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store of the next round; the first one begins once all nodes have come, each of which is named.

        torch waits for their number alone. A node that is alone takes a free port for port 0. Raises
        `NoRendezvousError` with the nodes that are missing and those that are here, and for a rank that two nodes have.
        """
        if self._store is None and self.world_size == 1:
            self._store = host_store(self.master_addr, self.master_port, timeout=self.timeout)
            self.master_port = self._store.port
        elif self._store is None:
            patience = max(self.timeout, _OWN_STORE) if self.rank == 0 else self.timeout
            store = open_store(self.master_addr, self.master_port, is_master=self.rank == 0, timeout=patience)
            endpoint = Endpoint(self.master_addr, self.master_port)
            arrival = Arrival(store, endpoint, num_nodes=self.world_size, seal=self._seal)
            arrival.come(self.rank)
            arrival.wait_for_all(self.timeout.total_seconds())
            self._store = store
        self._num_rounds += 1
        return RendezvousInfo(
            PrefixStore(f"{self.run_id}/{self._num_rounds}", self._store),
            self.rank,
            self.world_size,
            RendezvousStoreInfo(self.master_addr, self.master_port),
        )

    def port_of_ranks(self, nodes: NodeStore | None) -> int:
        """Return the port of the first node at which the ranks of this round find their store.

        That is the port of the rendezvous, as torch has it, and a free one after a restart.
        """
        if self._num_rounds == 1:
            return self.master_port
        host = self._host_store_of_ranks
        return int(host() if nodes is None else nodes.share_text("port of ranks", host))

    def _host_store_of_ranks(self) -> str:
        self._store_of_ranks = host_store(self.master_addr, 0, timeout=self.timeout)
        return str(self._store_of_ranks.port)
