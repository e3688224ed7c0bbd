"""`paraplan topo --nnodes` as users call it: one process for each node."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from typer.testing import CliRunner
from waiting import PATIENCE_S, wait_until

from paraplan.cli.main import app

pytestmark = pytest.mark.ranks

IP = shutil.which("ip") or ""
_RENDEZVOUS = "0107D50A:72D8"  # 10.213.7.1:29400 as Linux writes it: the address in host byte order
NAMES = "".join(f"GPU {number}: NVIDIA RTX A6000 (UUID: GPU-{number}aaa)\n" for number in range(2))
BRIDGED = NAMES + (
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV4\tPIX\t0-7\t0\n"
    "GPU1\tNV4\t X \tPIX\t0-7\t0\n"
    "NIC0\tPIX\tPIX\t X \n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)
BARE = BRIDGED.replace("NV4", "PHB")


def start(source: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "paraplan", "topo", "--from", str(source), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"}
    )


def ask(source: Path, *arguments: str) -> tuple[int, str, str]:
    """Return status and output of a node in this process, which has torch imported sooner than another one."""
    result = CliRunner().invoke(app, ["topo", "--from", str(source), *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def finish(nodes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        outputs = [node.communicate(timeout=PATIENCE_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    return [(node.returncode, *output) for node, output in zip(nodes, outputs, strict=True)]


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "bridged.txt", tmp_path / "bare.txt"]
    for path, text in zip(paths, (BRIDGED, BARE), strict=True):
        path.write_text(text)
    return paths


def test_each_node_shows_all_and_the_one_whose_bridge_is_missing(sources: list[Path]) -> None:
    where = f"127.0.0.1:{free_port()}"
    same = ("--nnodes", "2", "--rdzv-endpoint", where)
    first = start(sources[0], *same, "--node-rank", "0")
    report = ask(sources[1], *same, "--node-rank", "1", "--json")
    (tables,) = finish([first])
    sentence = "node 1 has PHB between GPUs 0-1, where node 0 has NV4 between GPUs 0-1"
    assert tables[0] == report[0] == 0, (tables[2], report[2])
    assert tables[1].startswith("2 nodes, 4 GPUs\n")
    assert f"Differs: {sentence}" in tables[1]
    assert "Links in the node: slow" in tables[1]
    found = json.loads(report[1])
    assert found["differences"] == [sentence]
    assert [node["nvlink_islands"] for node in found["nodes"]] == [[[0, 1]], []]
    assert found["cluster"]["num_nodes"] == 2


def test_a_node_that_waits_in_vain_says_who_is_missing(sources: list[Path]) -> None:
    where = f"127.0.0.1:{free_port()}"
    status, out, err = ask(sources[0], "--nnodes", "2", "--rdzv-endpoint", where, "--wait", "1")
    assert status == 1
    assert "1 of 2 nodes did not reach" in err
    assert "missing node 1" in err
    assert "Traceback" not in err
    assert out == ""


def test_an_endpoint_must_be_given(sources: list[Path]) -> None:
    status, _, err = ask(sources[0], "--nnodes", "2")
    assert status == 2
    assert "--nnodes needs --rdzv-endpoint" in err


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Two network namespaces that a pair of virtual interfaces joins: 10.213.7.1 and 10.213.7.2, nothing else."""
    names = [f"paraplan-{os.getpid()}-{number}" for number in range(2)]
    links = [f"pp{os.getpid()}v{number}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("-n", name, "address", "add", f"10.213.7.{number + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run([IP, "netns", "delete", name], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    done = subprocess.run([IP, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")


@pytest.mark.skipif(not IP, reason="needs the program ip (iproute2)")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="network namespaces need root")
def test_nodes_with_addresses_of_their_own_meet_and_listen_on_the_one_asked_for_alone(sources: list[Path]) -> None:
    with two_namespaces() as spaces:
        same = ("--nnodes", "2", "--rdzv-endpoint", "10.213.7.1:29400", "--wait", "200")
        first = start(sources[0], *same, prefix=(IP, "netns", "exec", spaces[0]))
        listening = wait_for_listeners(spaces[0], _RENDEZVOUS)
        second = start(sources[1], *same, prefix=(IP, "netns", "exec", spaces[1]))
        for status, out, err in finish([first, second]):
            assert status == 0, err
            assert "Differs: node 1 has PHB between GPUs 0-1" in out
    outside = {address for address in listening if not address.startswith("0100007F:")}  # 127.0.0.1
    assert outside == {_RENDEZVOUS}


def wait_for_listeners(space: str, awaited: str) -> set[str]:
    """Return all addresses on which somebody listens, once the awaited one is among them."""
    wait_until(lambda: awaited in listeners(space), told=lambda: f"nobody listens on {awaited}: {listeners(space)}")
    return listeners(space)


def listeners(space: str) -> set[str]:
    command = [IP, "netns", "exec", space, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {row.split()[1] for row in rows if len(row.split()) > 3 and row.split()[3] == "0A"}
