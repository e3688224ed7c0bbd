"""Ranks of one node end well, and those of another go on: what becomes of a job whose nodes end one after the other."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from host_nodes import MEETING_S, Node, StartNode
from launching import WriteScript, free_port
from nodes import Hosts
from waiting import wait_until

from paraplan.errors import PREEMPTED_EXIT_STATUS

pytestmark = pytest.mark.ranks

SCRIPT = """
import os, sys, time
early, seconds, fault = sys.argv[1:]
print("began", flush=True)
if os.environ["RANK"] == early:
    open("early", "w").close()
else:
    while not os.path.exists("early"):
        time.sleep(0.02)
    time.sleep(float(seconds))
    if fault == "fails":
        raise RuntimeError("late failure")
print("ended", flush=True)
"""

WAITS_FOR_FILE = """while not os.path.exists("end"):
        time.sleep(0.1)"""

LATE_S = (5, 20, 80)
"""After so long a launcher looks at its ranks: it says long after they have ended that they have. Where a busy machine
needs longer for what is to come before that, the next is tried."""


def start(
    made: Hosts,
    start_node: StartNode,
    script: WriteScript,
    *,
    early: int,
    seconds: float,
    fault: str = "none",
    text: str = SCRIPT,
) -> tuple[Node, Node]:
    """Start two nodes; return the one whose rank ends early, once it has, and the other."""
    train, port = script(text), free_port()
    where = ["--nnodes", 2, "--master-addr", made.addresses[0], "--master-port", port, "--no-logs"]
    nodes = [start_node(index, *where, "--node-rank", index, train, early, seconds, fault) for index in range(2)]
    nodes[1 - early].wait_for("began")
    nodes[early].wait_for("ended")
    return nodes[early], nodes[1 - early]


@pytest.mark.parametrize("early", [pytest.param(0, marks=pytest.mark.with_all), 1])  # the store's host fails: it leaves
def test_a_node_whose_ranks_have_ended_ends_with_the_failure_of_another(
    early: int, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    done, failed = start(three_hosts, start_node, script, early=early, seconds=2, fault="fails")
    status, said = failed.end()
    assert (status, "RuntimeError: late failure" in said) == (1, True), said
    status, said = done.end()
    assert status == 1, said
    assert f"rank {1 - early} failed first, on host node{1 - early}: RuntimeError: late failure" in said
    assert f"on host node{early} all ranks had ended well" in said


@pytest.mark.parametrize("early", [0, pytest.param(1, marks=pytest.mark.with_all)])  # 0 has the store
def test_a_node_whose_ranks_have_ended_ends_when_another_is_lost(
    early: int, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    done, lost = start(three_hosts, start_node, script, early=early, seconds=600)
    done.wait_for(f"the ranks of node{early} have ended")  # until then its launcher may not have seen its rank end
    lost.stop()
    status, said = done.end()
    if early == 1:
        assert (status, "the node that hosts the rendezvous is lost" in said) == (PREEMPTED_EXIT_STATUS, True), said
        return
    assert status == 1
    assert "the job ends: host node1: its launcher is gone, without a word" in said
    assert "the ranks of this node had ended well" in said


def test_a_node_whose_ranks_have_ended_hears_signals_and_says_for_whom_it_waits(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    waits = SCRIPT.replace("time.sleep(float(seconds))", WAITS_FOR_FILE)
    done, other = start(three_hosts, start_node, script, early=1, seconds=0, text=waits)
    done.wait_for("the ranks of node1 have ended; waiting for those of node0")
    done.process.send_signal(signal.SIGTERM)
    assert done.end()[0] == 128 + signal.SIGTERM
    assert other.process.poll() is None
    (tmp_path / "end").touch()
    assert other.end()[0] == 0


def test_a_rank_that_fails_is_not_started_again_where_those_of_another_node_have_ended(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    train, port = script(SCRIPT.replace("time.sleep(float(seconds))", WAITS_FOR_FILE)), free_port()
    where = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{three_hosts.addresses[0]}:{port}"]
    words = [*where, "--max-restarts", 3, "--no-logs", train, 0, 2, "fails"]
    nodes = [start_node(index, *words) for index in range(2)]
    wait_until(lambda: any("have ended; waiting" in node.output.read_text() for node in nodes), timeout_s=MEETING_S)
    (tmp_path / "end").touch()
    ended = [node.end() for node in nodes]
    said = "".join(text for _, text in ended)
    assert [status for status, _ in ended] == [1, 1], said
    assert said.count("began") == 2, said
    assert said.count("cannot start again: no restart") == 1


@pytest.mark.parametrize("early", [0, pytest.param(1, marks=pytest.mark.with_all)])
def test_a_rank_that_fails_before_another_node_says_that_its_ranks_have_ended_is_not_started_again(
    early: int, tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    train = script(SCRIPT)
    for late_s in LATE_S:
        (tmp_path / "early").unlink(missing_ok=True)
        where = ["--nnodes", "1:2", "--rdzv-backend", "c10d"]
        where += ["--rdzv-endpoint", f"{three_hosts.addresses[0]}:{free_port()}"]
        words = [*where, "--max-restarts", 3, "--rdzv-conf", "last_call_timeout=30", "--no-logs"]
        late = [["--monitor-interval", late_s] if index == early else [] for index in range(2)]
        nodes = [start_node(index, *words, *late[index], train, early, 0.2, "fails") for index in range(2)]
        ended = [node.end() for node in (nodes[1 - early], nodes[early])]
        (failed_status, failed_said), (status, said) = ended
        if "restarting all ranks" in failed_said:
            break
    assert "restarting all ranks (2 of 3 restarts left)" in failed_said, failed_said
    assert (failed_status, failed_said.count("began")) == (1, 1), failed_said
    assert failed_said.count("ranks of another node have ended well, and cannot start again: no restart") == 1
    assert "RuntimeError: late failure" in failed_said.splitlines()[-1]
    assert (status, said.count("began")) == (1, 1), said
    assert f"rank {1 - early} failed first, on host node{1 - early}: RuntimeError: late failure" in said
    assert f"on host node{early} all ranks had ended well" in said


def test_a_node_whose_healthy_ranks_were_stopped_for_a_restart_that_cannot_be_ends_too(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    train = script(SCRIPT)
    for late_s in LATE_S:
        (tmp_path / "early").unlink(missing_ok=True)
        where = ["--nnodes", 3, "--rdzv-backend", "c10d"]
        where += ["--rdzv-endpoint", f"{three_hosts.addresses[0]}:{free_port()}"]
        words = [*where, "--max-restarts", 3, "--no-logs"]
        done = start_node(0, *words, "--monitor-interval", late_s, train, 0, 0, "none")
        failed = start_node(1, *words, train, 0, 0.2, "fails")
        healthy = start_node(2, *words, train, 0, 600, "none")
        status, said = healthy.end()
        others = [node.end() for node in (failed, done)]
        if "stopped to start again" in said:
            break
    assert (status, said.count("began")) == (1, 1), said
    assert "cannot start again: no restart" in said
    assert "rank 1 failed first, on host node1: RuntimeError: late failure" in said
    assert "on host node2 all ranks had been stopped to start again" in said
    for status, said in others:
        assert (status, "RuntimeError: late failure" in said) == (1, True), said


def test_a_node_that_joins_a_job_which_has_begun_to_end_restarts_nobody(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    train, port = script(SCRIPT.replace("time.sleep(float(seconds))", WAITS_FOR_FILE)), free_port()
    where = ["--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{three_hosts.addresses[0]}:{port}"]
    words = [*where, "--max-restarts", 3, "--rdzv-conf", "last_call_timeout=1", "--no-logs", train, 0, 0, "none"]
    done, other = (start_node(index, *words) for index in range(2))
    done.wait_for("the ranks of node0 have ended; waiting for those of node1")
    joins = start_node(2, *words)
    joins.wait_for("waiting at")
    (tmp_path / "end").touch()
    for node in (other, done):
        status, said = node.end()
        assert (status, said.count("began")) == (0, 1), said
