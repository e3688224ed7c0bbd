"""The node that hosts the store of a job is lost: the job ends with the status that has it started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_nodes import Node, StartNode
from launching import WriteScript, free_port, names_in
from nodes import Hosts
from rank_harness import RankHarness
from recovery_script import SCRIPT, losses
from test_several_nodes import run_script

from paraplan.errors import PREEMPTED_EXIT_STATUS

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]


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


# A static store that is lost is met in test_uneven_ends too.
@pytest.mark.parametrize(
    "meeting", ["1:2", *(pytest.param(one, marks=pytest.mark.with_all) for one in ("static", "2"))]
)
def test_a_job_ends_with_its_store_to_be_started_again_from_where_it_was(
    meeting: str,
    tmp_path: Path,
    scratch: Path,
    script: WriteScript,
    three_hosts: Hosts,
    start_node: StartNode,
) -> None:
    words = words_of(three_hosts, script(SCRIPT), tmp_path / "saved", nodes=meeting, steps=100)
    ways: list[list[object]] = [[], []]
    if meeting == "static":
        host, _, port = str(words[words.index("--rdzv-endpoint") + 1]).rpartition(":")
        words = ["--nnodes", 2, "--master-addr", host, "--master-port", port, *words[words.index("--max-restarts") :]]
        ways = [["--node-rank", rank] for rank in (0, 1)]
    first, second = (start_node(index, *ways[index], *words, "save=2") for index in range(2))
    first.wait_for("step 4 ")
    first.stop()
    status, said = second.end()
    assert status == PREEMPTED_EXIT_STATUS, said
    assert "error: the node that hosts the rendezvous is lost, and the job ends with it (status 75)" in said
    assert "Traceback" not in said
    assert [name for name in names_in(scratch) if name.startswith("paraplan")] == []
    first, second = (start_node(index, *ways[index], *words, "save=2") for index in range(2))
    first.wait_for_pattern(r"begins after [1-9]\d* steps")
