"""Collectives that time out: which one it was, which ranks waited in it, and where those are that never came.

A rank that waited in vain asks those that it waited for: a thread of every rank listens, and answers where its rank is,
also while that computes or waits. On GPUs NCCL's own watchdog ends the process before anything is raised,
and the launcher says what it wrote.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import secrets
import socket
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # torch re-exports it from C++ unmarked

from paraplan.errors import ParaplanError
from paraplan.runtime.world import backend_of
from paraplan.units import ranks_in_words

_TIMED_OUT = re.compile(r"Timed out waiting (\d+)\s?ms for|Application timeout caused pair closure", re.IGNORECASE)
"""What gloo raises (transport/tcp/unbound_buffer.cc and pair.cc), in torch 2.11 to 2.13."""

_DOOR = "paraplan/door/{rank}"
_PATIENCE_S = 2.0  # with one who connects and says nothing
ANSWERS_S = 5.0
"""How long a rank that timed out waits for the others to say where they are."""


class CollectiveTimeoutError(ParaplanError):
    """Ranks waited for others in a collective until it timed out."""

    exit_status = 1


@dataclass(frozen=True)
class Position:
    """Where a rank is: in the collective `call` of the ranks `group`, or with None at `place` in the script."""

    call: str | None
    group: tuple[int, ...]
    place: str

    def to_json(self) -> str:
        """Return it for the store."""
        return json.dumps([self.call, self.group, self.place])

    @classmethod
    def from_json(cls, text: str) -> Position:
        """Return what `to_json` wrote."""
        call, group, place = json.loads(text)
        return cls(call, tuple(group), place)


class TimeoutWatch:
    """One rank's part in saying which collective timed out. Made with the default process group there.

    A thread answers the ranks that ask at `address`, where it listens until `stop` or the end of this object. What to
    say to it first is known to those who can read the store.
    """

    def __init__(self, rank: int, *, address: str, answers_s: float = ANSWERS_S) -> None:
        self._rank = rank
        self._answers_s = answers_s
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        secret = secrets.token_hex(16)
        _store().set(_DOOR.format(rank=rank), json.dumps([address, listener.getsockname()[1], secret]))
        thread = threading.Thread(target=_answer, args=(listener, secret, threading.get_ident()), daemon=True)
        self._end = weakref.finalize(self, _stop, thread, listener)
        thread.start()

    def stop(self) -> None:
        """Answer no more. Safe to call twice."""
        self._end()

    @contextmanager
    def explained(self, what: Callable[[], str]) -> Iterator[None]:
        """Raise `CollectiveTimeoutError` in place of gloo's error in this context; `what()` names what was being done.

        NCCL's watchdog ends the process instead.
        """
        try:
            yield
        except RuntimeError as error:
            seconds = waited_s(error)
            if seconds is None:
                raise
            positions = self._ask(position_of_traceback(error.__traceback__))
            raise timeout_error(positions, rank=self._rank, waited_s=seconds, what=what()) from error

    def _ask(self, mine: Position) -> dict[int, Position | None]:
        """Return where this rank and those are that it waited for, None for one that does not answer."""
        ranks = mine.group or tuple(range(dist.get_world_size()))
        others = [rank for rank in ranks if rank != self._rank]
        store = _store()
        try:
            known = {rank: store.check([_DOOR.format(rank=rank)]) for rank in others}
            doors = {rank: json.loads(store.get(_DOOR.format(rank=rank))) for rank in others if known[rank]}
        except RuntimeError:  # the rank that held the store has ended
            doors = {}
        with ThreadPoolExecutor(max_workers=32) as pool:
            asked = {rank: pool.submit(_asked, door, self._answers_s) for rank, door in doors.items()}
            found = {rank: answer.result() for rank, answer in asked.items()}
        return {rank: mine if rank == self._rank else found.get(rank) for rank in ranks}


def _asked(door: Sequence[Any], answers_s: float) -> Position | None:
    """Return what the rank at a door (address, port, secret) says, None where it says nothing in that time."""
    address, port, secret = door
    try:
        with socket.create_connection((address, port), timeout=answers_s) as connection:
            connection.sendall(secret.encode())
            with connection.makefile(encoding="utf-8") as answer:
                text = answer.readline()
        return Position.from_json(text) if text else None
    except OSError:
        return None


def _answer(listener: socket.socket, secret: str, main: int) -> None:
    """Say where the thread `main` is to everyone who knows the secret."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed
            return
        try:
            with connection:
                connection.settimeout(_PATIENCE_S)
                if hmac.compare_digest(connection.recv(len(secret), socket.MSG_WAITALL), secret.encode()):
                    frames = _outwards(sys._current_frames().get(main))
                    connection.sendall(f"{position_of_frames(frames).to_json()}\n".encode())
        except OSError:  # who asked has gone
            continue


