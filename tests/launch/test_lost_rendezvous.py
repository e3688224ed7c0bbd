"""The node that holds the rendezvous of an elastic job is lost: the others meet at another one, and go on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from host_nodes import Node, StartNode
from launching import WriteScript, free_port, names_in
from nodes import IP, Hosts
from rank_harness import RankHarness
from recovery_script import SCRIPT, losses
from test_several_nodes import run_script

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

GOES_ON = r"the nodes meet at \S+, on this host, now(?s:.*)begins after \d+ steps(?s:.*)\nstep "


def words_of(made: Hosts, script: Path, folder: Path, *, nodes: str, steps: int) -> list[object]:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{made.addresses[0]}:{free_port()}"]
    patience = ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=2", "--max-restarts", 9]
    words = ["--nnodes", nodes, *rendezvous, *patience, "--memory-checkpoint", 1, script, f"folder={folder}"]
    return [*words, f"steps={steps}", "plans=zero3", "batch=24", "dropout=0", "pause=0.2"]


def require_exact(nodes: list[Node], script: Path, steps: int, ranks: RankHarness) -> str:
    """Wait for the nodes' good end, compare all losses with those of one process, and return what was said."""
    ended = [node.end() for node in nodes]
    said = "".join(node.output.read_text() for node in nodes)
    assert [status for status, _ in ended] == [0] * len(nodes), said
    alone = ranks.run_alone(run_script, str(script), "folder=none", f"steps={steps}", "batch=24", "dropout=0")
    printed = losses(said)
    assert max(printed) == steps
    assert printed == pytest.approx({step: losses(alone)[step] for step in printed}, abs=1e-6)
    return said


@pytest.mark.with_all  # as below, by a broken connection and not by silence
def test_the_others_go_on_at_the_second_node_when_the_first_is_killed(
    tmp_path: Path,
    scratch: Path,
    script: WriteScript,
    three_hosts: Hosts,
    start_node: StartNode,
    ranks: RankHarness,
) -> None:
    train, folder, steps = script(SCRIPT), tmp_path / "none", 14
    words = words_of(three_hosts, train, folder, nodes="2:3", steps=steps)
    first, *others = (start_node(index, *words) for index in range(3))
    first.wait_for("step 4 ")
    first.stop()
    said = require_exact(others, train, steps, ranks)
    for other, host in zip(others, ("this host", "node1"), strict=True):
        gone = r"the node with the rendezvous, node0, is gone: the nodes meet at 10\.231\.7\.2:\d+, on "
        assert len(re.findall(f"{gone}{host}, now", other.output.read_text())) == 1, said
    assert "from the copy in memory" in said
    assert not folder.exists()  # the disk was left alone
    assert [name for name in names_in(scratch) if name.startswith("paraplan")] == []


@pytest.mark.with_all  # as above, over more rounds
def test_node_after_node_holds_the_rendezvous_and_those_that_come_back_find_the_job(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode, ranks: RankHarness
) -> None:
    train, steps = script(SCRIPT), 80
    words = words_of(three_hosts, train, tmp_path / "none", nodes="1:3", steps=steps)
    first, second, third = (start_node(index, *words) for index in range(3))
    first.wait_for("step 4 ")
    first.stop()
    second.wait_for_pattern(GOES_ON)
    first = start_node(0, *words)
    second.wait_for("a node joined")
    first.wait_for_pattern(r"the nodes meet at 10\.231\.7\.2(?s:.*)from the copy in memory")
    second.stop()
    first.wait_for_pattern(r"the node with the rendezvous, node1, is gone: the nodes meet at 10\.231\.7\.1")
    second = start_node(1, *words)  # it comes while the others meet, or later
    said = require_exact([first, second, third], train, steps, ranks)
    assert "begins after 0 steps" not in said.partition("from the copy in memory")[2], "nobody begins anew"


@pytest.mark.with_all  # as above, by silence and not by a broken connection
def test_a_first_node_that_is_cut_off_waits_and_joins_the_others_when_the_network_is_back(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode, ranks: RankHarness
) -> None:
    train, steps = script(SCRIPT), 100
    words = words_of(three_hosts, train, tmp_path / "none", nodes="1:3", steps=steps)
    first, second, third = (start_node(index, *words) for index in range(3))
    first.wait_for("step 4 ")
    three_hosts.set_link(0, "down")
    second.wait_for_pattern(GOES_ON)
    first.wait_for_pattern("1 of 3 nodes are left, and those of node1, node2 may go on without them: waiting")
    three_hosts.set_link(0, "up")
    first.wait_for_pattern(r"the job goes on elsewhere: the nodes meet at 10\.231\.7\.2")
    require_exact([second, third, first], train, steps, ranks)


