"""The spawner: a small process between the launcher and its ranks that starts, signals and reaps them.

It is forked from the launcher before that has threads, sockets or CUDA, so that ranks forked from it start with torch
imported and nothing else; for callers that are themselves programs it is a fresh interpreter that runs this file (then
ranks get fresh interpreters too). It outlives a killed launcher by the moment it takes to kill the ranks and remove
what was temporary. Ranks die with it (PR_SET_PDEATHSIG), and as a subreaper it inherits what ranks leave behind.

Messages are lines of JSON over one Unix socket, `do` towards the spawner, `event` back. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_LEAVING_S = 0.3  # for what ends by itself when its rank has ended, as workers do
_MOST_TOLD, _MOST_COMMAND = 8, 60
_COPIER_S = 5.0  # a console that takes nothing, such as a paused pager, must not keep a job from ending
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that a spawner leaves to the launcher; while it forks they are blocked."""


@dataclass(frozen=True)
class RankStart:
    """The start of a forked rank: `command` as the arguments of an interpreter (`[-m] name ...`), and its threads.

    A spare runs nothing yet: it imports `modules`, and waits at `place` for what it is to run (see `spares`).
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    num_threads: int | None
    place: socket.socket | None = None
    modules: tuple[str, ...] = ()


class Channel:
    """Messages over a Unix socket, a line of JSON each. Sending and receiving raise ConnectionError at its end."""

    def __init__(self, channel: socket.socket) -> None:
        self.socket, self._received = channel, b""

    def send(self, **message: Any) -> None:
        """Send one message."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have come whole, once something has come."""
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionError
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]


@dataclass
class Ranks:
    """The ranks of one attempt by process id; processes that were started here and not reaped yet.

    `spares` are those that stand by, with what they are told through.
    """

    running: dict[int, int] = field(default_factory=dict)
    spares: dict[int, socket.socket] = field(default_factory=dict)
    programs: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    copier: int | None = None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; end at once if `parent_pid` has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _keep_on(cpus: list[int]) -> None:
    if cpus:
        with contextlib.suppress(OSError):  # CPUs that have been taken from this container since they were read
            os.sched_setaffinity(0, cpus)


