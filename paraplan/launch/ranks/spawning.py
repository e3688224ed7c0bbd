"""The launcher's side of the spawner: `SpawnerHandle`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paraplan.errors import UsageError
from paraplan.launch.ranks import spawner


class StartError(UsageError):
    """A rank whose program or log file cannot be opened."""


class SpawnerLostError(RuntimeError):
    """The spawner was killed, and with it all ranks."""


@dataclass(frozen=True)
class RankCommand:
    """How one rank is started: the arguments (see `RankStart`) and what its environment adds.

    `stdout` and `stderr` are files in place of this process's streams, `copy_stdout` and `copy_stderr` files beside
    them; '' for none. `cpus` are the CPUs that it may use, none given for all.
    """

    local_rank: int
    command: Sequence[str]
    environment: dict[str, str]
    stdout: str = ""
    stderr: str = ""
    copy_stdout: str = ""
    copy_stderr: str = ""
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spares:
    """How many processes stand by with these `modules` imported; `command` starts one."""

    number: int = 0
    command: Sequence[str] = ()
    modules: Sequence[str] = ()


@dataclass(frozen=True)
class RankExit:
    """How a rank ended. `code` is negative for a signal, `time_ns` counts from the epoch."""

    local_rank: int
    code: int
    time_ns: int
    max_rss_bytes: int


_STDERR = 2


class SpawnerHandle:
    """A running spawner. One attempt of ranks at a time; `close` ends it, and leaves nothing behind."""

    def __init__(self, channel: socket.socket, *, pid: int, program: subprocess.Popen[bytes] | None = None) -> None:
        self._channel, self._pid, self._program = spawner.Channel(channel), pid, program
        self._sending, self._exits = threading.Lock(), list[RankExit]()
        self.took_spares: frozenset[int] = frozenset()
        """Local ranks that the last start has put into spare processes."""

    def own(self, path: str) -> None:
        """Have `path`, a folder that this launch made, removed when the launch ends, however it ends."""
        self._send(do="own", path=path)

    def start(
        self,
        ranks: Sequence[RankCommand],
        *,
        environment: Mapping[str, str],
        fork: bool,
        num_threads: int | None,
        spares: Spares = Spares(),
        timeout_s: float = 120.0,
    ) -> dict[int, int]:
        """Start `ranks`; return their process ids by local rank. Raises `StartError` with none of them left running.

        Processes that stand by are taken where there are some (`took_spares`), and as many as `spares` says stand by
        from then on.
        """
        self._exits.clear()
        self._send(
            do="start",
            fork=fork,
            environment=dict(environment),
            num_threads=num_threads,
            spares=vars(spares),
            ranks=[vars(rank) for rank in ranks],
        )
        answer = self._wait_for({"started", "start_failed"}, timeout_s=timeout_s)
        if answer["event"] == "start_failed":
            raise StartError(
                f"local rank {answer['rank']} cannot be started: {answer['error']}",
                hint="check the path of the program and the log folder",
            )
        self.took_spares = frozenset(answer["spares"])
        return {int(rank): pid for rank, pid in answer["pids"].items()}

    def exits(self, *, timeout_s: float = 0.0) -> list[RankExit]:
        """Return the exits since the last call; wait up to `timeout_s` for a first one."""
        deadline = time.monotonic() + timeout_s
        while not self._exits:
            rest_s = max(0.0, deadline - time.monotonic())
            if not self._receive(rest_s) and rest_s == 0.0:
                break
        while self._receive(0.0):
            pass
        exits, self._exits = self._exits, []
        return exits

    def signal(self, number: int, *, only: Sequence[int] | None = None) -> None:
        """Send signal `number` to the process group of every rank that still runs; any thread may.

        With `only`: to those ranks that have these process ids, and to no children of theirs.
        """
        self._send(do="signal", signal=int(number), only=only)

    def clear(self, *, grace_s: float) -> int:
        """End the processes that ended ranks left behind, daemons too, and return their number."""
        self._send(do="clear", leaves=False, grace_s=grace_s)
        return int(self._wait_for({"cleared"}, timeout_s=grace_s + 30.0)["num_processes"])

    def find_left(self) -> dict[int, str]:
        """Return the commands of the processes that ended ranks left behind and that stay, by id: the first few."""
        self._send(do="clear", leaves=True, grace_s=0.0)
        return {int(pid): str(command) for pid, command in self._wait_for({"cleared"}, timeout_s=30.0)["left"]}

    def close(self) -> None:
        """End the spawner; ranks that still run are killed."""
        with contextlib.suppress(SpawnerLostError):
            self._send(do="end")
        self._channel.socket.close()
        if self._program is not None:
            self._program.wait()
        else:
            os.waitpid(self._pid, 0)

    def _send(self, **message: Any) -> None:
        try:
            with self._sending:
                self._channel.send(**message)
        except ConnectionError:
            raise SpawnerLostError("the process that started the ranks was killed") from None

    def _wait_for(self, events: set[str], *, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for message in self._receive(deadline - time.monotonic()):
                if message["event"] in events:
                    return message
        raise SpawnerLostError(f"the process that starts the ranks did not answer within {timeout_s:.0f} s")

    def _receive(self, timeout_s: float) -> list[dict[str, Any]]:
        if not select.select([self._channel.socket], [], [], max(0.0, timeout_s))[0]:
            return []
        try:
            messages = self._channel.receive()
        except ConnectionError:
            raise SpawnerLostError("the process that started the ranks was killed") from None
        self._exits += [RankExit(**message["end"]) for message in messages if message["event"] == "exit"]
        return messages


def close_all_but(kept: int) -> None:
    """Close what this process has inherited beside its standard streams: ranks are not to get it either."""
    with contextlib.suppress(OSError):
        for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            if number > _STDERR and number != kept:
                with contextlib.suppress(OSError):  # the folder's own, which is closed by now
                    os.close(number)


def fork_spawner() -> SpawnerHandle | spawner.RankStart:
    """Fork a spawner off this process; return its handle, and in every rank that it forks what that rank is to run.

    Only for a process with a single thread that has not touched CUDA: ranks inherit its modules and nothing else.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # of a spawner that has no handler for it yet
    pid = os.fork()
    if pid == 0:
        ours.close()
        close_all_but(theirs.fileno())
        return spawner.Spawner(theirs).serve()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    theirs.close()
    return SpawnerHandle(ours, pid=pid)


def open_spawner() -> SpawnerHandle:
    """Start a spawner with an interpreter of its own, for callers that may have threads; its ranks get the same."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    program = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(spawner.__file__)), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # a Ctrl-C of the terminal is the launcher's to act on
    )
    theirs.close()
    return SpawnerHandle(ours, pid=program.pid, program=program)


@contextlib.contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Have SIGTERM unwind this process as Ctrl-C does, with the status that a shell gives it: what it made goes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def signal_name(number: int) -> str:
    """Return the name of a signal, `signal 99` for one without a name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
