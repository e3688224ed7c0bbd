"""A node for which there is no room waits, and takes the place of one that is lost."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from host_nodes import StartNode
from launching import WriteScript, names_in
from nodes import Hosts
from rank_harness import RankHarness
from recovery_script import SCRIPT
from test_lost_rendezvous import require_exact, words_of
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from paraplan.launch.nodes.job_token import Seal
from paraplan.launch.nodes.rendezvous_backend import SealedBackend
from paraplan.launch.spec import NodeRange

WAITS = "the job has its 2 nodes: this one waits, and takes the place of one that is lost"


@pytest.mark.parametrize(("is_complete", "max_nodes", "waiting"), [(True, 2, 0), (True, 3, 2), (False, 2, 2)])
def test_nodes_for_which_there_is_no_room_do_not_have_the_ranks_start_again(
    is_complete: bool, max_nodes: int, waiting: int
) -> None:
    backend = SealedBackend(HashStore(), "job", seal=Seal(b"token"), nodes=NodeRange(2, max_nodes), endpoint="a:1")
    nodes = [_NodeDesc(f"gpu-{number}", 1, 0) for number in range(4)]
    state = _RendezvousState()
    state.complete, state.participants, state.wait_list = is_complete, {nodes[0]: 0, nodes[1]: 1}, set(nodes[2:])
    set_state = backend.set_state(pickle.dumps(state))
    assert set_state is not None
    found = pickle.loads(set_state[0])  # noqa: S301 (of this process)
    assert len(found.wait_list) == waiting
    assert found.wait_list | found.redundancy_list == set(nodes[2:])


@pytest.mark.ranks
@pytest.mark.with_all  # the places of nodes are torch's; what is ours has a test above
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_third_node_waits_and_takes_the_place_of_the_second(
    nodes: str,
    tmp_path: Path,
    scratch: Path,
    script: WriteScript,
    three_hosts: Hosts,
    start_node: StartNode,
    ranks: RankHarness,
) -> None:
    train, steps = script(SCRIPT), 60
    words = [*words_of(three_hosts, train, tmp_path / "saved", nodes=nodes, steps=steps), "save=2"]
    first, second = start_node(0, *words), start_node(1, *words)
    first.wait_for("step 4 ")
    third = start_node(2, *words)
    third.wait_for(WAITS)
    assert "a node joined" not in first.output.read_text(), "the others are left alone"
    second.stop()
    third.wait_for("this node takes the place of one that is lost")
    said = require_exact([first, third], train, steps, ranks)
    assert WAITS in said
    assert [name for name in names_in(scratch) if name.startswith("paraplan")] == []


@pytest.mark.ranks
@pytest.mark.with_all
def test_a_node_that_was_not_needed_ends_well_with_the_job(
    tmp_path: Path, script: WriteScript, three_hosts: Hosts, start_node: StartNode, ranks: RankHarness
) -> None:
    train, steps = script(SCRIPT), 40
    words = words_of(three_hosts, train, tmp_path / "none", nodes="2", steps=steps)
    first, second = start_node(0, *words), start_node(1, *words)
    first.wait_for("step 4 ")
    third = start_node(2, *words)
    said = require_exact([first, second], train, steps, ranks)
    status, waited = third.end()
    assert status == 0, said + waited
    assert "the job has ended, and this node was not needed" in waited
