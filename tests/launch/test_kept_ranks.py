"""What ranks that stay are made of: what counts as a library, and the channel to the spawner."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import pytest

from paraplan.launch.ranks.channel import Channel
from paraplan.launch.ranks.run_state import is_library


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
