"""Launches: `launch(...)` runs the command with a script of the test; `scratch` shows what it left behind.

`launch_forked(...)` does so in a process that is forked with torch imported, for tests of what a launch says and how
its ranks end: it costs a fifth of one that starts interpreters. `start_forked(...)` and `start_node(...)` are its likes
for tests that look at a launcher while it runs. How launches start is for `launch` and `start`.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from forked_launch import Ended
from forked_launch import launch_forked as run_forked
from forked_launcher import ForkedLauncher
from host_nodes import Node, StartNode
from launching import ForkedLaunch, Launch, Start, StartForked, WriteScript, launcher_command, launcher_environment
from nodes import Hosts, hosts, missing_for_hosts
from rank_harness import RankHarness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests of this folder take longer than others: each may start several jobs, and is patient with each."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture
def scratch() -> Iterator[Path]:
    """The folder for temporary files of a launch: what is in it afterwards was left behind.

    Its path is short: ranks put Unix sockets in it, and the kernel takes 107 characters for a socket's path.
    """
    with tempfile.TemporaryDirectory(prefix="pp-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def script(tmp_path: Path) -> WriteScript:
    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(dedent(text))
        return path

    return write


@pytest.fixture
def launch(tmp_path: Path, scratch: Path) -> Launch:
    def run(*arguments: object, timeout_s: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            launcher_command(*arguments),
            cwd=tmp_path,
            env=launcher_environment(scratch, **environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run


@pytest.fixture
def start(tmp_path: Path, scratch: Path) -> Start:
    def begin(*arguments: object, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            launcher_command(*arguments),
            cwd=tmp_path,
            env=launcher_environment(scratch, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


@pytest.fixture
def launch_forked(tmp_path: Path, scratch: Path, ranks: RankHarness) -> ForkedLaunch:
    def run(*arguments: object, **environment: str) -> Ended:
        return run_forked(ranks, tmp_path, *map(str, arguments), environment={"TMPDIR": str(scratch)} | environment)

    return run


@pytest.fixture
def start_forked(tmp_path: Path, scratch: Path, ranks: RankHarness) -> Iterator[StartForked]:
    """Start a launcher as `start` does, in a process that is forked with torch imported; it ends with the test."""
    started: list[ForkedLauncher] = []

    def begin(*arguments: object, **environment: str) -> ForkedLauncher:
        variables = launcher_environment(scratch, **environment)
        started.append(ForkedLauncher(ranks, [*map(str, arguments)], folder=tmp_path, environment=variables))
        return started[-1]

    yield begin
    for launcher in started:
        launcher.kill()
        launcher.wait()
        launcher.close_streams()


@pytest.fixture
def num_hosts() -> int:
    """How many hosts a test has; it may say so by a parameter of this name."""
    return 3


@pytest.fixture
def three_hosts(num_hosts: int) -> Iterator[Hosts]:
    """Hosts on a network of their own; two make a job where a test does not say how many."""
    reason = missing_for_hosts()
    if reason is not None:
        pytest.skip(reason)
    with hosts(num_hosts) as made:
        yield made


@pytest.fixture
def start_node(three_hosts: Hosts, tmp_path: Path, scratch: Path, ranks: RankHarness) -> Iterator[StartNode]:
    """Start a launcher on one of the hosts with these variables, and end it with the test.

    Without `is_forked` it is an interpreter of its own.
    """
    nodes: list[Node] = []

    def begin(index: int, *words: object, is_forked: bool = True, **environment: str) -> Node:
        variables = launcher_environment(scratch, **environment)
        where = {"folder": tmp_path, "environment": variables}
        nodes.append(Node(ranks, three_hosts, index, *words, **where, is_forked=is_forked))
        return nodes[-1]

    yield begin
    for node in nodes:
        node.stop()
