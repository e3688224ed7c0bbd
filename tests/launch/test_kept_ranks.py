"""What ranks that stay are made of: what counts as a library, and the channel to the spawner."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from paraplan.launch.elastic import keeping
from paraplan.launch.elastic.keeping import RankKeeper
from paraplan.launch.ranks.channel import Channel
from paraplan.launch.ranks.cores import waited_for_cpu_s
from paraplan.launch.ranks.run_state import is_library

BUSY = [sys.executable, "-S", "-c", "while True: pass"]


@pytest.mark.parametrize("path", ["train.py", "src/models/net.py"])
def test_a_script_in_a_folder_that_is_a_virtual_environment_too_is_no_library(path: str) -> None:
    assert not is_library(str(Path(sys.prefix, path)))


@pytest.mark.parametrize("module", [pytest, socket])
def test_installed_packages_and_the_standard_library_are_libraries(module: object) -> None:
    assert is_library(vars(module)["__file__"])


def test_lines_that_two_threads_send_at_once_come_whole() -> None:
    ours, theirs = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    senders = [
        threading.Thread(target=lambda: [ours.send(event="modules", modules=["torch"] * 40_000) for _ in range(10)])
        for _ in range(2)
    ]
    for sender in senders:
        sender.start()
    received: list[dict[str, object]] = []
    while len(received) < 20:
        received += theirs.receive()
    for sender in senders:
        sender.join()
    for channel in (ours, theirs):
        channel.connection.close()
    assert {len(line["modules"]) for line in received if isinstance(line["modules"], list)} == {40_000}


@pytest.fixture
def busy_on_one_cpu() -> Iterator[list[int]]:
    """Two processes that want the same CPU."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    processes = [subprocess.Popen(BUSY) for _ in range(2)]
    os.sched_setaffinity(0, allowed)
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not say who waits for a CPU")
def test_a_rank_that_waits_for_a_cpu_has_longer_to_leave_its_script(
    busy_on_one_cpu: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keeping, "LEAVES_WITHIN_S", 1.0)
    settings: Any = None
    spawner = Mock()
    keeper = RankKeeper(spawner, settings, dict(enumerate(busy_on_one_cpu)), {}, name=int, hold=contextlib.nullcontext)
    began_s = time.monotonic()
    assert not keeper.park([0], time.sleep)
    assert time.monotonic() - began_s > 1.5
    spawner.park.assert_called_once_with([0])
    assert "rank 0 does not stay: it has not left its script within 1 s, and is killed" in capsys.readouterr().err


def test_a_process_that_is_gone_has_not_waited_for_a_cpu(tmp_path: Path) -> None:
    assert waited_for_cpu_s(1, proc=tmp_path) == 0