class Spawner:
    """The loop of the spawner process. `serve` returns only in a forked rank."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = Channel(channel)
        self.ranks = Ranks()
        self._owned_paths: list[str] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self) -> RankStart:
        """Serve the launcher until it says `end` or is gone; both end the process. Returns in each forked rank."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (*IGNORED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that are started would inherit
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked since before the fork
        actions: dict[str, Callable[[dict[str, Any]], RankStart | None]] = {
            "start": self._start,
            "signal": self._signal,
            "clear": self._clear,
            "own": lambda message: self._owned_paths.append(message["path"]),
            "end": lambda _: self._end(0),
        }
        while True:
            ready = select.select([self._channel.socket.fileno(), self._wake_read], [], [])[0]
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._reap()
            if self._channel.socket.fileno() in ready:
                for message in self._receive():
                    start = actions[message["do"]](message)
                    if start is not None:
                        return start

    def _receive(self) -> list[dict[str, Any]]:
        try:
            return self._channel.receive()
        except ConnectionError:
            self._end(1)

    def _send(self, **message: Any) -> None:
        try:
            self._channel.send(**message)
        except ConnectionError:
            self._end(1)

    def _start(self, message: dict[str, Any]) -> RankStart | None:
        pids: dict[int, int] = {}
        copies: list[Any] = []
        took_spares: list[int] = []
        for rank in message["ranks"]:
            streams: list[int | None] = []
            try:
                streams += [
                    self._open_stream(number, rank[name], rank[f"copy_{name}"], copies)
                    for number, name in ((1, "stdout"), (2, "stderr"))
                ]
                spare = self._take_spare(rank, message, streams)
                took_spares += [] if spare is None else [rank["local_rank"]]
                started = spare or self._begin(rank, message, streams, [copy.source for copy in copies])
            except (OSError, ValueError) as error:
                self._close(copy.source for copy in copies)
                self._kill_all()
                self._send(event="start_failed", rank=rank["local_rank"], error=str(error))
                return None
            finally:  # in the rank, too
                signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
                self._close(stream for stream in streams if stream is not None)
            if isinstance(started, RankStart):
                return started
            pids[rank["local_rank"]] = started
            self.ranks.running[started] = rank["local_rank"]
        if copies:
            from paraplan.launch.ranks.copier import serve_copies

            self.ranks.copier = os.fork()
            if self.ranks.copier == 0:
                serve_copies(copies, close=[self._channel.socket.fileno(), self._wake_read, self._wake_write])
            self._close(copy.source for copy in copies)
        self._send(event="started", pids=pids, spares=took_spares)
        return self._fill_spares(message)

    def _take_spare(self, rank: dict[str, Any], message: dict[str, Any], streams: list[int | None]) -> int | None:
        """Have a process that stands by run a rank; return its id, None where none does."""
        start = {name: rank[name] for name in ("command", "cpus")} | {"num_threads": message["num_threads"]}
        start["environment"] = message["environment"] | rank["environment"]
        data = json.dumps(start).encode() + b"\n"
        descriptors = [number if one is None else one for number, one in zip((1, 2), streams, strict=True)]
        while self.ranks.spares:
            pid, place = self.ranks.spares.popitem()
            with place, contextlib.suppress(OSError):  # it has just ended
                left = data[socket.send_fds(place, [data], descriptors) :]
                if left:  # one that has all closes its end, to which not even nothing can be sent
                    place.sendall(left)
                return pid
        return None

    def _fill_spares(self, message: dict[str, Any]) -> RankStart | None:
        """Have as many processes stand by as are wanted; in a process that is forked return that it is one."""
        spares = message["spares"]
        while len(self.ranks.spares) < spares["number"]:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            command = [*spares["command"], str(theirs.fileno()), *spares["modules"]]
            rank = {"command": command, "environment": {}, "cpus": []}
            try:
                started = self._begin(rank, message, [None, None], [], theirs.fileno())
            except OSError:  # the job goes on without
                return None
            finally:  # in the spare, too
                signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
            if isinstance(started, RankStart):
                ours.close()
                return replace(started, place=theirs, modules=tuple(spares["modules"]))
            theirs.close()
            self.ranks.spares[started] = ours
        return None

    def _begin(
        self, rank: dict[str, Any], message: dict[str, Any], streams: list[int | None], others: list[int], *passed: int
    ) -> RankStart | int:
        """Start a process for a rank; return its id, and in a process that is forked what it is to run.

        `passed` are descriptors that it gets beside its streams, `others` those that are not for it.
        """
        environment, parent = message["environment"] | rank["environment"], os.getpid()
        if message["fork"]:
            signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # one for the rank waits until it can end by it
            pid = os.fork()
            if pid == 0:
                self._become_rank(parent, streams, others=others)
                _keep_on(rank["cpus"])
                return RankStart(tuple(rank["command"]), environment, message["num_threads"])
            return pid
        program = subprocess.Popen(
            rank["command"],
            env=environment,
            pass_fds=passed,
            stdout=streams[0],
            stderr=streams[1],
            start_new_session=True,
            preexec_fn=lambda: (die_with(parent), _keep_on(rank["cpus"])),  # type: ignore[func-returns-value]  # safe: this process has one thread
        )
        self.ranks.programs[program.pid] = program
        return program.pid

    def _open_stream(self, number: int, path: str, copy_path: str, copies: list[Any]) -> int | None:
        """Return the descriptor that a rank has as stream `number`: a file, what is copied to one, or None: ours."""
        if path:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        if not copy_path:
            return None
        from paraplan.launch.ranks.copier import open_copy  # a spawner that runs as a file alone is asked for no copies

        copy, sink = open_copy(number, copy_path)
        copies.append(copy)
        return sink

    def _wait_for_copier(self, timeout_s: float) -> None:
        """Wait until what the ranks have written is copied: the copier ends with the last writer."""
        deadline = time.monotonic() + timeout_s
        while self.ranks.copier is not None and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.002)

    @staticmethod
    def _close(descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    def _become_rank(self, parent: int, descriptors: list[int | None], *, others: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (*IGNORED, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.setsid()
        die_with(parent)
        for stream, descriptor in zip((1, 2), descriptors, strict=True):
            if descriptor is not None:
                os.dup2(descriptor, stream)
        self._close(others)
        for place in (*self.ranks.spares.values(), self._channel.socket):
            place.close()
        self._close([self._wake_read, self._wake_write])

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            now_ns = time.time_ns()
            code = os.waitstatus_to_exitcode(status)
            program = self.ranks.programs.pop(pid, None)
            if program is not None:
                program.returncode = code
            if pid == self.ranks.copier:
                self.ranks.copier = None
            if pid in self.ranks.spares:
                self.ranks.spares.pop(pid).close()
            rank = self.ranks.running.pop(pid, None)
            if rank is not None:
                end = {"local_rank": rank, "code": code, "time_ns": now_ns, "max_rss_bytes": usage.ru_maxrss * 1024}
                self._send(event="exit", end=end)

    def _signal(self, message: dict[str, Any]) -> None:
        for pid in self.ranks.running:  # not reaped yet, so their ids name no other process
            if message["only"] is None:
                _signal_group(pid, message["signal"])
            elif pid in message["only"]:
                os.kill(pid, message["signal"])

    def _clear(self, message: dict[str, Any]) -> None:
        """End what ranks that are gone have left behind; with `leaves` tell what of it still runs after a moment."""
        ending = ((signal.SIGTERM, message["grace_s"]), (signal.SIGKILL, 5.0))
        left = first = self._leftovers()
        for number, timeout_s in ((0, _LEAVING_S),) if message["leaves"] else ending:
            deadline = time.monotonic() + timeout_s
            while left:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
                self._reap()
                left = self._leftovers()
        self._wait_for_copier(_LEAVING_S if left else _COPIER_S)  # what is left may write on
        told = [[pid, _command_of(pid)] for pid in left[:_MOST_TOLD]]
        self._send(event="cleared", num_processes=len(first), left=told)

    def _kill_all(self) -> None:
        for pid in self.ranks.running:
            _signal_group(pid, signal.SIGKILL)
        for _ in range(100):  # each killed process may hand its own children up to this one
            left = _leftovers({self.ranks.copier})
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.ranks.running.clear()
            self._reap()
            time.sleep(0.01)
        self._wait_for_copier(_COPIER_S)
        self.ranks = Ranks()

    def _leftovers(self) -> list[int]:
        return _leftovers({*self.ranks.running, *self.ranks.spares, self.ranks.copier})

    def _end(self, status: int) -> NoReturn:
        if status or self.ranks.running or self.ranks.spares:
            self._kill_all()
        for path in self._owned_paths:
            shutil.rmtree(path, ignore_errors=True)
        os._exit(status)


def _signal_group(pid: int, number: int) -> None:
    """Signal the group of a rank that is not reaped yet, or the rank alone, which may not have made its group yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)


def _leftovers(known: Collection[int | None]) -> list[int]:
    """Return the children of this process that are not `known`: orphans of ranks, handed up by the kernel."""
    own = os.getpid()
    return [pid for pid, parent in _parents().items() if parent == own and pid not in known]


def _parents() -> dict[int, int]:
    """Return the parent of every live process; empty where there is no /proc. Zombies are left out."""
    parents: dict[int, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):  # noqa: PTH208
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    parents[int(name)] = int(parent)
    return parents


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
        return file.read(_MOST_COMMAND).replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


if __name__ == "__main__":
    Spawner(socket.socket(fileno=int(sys.argv[1]))).serve()
