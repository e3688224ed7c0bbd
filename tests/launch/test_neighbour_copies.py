"""A node that dies does not take its part of the state along: the next node has a copy, and the disk is left alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from host_nodes import StartNode
from launching import WriteScript, free_port, names_in
from nodes import Hosts
from rank_harness import RankHarness
from recovery_script import SCRIPT, losses
from test_several_nodes import run_script

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]


def test_a_node_that_dies_and_one_that_comes_back_take_their_parts_from_memory(
    tmp_path: Path,
    scratch: Path,
    script: WriteScript,
    three_hosts: Hosts,
    start_node: StartNode,
    ranks: RankHarness,
) -> None:
    train, folder = script(SCRIPT), tmp_path / "none"
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{three_hosts.addresses[0]}:{free_port()}"]
    patience = ["--rdzv-conf", "last_call_timeout=2,keep_alive_interval=2", "--max-restarts", 3]
    copies = ["--memory-checkpoint", 1, "--nproc-per-node", 1]
    steps = 30
    words = ["--nnodes", "1:2", *rendezvous, *patience, *copies, train, f"folder={folder}", f"steps={steps}"]
    words += ["plans=zero3", "dropout=0", "pause=0.6"]
    stays, leaves = start_node(0, *words), start_node(1, *words)
    stays.wait_for("step 4 ")
    leaves.stop()
    stays.wait_for_pattern(r"begins after \d+ steps(?s:.*)begins after \d+ steps(?s:.*)\nstep ")
    comes_back = start_node(1, *words)
    (status, said), (other_status, other) = stays.end(), comes_back.end()
    assert (status, other_status) == (0, 0), said + other
    assert said.count("from the copy in memory") == 2, said
    begun = [int(number) for number in re.findall(r"begins after (\d+) steps", said)]
    done = [[int(number) for number in re.findall(r"step (\d+) ", part)] for part in said.split("begins after")[1:]]
    assert begun[0] == 0
    assert all(last[-1] - first <= 2 for last, first in zip(done, begun[1:], strict=False)), (begun, done)
    assert not folder.exists()  # the disk was left alone
    alone = ranks.run_alone(run_script, str(train), f"folder={folder}", f"steps={steps}", "dropout=0")
    assert losses(said) == pytest.approx(losses(alone), abs=1e-6)
    assert [name for name in names_in(scratch) if name.startswith("paraplan")] == []
