"""Ranks that stay in their processes while nodes leave and come."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_nodes import MEETING_S, Node, StartNode
from launching import WriteScript, free_port
from nodes import Hosts
from waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

TRAIN = """
    import os, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {size} in {os.getpid()}\\n", end="", flush=True)
    while True:
        stop = torch.tensor(float(Path(sys.argv[1]).exists()))
        dist.all_reduce(stop)
        if stop:
            break
        time.sleep(0.02)
    dist.destroy_process_group()
"""


def said_after(node: Node, position: int, words: str) -> str:
    """Return what a node says up to the line with `words`, from a position on."""
    wait_until(lambda: words in node.output.read_text()[position:], told=node.output.read_text, timeout_s=MEETING_S)
    return node.output.read_text()[position:]


def test_ranks_stay_in_their_processes_while_a_node_is_lost_and_another_comes(
    tmp_path: Path, three_hosts: Hosts, script: WriteScript, start_node: StartNode
) -> None:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{three_hosts.addresses[0]}:{free_port()}"]
    patience = ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=2", "--max-restarts", 3, "--no-logs"]
    words = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        2,
        *rendezvous,
        *patience,
        "--restart-in-process",
        "--spare-ranks",
        0,
    ]
    words += [script(TRAIN), tmp_path / "stop"]
    stays, leaves = start_node(0, *words), start_node(1, *words)
    said_after(stays, 0, "of 4 in")
    position = len(stays.output.read_text())
    leaves.stop()
    said_after(stays, position, "of 2 in")
    position = len(stays.output.read_text())
    comes = start_node(1, *words)
    said_after(stays, position, "of 4 in")
    (tmp_path / "stop").touch()
    (status, text), (other_status, other_text) = stays.end(), comes.end()
    assert (status, other_status) == (0, 0), text + other_text
    # One restart more for a node that comes after the last call for the first round, or for the third one.
    assert text.count("ranks 0-1 stay in their processes\n") >= 2
    assert "begin in new ones" not in text
    assert "spare process" not in text
    assert "a node joined: restarting all ranks" in text
    assert len({line.split()[-1] for line in text.splitlines() if line.startswith("rank ")}) == 2


def test_a_rank_that_is_lost_on_one_node_leaves_all_others_of_both_in_their_processes(
    tmp_path: Path, three_hosts: Hosts, script: WriteScript, start_node: StartNode
) -> None:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{three_hosts.addresses[0]}:{free_port()}"]
    words = ["--nnodes", 2, "--nproc-per-node", 2, *rendezvous, "--max-restarts", 2, "--no-logs"]
    kill = 'if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 3: os.kill(os.getpid(), 9)'
    text = TRAIN.replace("    while True:", f"    {kill}\n    while True:")
    words += ["--restart-in-process", script(text), tmp_path / "stop"]
    first, second = start_node(0, *words), start_node(1, *words)
    said_after(first, 0, "stay in their processes")
    said_after(second, 0, "stays in its process")
    (tmp_path / "stop").touch()
    (status, text), (other_status, other_text) = first.end(), second.end()
    assert (status, other_status) == (0, 0), text + other_text
    assert "ranks 0-1 stay in their processes\n" in text
    assert "rank 2 stays in its process; rank 3 takes a spare process\n" in other_text
