"""`paraplan doctor` and `--preflight measure` on machines with real faults: a slow link, a slow processor."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_nodes import Node
from launching import ForkedLaunch, WriteScript, launcher_command, launcher_environment
from nodes import IP, Hosts
from rank_harness import RankHarness
from typer.testing import CliRunner

from paraplan.cli.main import app
from paraplan.errors import CheckFailedError
from paraplan.launch.elastic import health
from paraplan.launch.elastic.records import AttemptSettings, JobRecord
from paraplan.launch.ranks.spawning import open_spawner
from paraplan.launch.spec import LaunchSpec

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


def slow_down(made: Hosts, index: int) -> None:
    """Let one host send 60 Mbit/s."""
    words = ["dev", "eth0", "root", "tbf", "rate", "60mbit", "burst", "32k", "latency", "100ms"]
    namespace = ["netns", "exec", f"{made.name}h{index}", "tc", "qdisc", "add"]
    subprocess.run([IP, *namespace, *words], check=True)


StartAll = Callable[..., list[tuple[int, str]]]


@pytest.fixture
def run_on_all(three_hosts: Hosts, tmp_path: Path, scratch: Path, ranks: RankHarness) -> Iterator[StartAll]:
    nodes: list[Node] = []

    def run(*words: object, slow_host: int | None = None, nnodes: str = "3") -> list[tuple[int, str]]:
        meet = ["--nnodes", nnodes, "--nproc-per-node", 1, "--rdzv-backend", "c10d"]
        meet += ["--rdzv-endpoint", f"{three_hosts.addresses[0]}:29455", "--rdzv-conf", "join_timeout=300"]
        secret = {"PARAPLAN_JOB_TOKEN": "a-secret-of-the-test"}
        for index in range(3):
            slow = SLOW_PRODUCTS if index == slow_host else {}
            where = {"folder": tmp_path, "environment": launcher_environment(scratch, **secret, **slow)}
            # MKL reads its variable when it is loaded.
            nodes.append(Node(ranks, three_hosts, index, *meet, *words, **where, is_forked=not slow))
        return [node.end() for node in nodes]

    yield run
    for node in nodes:
        node.stop()


@pytest.mark.with_all  # beside other tests on two cores, a host that waits for a core is as slow as the link
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


@pytest.mark.with_all  # how findings are told apart is tested in tests/hardware, how they reach all hosts above
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
    words = ["doctor", "--seconds", "1", "--nproc-per-node", "2", "--report", str(report)]
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


@pytest.mark.with_all  # words of the launcher are refused by it, as in test_launch_parser
def test_doctor_refuses_words_that_the_launcher_refuses(tmp_path: Path, scratch: Path) -> None:
    done = subprocess.run(
        [*launcher_command()[:-1], "doctor", "--nproc", "x"],
        cwd=tmp_path,
        env=launcher_environment(scratch),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [(["train.py"], "error: paraplan doctor runs no script"), (["--seconds", "inf"], "")],
)
def test_doctor_refuses_scripts_and_options_that_nobody_has(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('the script ran')")
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_ranks_that_hang_while_they_measure_are_ended_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_START_S", 0.0)  # in so short a time no rank has imported torch
    spawner = open_spawner()
    settings = AttemptSettings(LaunchSpec(training_script="train.py"), spawner)
    try:
        check = health.HealthCheck(JobRecord(attempts=1), settings, {0: {"RANK": "0"}}, tmp_path, 0.3)
        with pytest.raises(CheckFailedError, match="was not over after 0 s: no rank had begun"):
            check.run()
    finally:
        spawner.close()


def test_ranks_that_fail_while_they_measure_end_the_launch_with_what_they_were_at(
    launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    done = launch_forked(
        "--preflight", "measure", "--nproc-per-node", 2, script(SCRIPT), GLOO_SOCKET_IFNAME="no-such-interface"
    )
    assert done.returncode == 1
    assert "the measuring before the start failed" in done.stderr
