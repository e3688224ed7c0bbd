"""The spawner's side of ranks that stay when another one is lost, and of spares that stand by for one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from paraplan.launch.ranks.bootstrap import CHANNEL_VARIABLE
from paraplan.launch.ranks.channel import Channel
from paraplan.launch.ranks.spawner import IGNORED, RankStart, Spawner

_ASKS_S = (5.0, 20.0, 60.0)
"""How long after the start of ranks one tells what it has imported: much is imported where it is first used."""

_SPARE = -1
"""The number of a process that is started as no rank."""


class KeptProcesses:
    """The processes that have a channel: those of ranks, those that have left their script, and spares.

    `idle` have a rank's number, whose place they take again; `spares` any. Both are by process id.
    """

    def __init__(self) -> None:
        self._channels: dict[int, Channel] = {}
        self.idle: dict[int, int] = {}
        self.spares: list[int] = []

    def add(self, pid: int, channel: Channel, *, is_spare: bool) -> None:
        """Take note of a process that was started with the other end of a channel."""
        self._channels[pid] = channel
        if is_spare:
            self.spares.append(pid)

    def forget(self, pid: int) -> None:
        """Take note that a process has ended."""
        self.idle.pop(pid, None)
        if pid in self.spares:
            self.spares.remove(pid)
        channel = self._channels.pop(pid, None)
        if channel is not None:
            channel.connection.close()

    def close(self) -> None:
        """Close all channels, in a process that is to become a rank."""
        for channel in self._channels.values():
            channel.connection.close()

    def descriptors(self) -> list[int]:
        """Return the descriptors of all channels, for select."""
        return [channel.fileno() for channel in self._channels.values()]

    def events(self, ready: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield what processes say whose channels are `ready`, with their ids."""
        for pid, channel in list(self._channels.items()):
            if channel.fileno() in ready:
                try:
                    said = channel.receive()
                except (EOFError, OSError):  # it ends: that it has is told when it is reaped
                    self._channels.pop(pid).connection.close()
                    continue
                for event in said:
                    yield pid, event

    def order(self, pid: int, what: str, **words: Any) -> None:
        """Have a process do something: `park`, `end`, `tell` or `import`."""
        channel = self._channels.get(pid)
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.send(do=what, **words)

    def take_place(self, rank: int, start: Mapping[str, Any], streams: tuple[int, int]) -> tuple[int, bool] | None:
        """Have a process that stands by run a rank; return its id and whether it was a spare. None where none does."""
        was_here = [pid for pid, place in self.idle.items() if place == rank]
        for pid in [*was_here, *self.spares]:
            channel = self._channels.get(pid)
            is_spare = pid in self.spares
            if channel is None:
                continue
            try:
                channel.send(with_descriptors=streams, do="run", **start)
            except OSError:
                continue
            self.idle.pop(pid, None)
            if is_spare:
                self.spares.remove(pid)
            return pid, is_spare
        return None


class KeepingSpawner(Spawner):
    """A spawner whose ranks may stay when another one is lost."""

    def __init__(self, channel: socket.socket) -> None:
        """Take the channel to the launcher."""
        super().__init__(channel)
        self._kept = KeptProcesses()
        self._asks_at: list[float] = []

    def actions(self) -> dict[str, Callable[[dict[str, Any]], RankStart | None]]:
        """Return what the launcher may ask for: ranks that leave their script, and those that end after an error."""

        def order(message: dict[str, Any], what: str) -> None:
            for pid, rank in self.ranks.running.items():
                if rank in message["ranks"]:
                    self._kept.order(pid, what)

        return {"park": lambda message: order(message, "park"), "release": lambda message: order(message, "end")}

    def wait(self, *, more: Iterable[int] = (), timeout_s: float | None = None) -> list[int]:
        """See the base class; what ranks say is passed on."""
        if self._asks_at and self._kept.spares:
            timeout_s = max(0.0, self._asks_at[0] - time.monotonic())
        ready = super().wait(more=(*more, *self._kept.descriptors()), timeout_s=timeout_s)
        self._hear(ready)
        return ready

    def _hear(self, ready: list[int]) -> None:
        """Pass on what ranks say, and have one tell now and then what spares are to import."""
        if self._asks_at and time.monotonic() >= self._asks_at[0]:
            self._asks_at.pop(0)
            for pid in [*self.ranks.running][:1]:
                self._kept.order(pid, "tell")
        for pid, said in self._kept.events(ready):
            rank = self.ranks.running.get(pid)
            if rank is None:
                continue
            if said["event"] == "modules":
                for spare in self._kept.spares:
                    self._kept.order(spare, "import", modules=said["modules"])
                continue
            if said["event"] == "parked":
                self._kept.idle[pid] = self.ranks.running.pop(pid)
            self.send(**{"code": 0} | said, rank=rank, time_ns=time.time_ns())

    def place(
        self, rank: dict[str, Any], message: dict[str, Any], streams: list[int | None], placed: dict[str, list[int]]
    ) -> int | None:
        """See the base class."""
        if not message["keep"]:
            return None
        start = {
            "command": rank["plain"],
            "cpus": rank["cpus"],
            "environment": message["environment"] | rank["environment"],
            "num_threads": message["num_threads"],
        }
        descriptors = _own_streams(streams)
        found = self._kept.take_place(rank["rank"], start, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if found is None:
            return None
        placed["spares" if found[1] else "stayed"].append(rank["rank"])
        return found[0]

    def after_start(self, message: dict[str, Any]) -> RankStart | None:
        """Have as many processes stand by as are wanted."""
        self._asks_at = [time.monotonic() + wait_s for wait_s in _ASKS_S]
        while len(self._kept.spares) < message["num_spares"]:
            spare = {"rank": _SPARE, "command": message["spare_command"], "environment": {}, "cpus": []}
            try:
                started = self.begin(spare, message, [None, None], [])
            except OSError:  # the job goes on without
                return None
            finally:  # in the spare, too
                signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
            if isinstance(started, RankStart):
                return started
        return None

    def standing_by(self) -> set[int]:
        """See the base class."""
        return {*self._kept.idle, *self._kept.spares}

    def forget(self, pid: int) -> None:
        """See the base class."""
        self._kept.forget(pid)

    def begin(
        self,
        rank: dict[str, Any],
        message: dict[str, Any],
        streams: list[int | None],
        others: list[int],
        *,
        passed: tuple[int, ...] = (),
    ) -> RankStart | int:
        """Start a process with a channel, where ranks are kept."""
        if not message["keep"]:
            return super().begin(rank, message, streams, others, passed=passed)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        number, is_spare = theirs.fileno(), rank["rank"] == _SPARE
        rank = rank | {"environment": rank["environment"] | {CHANNEL_VARIABLE: str(number)}}
        started = super().begin(rank, message, streams, others, passed=(*passed, number))
        if isinstance(started, RankStart):
            ours.close()
            self._kept.close()
            environment = {name: value for name, value in started.environment.items() if name != CHANNEL_VARIABLE}
            modules = tuple(message["modules"]) if is_spare else ()
            channel = Channel(theirs)
            return replace(started, environment=environment, channel=channel, is_spare=is_spare, modules=modules)
        theirs.close()
        self._kept.add(started, Channel(ours), is_spare=is_spare)
        return started


def _own_streams(streams: list[int | None]) -> tuple[int, int]:
    """Return the two descriptors that a rank is to write to, those of this process for None, to be closed."""
    first, second = (os.dup(number if one is None else one) for number, one in zip((1, 2), streams, strict=True))
    return first, second
