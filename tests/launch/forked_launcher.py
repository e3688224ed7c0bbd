"""Launchers that run while a test looks at them, in processes forked with torch imported.

An interpreter imports torch for a second of the processor. What starts without it is a launcher all the same: a process
with a number, streams, a folder and an environment of its own. How launches start is for tests of real interpreters.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from forked_launch import launch_words
from nodes import Place
from rank_harness import RankHarness

_NEW_MOUNTS, _NEW_HOST_NAME, _NEW_NETWORK = 0x00020000, 0x04000000, 0x40000000
_PRIVATE, _DETACHED = 0x00040000 | 0x4000, 2  # MS_PRIVATE | MS_REC, MNT_DETACH


class ForkedLauncher:
    """`paraplan launch` of `words`, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        ranks: RankHarness,
        words: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        output: Path | None = None,
        place: Place | None = None,
    ) -> None:
        """Start it on the host at `place`, None for this one; with `output` both streams go to that file."""
        pipes = [] if output else [ranks.pipe(), ranks.pipe()]
        ends = [theirs for _, theirs in pipes]
        self._process = ranks.process(_be_launcher, words, str(folder), dict(environment), ends, output, place)
        self._process.start()
        self.args = [*words]
        self.pid = self._process.pid or 0
        for theirs in ends:
            theirs.close()
        streams = [os.fdopen(os.dup(ours.fileno()), "r") for ours, _ in pipes] or [None, None]
        for ours, _ in pipes:
            ours.close()
        self.stdout, self.stderr = streams

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return all that is still to be read of both streams, once the launcher has ended."""
        with ThreadPoolExecutor(2) as pool:
            read = [pool.submit(stream.read) for stream in (self.stdout, self.stderr) if stream is not None]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            texts = [each.result(timeout) for each in read]
        self.close_streams()
        return texts[0], texts[1]

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close_streams(self) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> ForkedLauncher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_streams()
        self.wait()


def _be_launcher(
    words: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    ends: Sequence[Connection],
    output: Path | None,
    place: Place | None,
) -> NoReturn:
    from paraplan.launch.ranks.forked import flush_streams

    if place is not None:
        _move_to(place)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it is looked up anew: the folder is another one here
    os.chdir(folder)
    sys.argv = ["paraplan", *words]  # as the launcher sees its own, which it keeps
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        targets = [file, file]
    else:
        targets = [end.fileno() for end in ends]
    for number, target in zip((1, 2), targets, strict=True):
        os.dup2(target, number)
    for target in {*targets}:
        os.close(target)
    status = launch_words(words)
    flush_streams()
    os._exit(status)


def _move_to(place: Place) -> None:
    """Be on a host as `ip netns exec` and `unshare --uts` are: with its network, its /sys and its name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", place.namespace).open() as namespace:
        _must(libc.setns(namespace.fileno(), _NEW_NETWORK))
    _must(libc.unshare(_NEW_MOUNTS | _NEW_HOST_NAME))
    _must(libc.mount(b"none", b"/", None, _PRIVATE, None))
    libc.umount2(b"/sys", _DETACHED)
    _must(libc.mount(place.namespace.encode(), b"/sys", b"sysfs", 0, None))
    socket.sethostname(place.host_name)


def _must(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
