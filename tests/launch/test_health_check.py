"""`paraplan doctor` and `--preflight measure` on machines with real faults: a slow link, a slow processor."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_nodes import Node
from launching import ForkedLaunch, Launch, WriteScript, launcher_command, launcher_environment
from nodes import IP, Hosts, hosts, missing_for_hosts

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

SLOW_PRODUCTS = {"MKL_CBWR": "COMPATIBLE"}
"""Has MKL take its SSE2 kernels, which need two to three times as long."""

SCRIPT = """
    import os
    import torch.distributed as dist
    dist.init_process_group("gloo")
    os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}\\n".encode())
    dist.barrier()
    """


@pytest.fixture
def three_hosts() -> Iterator[Hosts]:
    reason = missing_for_hosts()
    if reason is not None:
        pytest.skip(reason)
    with hosts(3) as made:
        yield made


def slow_down(made: Hosts, index: int) -> None:
    """Let one host send 60 Mbit/s."""
    words = ["dev", "eth0", "root", "tbf", "rate", "60mbit", "burst", "32k", "latency", "100ms"]
    namespace = ["netns", "exec", f"{made.name}h{index}", "tc", "qdisc", "add"]
    subprocess.run([IP, *namespace, *words], check=True)


StartAll = Callable[..., list[tuple[int, str]]]


@pytest.fixture
def run_on_all(three_hosts: Hosts, tmp_path: Path, scratch: Path) -> Iterator[StartAll]:
    nodes: list[Node] = []

    def run(*words: object, slow_host: int | None = None, nnodes: str = "3") -> list[tuple[int, str]]:
        meet = ["--nnodes", nnodes, "--nproc-per-node", 1, "--rdzv-backend", "c10d"]
        meet += ["--rdzv-endpoint", f"{three_hosts.addresses[0]}:29455", "--rdzv-conf", "join_timeout=300"]
        secret = {"PARAPLAN_JOB_TOKEN": "a-secret-of-the-test"}
        for index in range(3):
            slow = SLOW_PRODUCTS if index == slow_host else {}
            environment = launcher_environment(scratch, **secret, **slow)
            nodes.append(Node(three_hosts, index, tmp_path, [*meet, *words], environment))
        return [node.end() for node in nodes]

    yield run
    for node in nodes:
        node.stop()


def test_a_host_whose_network_is_slow_is_named_left_out_and_the_others_train(
    three_hosts: Hosts, script: WriteScript, run_on_all: StartAll
) -> None:
    slow_down(three_hosts, 2)
    ends = run_on_all("--preflight", "measure", script(SCRIPT), nnodes="2:3")
    assert [status for status, _ in ends] == [0, 0, 1], ends
    said = "".join(text for _, text in ends)
    assert "preflight: the network of host node2 is slow: it sends at" in said
    assert "left out: host node2" in said
    assert "this host is left out: the network of host node2" in ends[2][1]
    assert "rank 1 of 2" in said


def test_a_host_whose_matmuls_are_slow_is_named_and_kept_where_the_job_needs_it(
    script: WriteScript, run_on_all: StartAll
) -> None:
    ends = run_on_all("--preflight", "measure", script(SCRIPT), slow_host=1)
    assert [status for status, _ in ends] == [0, 0, 0], ends
    said = "".join(text for _, text in ends)
    assert "(node1, CPU): matmuls reach" in said
    assert "left out" not in said
    assert "rank 2 of 3" in said


def test_doctor_measures_ranks_of_one_node_and_writes_a_report(tmp_path: Path, scratch: Path) -> None:
    report = tmp_path / "health.json"
    words = ["doctor", "--seconds", "3", "--nproc-per-node", "2", "--report", str(report)]
    done = subprocess.run(
        [*launcher_command()[:-1], *words],
        cwd=tmp_path,
        env=launcher_environment(scratch),
        capture_output=True,
        text=True,
        check=False,
    )
    values = json.loads(report.read_text())
    assert done.returncode == bool(values["findings"]), done.stderr
    assert "rank 1 (" in done.stdout
    assert [rank["rank"] for rank in values["ranks"]] == [0, 1]
    assert len(values["pairs"]) == 2
    assert all(pair["is_right"] for pair in values["pairs"])


def test_doctor_refuses_options_that_nobody_has(launch: Launch, tmp_path: Path, scratch: Path) -> None:
    done = subprocess.run(
        [*launcher_command()[:-1], "doctor", "--nproc", "x"],
        cwd=tmp_path,
        env=launcher_environment(scratch),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "error: " in done.stderr


def test_ranks_that_fail_while_they_measure_end_the_launch_with_what_they_were_at(
    launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    done = launch_forked(
        "--preflight", "measure", "--nproc-per-node", 2, script(SCRIPT), GLOO_SOCKET_IFNAME="no-such-interface"
    )
    assert done.returncode == 1
    assert "the measuring before the start failed" in done.stderr