def _stop(thread: threading.Thread, listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    listener.close()
    if thread is not threading.current_thread():
        thread.join(timeout=_PATIENCE_S)


def waited_s(error: BaseException) -> float | None:
    """Return after how many seconds gloo gave up, 0 where it does not say; None for another error."""
    found = _TIMED_OUT.search(str(error))
    if found is None:
        return None
    return int(found[1]) / 1000 if found[1] else 0.0


def timeout_error(
    positions: Mapping[int, Position | None], *, rank: int, waited_s: float, what: str
) -> CollectiveTimeoutError:
    """Return what a user is told. `rank` is the one that timed out, and `what` says what it was doing."""
    mine = positions[rank]
    assert mine is not None
    group = mine.group or tuple(positions)
    name = mine.call or "a collective"
    came = [
        other
        for other in group
        if (place := positions[other]) is not None and (place.call, place.group) == (mine.call, mine.group)
    ]
    silent = [other for other in group if positions[other] is None]
    duration = f" {waited_s:g} s" if waited_s else ""
    parts = [f"{ranks_in_words(came)} waited{duration} in {name} of {ranks_in_words(group)} ({what})"]
    for other in group:
        place = positions[other]
        if place is not None and other not in came:
            parts.append(f"rank {other} never entered it; it is {_described(place)}")
    if silent:
        parts.append(f"{ranks_in_words(silent)} never entered it, and {_silence(silent)}")
    if len(parts) == 1:
        parts.append("all of these ranks are in it, and the connection between them is slow or broken")
    return CollectiveTimeoutError(
        "; ".join(parts),
        hint="every rank must make the same calls with the same plan; where one is only slow, give runtime.init a "
        "longer timeout_s",
    )


def _described(place: Position) -> str:
    if place.call is None:
        return f"at {place.place}"
    return f"in {place.call} of {ranks_in_words(place.group)}, called at {place.place}"


def _silence(ranks: Sequence[int]) -> str:
    return "does not say where it is" if len(ranks) == 1 else "do not say where they are"


def position_of_traceback(traceback: TracebackType | None) -> Position:
    """Return where the rank was that raised an error with `traceback`."""
    frames: list[FrameType] = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return position_of_frames(frames[::-1])


def position_of_frames(frames: Sequence[FrameType]) -> Position:
    """Return where a thread with these frames is, innermost first."""
    own = [frame for frame in frames if not _is_library(frame)] or [*frames[:1]]
    place = "an unknown place"
    if own:
        code = own[0].f_code
        place = f"{code.co_name} in {Path(code.co_filename).name} line {own[0].f_lineno}"
    call, group = _call_of(frames)
    return Position(call=call, group=group, place=place)


def _call_of(frames: Sequence[FrameType]) -> tuple[str | None, tuple[int, ...]]:
    """Return the collective in which these frames are, with its ranks; None where they are in none."""
    for frame in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(_TORCH):
            return None, ()
        if file == f"{_TORCH}autograd/graph.py" and name == "_engine_run_backward":  # hooks of DDP are C++
            return _last_recorded() or (None, ())
        if file.startswith(f"{_TORCH}distributed/pipelining"):
            return "a send or receive over pp", _ranks_of(description="mesh_pp")
        if file.endswith("distributed_c10d.py") and name in ("send", "recv", "isend", "irecv"):  # not recorded
            return name, ()
        if file.startswith(f"{_TORCH}distributed"):
            return _last_recorded() or (name, ())
    return None, ()


def _last_recorded() -> tuple[str, tuple[int, ...]] | None:
    """Return the collective that this process began last, by torch's flight recorder; None where it records none."""
    from torch._C import _distributed_c10d

    dump: Any = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    entries = json.loads(dump(True, False)).get("entries") or []
    if not entries:
        return None
    last = max(entries, key=lambda entry: int(entry["record_id"]))
    name, description = last["process_group"]
    group = _ranks_of(name=name)
    axis = description.removeprefix("mesh_") if description.startswith("mesh_") else ""
    call = str(last["profiling_name"]).rpartition(":")[2]
    return f"{call} over {axis}" if axis else call, group


def _ranks_of(*, name: str = "", description: str = "") -> tuple[int, ...]:
    """Return the ranks of the group that torch calls so, none where there is no such group."""
    for group, known in dist.distributed_c10d._world.pg_names.items():
        if (name and known == name) or (description and group.group_desc == description):
            return tuple(dist.get_process_group_ranks(group))
    return ()


def default_timeout(device: torch.device) -> timedelta | None:
    """Return after what time collectives of the default group on `device` fail; None without gloo or NCCL there."""
    if backend_of(device) not in ("gloo", "nccl"):
        return None
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    timeout: timedelta = backend.options._timeout
    return timeout


def _outwards(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


_TORCH = f"{Path(torch.__file__).parent}/"
_LIBRARIES = (_TORCH, f"{Path(__file__).parents[1]}/", f"{sysconfig.get_paths()['stdlib']}/", "<")


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES)


def _store() -> Store:
    store: Store = dist.distributed_c10d._get_default_store()
    return store
