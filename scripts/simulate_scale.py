"""What the launchers of many nodes ask of their one store: calls and threads for a look, and how long news take.

    python scripts/simulate_scale.py [--delay-ms 0] [16 64 256]

Launchers are threads of this process, each with a connection of its own to one torch store on loopback; every call of
the store takes `--delay-ms` longer, as over a network of that round trip. Prints a line
for each number of nodes: seconds until all have met and know all facts, calls of the store and new threads for a look,
and seconds until all have read that one node has failed, with all launchers on this machine. Status 1 where a look is
more than one call, or starts a thread.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it from C++ unmarked

from paraplan.launch.faults.failures import Cause, NodeFailure
from paraplan.launch.nodes.endpoint import Endpoint, host_store
from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.rendezvous import Arrival
from paraplan.launch.nodes.store import NodeFacts, NodeStore
from paraplan.launch.torch_private.elastic import silence_torch_log

PATIENCE = timedelta(seconds=60)
LOOK_S = 0.5
"""As often a launcher looks."""


class Counted:
    """A connection to the store that counts the calls, each of which takes so much longer."""

    def __init__(self, store: TCPStore, delay_s: float) -> None:
        self.store, self.delay_s, self.num_calls = store, delay_s, 0

    def __getattr__(self, name: str) -> Any:
        if name != "has_extended_api":
            self.num_calls += 1
            time.sleep(self.delay_s)
        return getattr(self.store, name)


def simulate(num_nodes: int, delay_s: float) -> bool:
    """Run one job of so many launchers, print its figures, and return whether a look costs one call."""
    hosted = host_store("127.0.0.1", 0, timeout=PATIENCE)
    endpoint, seal = Endpoint("127.0.0.1", hosted.port), Seal(b"of this job")
    connections = [
        Counted(TCPStore("127.0.0.1", hosted.port, is_master=False, timeout=PATIENCE, wait_for_workers=False), delay_s)
        for _ in range(num_nodes)
    ]
    nodes = [
        NodeStore(one, node=node, num_nodes=num_nodes, seal=seal)  # type: ignore[arg-type]
        for node, one in enumerate(connections)
    ]

    def meet(node: int) -> None:
        arrival = Arrival(connections[node], endpoint, num_nodes=num_nodes, seal=seal)  # type: ignore[arg-type]
        arrival.come(node)
        arrival.wait_for_all(PATIENCE.total_seconds())
        nodes[node].meet()
        nodes[node].exchange_facts(NodeFacts(f"node{node}", "2.13.0", "1", "3.11", "0123"))

    def read(node: int) -> None:
        while not nodes[node].has_failure_elsewhere():
            time.sleep(LOOK_S)
            nodes[node].look()

    with ThreadPoolExecutor(num_nodes) as pool:

        def all_do(task: Callable[[int], None], *, first: int = 0) -> float:
            began = time.monotonic()
            list(pool.map(task, range(first, num_nodes)))
            return time.monotonic() - began

        meeting_s = all_do(meet)
        calls, threads = sum(one.num_calls for one in connections), threading.active_count()
        all_do(lambda node: nodes[node].look())
        calls = sum(one.num_calls for one in connections) - calls
        threads = threading.active_count() - threads
        nodes[0].publish("failure", vars(NodeFailure("node0", 0, Cause.OWN_ERROR, 1, 1, "x", (), ())))
        news_s = all_do(read, first=1)
    is_kept = calls == num_nodes and threads <= 0
    print(
        f"{num_nodes:4} nodes: met after {meeting_s:.2f} s; a look: {calls / num_nodes:g} calls, "
        f"{max(0, threads)} threads; a failure is told to all after {news_s:.2f} s"
    )
    return is_kept


def main() -> None:
    """Simulate the numbers of nodes of the command line."""
    silence_torch_log()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nodes", type=int, nargs="*", default=[16, 64, 256], help="numbers of nodes")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="what each call of the store takes longer")
    given = parser.parse_args()
    kept = [simulate(number, given.delay_ms / 1e3) for number in given.nodes]
    raise SystemExit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
