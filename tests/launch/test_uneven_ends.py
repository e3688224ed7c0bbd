"""Ranks of one node end well, and those of another go on: what becomes of a job whose nodes end one after the other."""

from __future__ import annotations

import signal
import time

import pytest
from host_nodes import Node, StartNode
from launching import WriteScript, free_port
from nodes import Hosts

pytestmark = pytest.mark.ranks

SCRIPT = """
import os, sys, time
early, seconds, fault = sys.argv[1:]
print("began", flush=True)
if os.environ["RANK"] != early:
    time.sleep(float(seconds))
    if fault == "fails":
        raise RuntimeError("late failure")
print("ended", flush=True)
"""


def start(
    made: Hosts, start_node: StartNode, script: WriteScript, *, early: int, seconds: float, fault: str = "none"
) -> tuple[Node, Node]:
    """Start two nodes; return the one whose rank ends early, once it has, and the other."""
    train, port = script(SCRIPT), free_port()
    where = ["--nnodes", 2, "--master-addr", made.addresses[0], "--master-port", port, "--no-logs"]
    nodes = [start_node(index, *where, "--node-rank", index, train, early, seconds, fault) for index in range(2)]
    nodes[1 - early].wait_for("began")
    nodes[early].wait_for("ended")
    return nodes[early], nodes[1 - early]


@pytest.mark.parametrize("early", [0, 1])
def test_a_node_whose_ranks_have_ended_ends_with_the_failure_of_another(
    early: int, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    done, failed = start(three_hosts, start_node, script, early=early, seconds=2, fault="fails")
    began_s = time.monotonic()
    status, said = failed.end()
    assert (status, "RuntimeError: late failure" in said) == (1, True), said
    status, said = done.end()
    assert status == 1, said
    assert f"rank {1 - early} failed first, on host node{1 - early}: RuntimeError: late failure" in said
    assert f"on host node{early} all ranks had ended well" in said
    assert time.monotonic() - began_s < 14, "neither waits for what the other has nothing to say of"


@pytest.mark.parametrize("early", [0, 1])
def test_a_node_whose_ranks_have_ended_ends_when_another_is_lost(
    early: int, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    done, lost = start(three_hosts, start_node, script, early=early, seconds=600)
    done.wait_for(f"the ranks of node{early} have ended")  # until then its launcher may not have seen its rank end
    lost.stop()
    status, said = done.end()
    assert status == 1
    why = ("host node1: its launcher is gone, without a word", "the node with the rendezvous is gone before it said")
    assert f"the job ends: {why[early]}" in said
    assert "the ranks of this node had ended well" in said


def test_a_node_whose_ranks_have_ended_hears_signals_and_says_for_whom_it_waits(
    script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    done, other = start(three_hosts, start_node, script, early=1, seconds=7)
    done.wait_for("the ranks of node1 have ended; waiting for those of node0")
    done.process.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    assert done.end()[0] == 128 + signal.SIGTERM
    assert time.monotonic() - began_s < 2
    assert other.end()[0] == 0
    assert time.monotonic() - began_s < 12, "it does not wait for a launcher that is gone"


def test_a_rank_that_fails_is_not_started_again_where_those_of_another_node_have_ended(
    script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    train, port = script(SCRIPT), free_port()
    where = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{three_hosts.addresses[0]}:{port}"]
    words = [*where, "--max-restarts", 3, "--no-logs", train, 0, 2, "fails"]
    nodes = [start_node(index, *words) for index in range(2)]
    ended = [node.end() for node in nodes]
    said = "".join(text for _, text in ended)
    assert [status for status, _ in ended] == [1, 1], said
    assert said.count("began") == 2, said
    assert said.count("cannot start again: no restart") == 1