@pytest.mark.parametrize("num_hosts", [4])
def test_a_new_node_joins_while_the_endpoints_host_is_away_and_that_host_joins_once_it_is_back(
    num_hosts: int,
    tmp_path: Path,
    scratch: Path,
    script: WriteScript,
    three_hosts: Hosts,
    start_node: StartNode,
    ranks: RankHarness,
) -> None:
    train, folder, steps = script(SCRIPT), tmp_path / "none", 40
    words = words_of(three_hosts, train, folder, nodes="3:4", steps=steps)
    place = words.index("--rdzv-endpoint") + 1
    port = str(words[place]).rpartition(":")[2]
    words[place] = ",".join(f"{address}:{port}" for address in three_hosts.addresses[:num_hosts])
    first, second, third = (start_node(index, *words) for index in range(3))
    first.wait_for("step 4 ")
    three_hosts.set_link(0, "down")
    first.stop()
    fourth = start_node(3, *words)  # without which the others are too few
    fourth.wait_for(f"the job of {three_hosts.addresses[0]}:{port} is at {three_hosts.addresses[1]}:{port} now")
    second.wait_for_pattern(GOES_ON)
    three_hosts.set_link(0, "up")
    again = start_node(0, *words)
    again.wait_for(f"is at {three_hosts.addresses[1]}:{port} now")
    said = require_exact([second, third, fourth, again], train, steps, ranks)
    for other, host in zip((second, third), ("this host", "node1"), strict=True):
        gone = r"the node with the rendezvous, node0, is gone: the nodes meet at 10\.231\.7\.2:\d+, on "
        assert len(re.findall(f"{gone}{host}, now", other.output.read_text())) == 1, said
    assert "all ranks ended" in again.output.read_text(), said
    assert not folder.exists()  # the disk was left alone
    assert [name for name in names_in(scratch) if name.startswith("paraplan")] == []
    assert "begins after 0 steps" not in said, "nobody begins anew"


def test_a_node_says_which_hosts_know_of_no_job(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    words = words_of(three_hosts, script(SCRIPT), tmp_path / "none", nodes="1:3", steps=9)
    first, second, _ = three_hosts.addresses
    words[words.index("--rdzv-endpoint") + 1] = f"{first}:29400,{second}:29400"
    words[words.index("--rdzv-conf") + 1] = "read_timeout=4"
    status, said = start_node(2, *words).end()
    assert status == 1
    refused = "connection refused: no launcher listens on this port of the machine"
    assert f"waiting for {first}:29400: {refused}, and no other host of --rdzv-endpoint knows" in said
    assert f"nothing answers at {first}:29400: {refused}; {second}:29400 knows of no job; tried for 8 s" in said
    assert "Traceback" not in said


def test_an_endpoints_host_that_is_back_at_once_waits_for_nodes_that_have_not_moved_yet(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode, ranks: RankHarness
) -> None:
    late = "import atexit; atexit.register(lambda: time.sleep(6 * (engine.num_steps < steps)))"
    train, steps = script(SCRIPT.replace("engine.resume", f"{late}\nengine.resume")), 20
    words = words_of(three_hosts, train, tmp_path / "none", nodes="1:2", steps=steps)
    first, second = (start_node(index, *words) for index in range(2))
    first.wait_for("step 4 ")
    first.stop()
    again = start_node(0, *words)
    said = require_exact([second, again], train, steps, ranks)
    assert "begins after 0 steps" not in said, "nobody begins anew"


@contextmanager
def cut_between(made: Hosts, *away: int) -> Iterator[None]:
    """Have some hosts reach each other, and none of the others."""
    bridge = f"{made.name}c"
    subprocess.run([IP, "link", "add", bridge, "type", "bridge"], check=True)
    try:
        subprocess.run([IP, "link", "set", bridge, "up"], check=True)
        for index in away:
            subprocess.run([IP, "link", "set", f"{made.name}v{index}", "master", bridge], check=True)
        yield
        for index in away:
            subprocess.run([IP, "link", "set", f"{made.name}v{index}", "master", f"{made.name}b"], check=True)
    finally:
        subprocess.run([IP, "link", "del", bridge], check=True)


@pytest.mark.with_all
@pytest.mark.parametrize("num_hosts", [4])
def test_of_two_halves_of_a_network_the_one_with_the_rendezvous_goes_on(
    num_hosts: int, tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode, ranks: RankHarness
) -> None:
    train, steps = script(SCRIPT), 100
    words = words_of(three_hosts, train, tmp_path / "none", nodes="2:4", steps=steps)
    nodes = [start_node(index, *words) for index in range(num_hosts)]
    nodes[0].wait_for("step 4 ")
    with cut_between(three_hosts, 2, 3):
        nodes[0].wait_for_pattern(r"restarting the other nodes without it(?s:.*)begins after \d+ steps(?s:.*)\nstep ")
        nodes[2].wait_for("2 of the 4 nodes that may still run are here, and the others may go on")
    said = require_exact(nodes, train, steps, ranks)
    assert "the nodes meet at" not in said, "nobody else has held the rendezvous"


@pytest.mark.with_all
def test_a_node_that_comes_back_to_a_job_of_one_node_does_not_begin_another(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode, ranks: RankHarness
) -> None:
    train, steps = script(SCRIPT), 60
    words = words_of(three_hosts, train, tmp_path / "none", nodes="1:2", steps=steps)
    first, second = (start_node(index, *words) for index in range(2))
    first.wait_for("step 4 ")
    first.stop()
    second.wait_for_pattern(GOES_ON)
    again = start_node(0, *words)
    second.wait_for_pattern("a node joined")
    again.wait_for("the job goes on elsewhere: the nodes meet at 10.231.7.2")
    said = require_exact([second, again], train, steps, ranks)
    assert "begins after 0 steps" not in said.partition("is gone")[2]


@pytest.mark.with_all
@pytest.mark.parametrize(("nodes", "restarts"), [("2", 3), ("1:2", 0)])
def test_a_job_of_a_fixed_size_or_without_restarts_ends_with_its_rendezvous(
    nodes: str, restarts: int, tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode
) -> None:
    words = words_of(three_hosts, script(SCRIPT), tmp_path / "none", nodes=nodes, steps=100)
    words[words.index("--max-restarts") + 1] = restarts
    first, second = (start_node(index, *words) for index in range(2))
    first.wait_for("step 4 ")
    first.stop()
    status, said = second.end()
    assert status == 1, said
    assert "the nodes meet" not in said
    assert "Traceback" not in said
