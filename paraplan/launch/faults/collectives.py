"""The collectives that ranks made last, as torch's flight recorder has them: in which each waits, and which timed out.

A rank that fails writes them itself (`bootstrap.note_collectives`), and so does one that is asked while it hangs. Where
NCCL's watchdog ends a process, torch writes them (ProcessGroupNCCL.cpp and FlightRecorder.hpp of torch 2.11 to 2.13).
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paraplan.launch.faults.failures import Cause, RankFailure
from paraplan.launch.ranks.bootstrap import CALLS_FILE, CALLS_REQUEST
from paraplan.launch.ranks.live import LiveRank
from paraplan.launch.ranks.stacks import Stack, describe_place
from paraplan.launch.torch_private import texts
from paraplan.units import ranks_in_words

DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables that torch reads, in this order, for the start of the path that NCCL's watchdog dumps to; it adds the
rank."""

DUMP_PREFIX = "flight_recorder_"
_MESH = "mesh_"  # with which torch's DeviceMesh begins the description of a group, before the axis
_POLL_S = 0.02

ANSWER_S = 3.0
"""How long ranks get to write where they stand, and then the collectives that they made last."""


@dataclass(frozen=True)
class Call:
    """One collective, or a send or receive. `number` counts those of its `group`, which torch names by a text.

    `axis` is the axis of the device mesh to which the group belongs, "" for none.
    """

    group: str
    number: int
    name: str
    is_done: bool
    is_point_to_point: bool = False
    axis: str = ""


@dataclass(frozen=True)
class RankCalls:
    """The last calls of one rank, oldest first, and the global ranks of each group that it is in."""

    calls: tuple[Call, ...]
    groups: Mapping[str, tuple[int, ...]]

    def waits_in(self, *, has_failed: bool) -> Call | None:
        """Return the oldest call not done, None for none; of a rank that failed in one, since done, the last."""
        waiting = next((call for call in self.calls if not call.is_done), None)
        return self.calls[-1] if waiting is None and has_failed and self.calls else waiting

    def last_number(self, call: Call) -> int:
        """Return the number of the last call like `call` in its group; 0 for none."""
        same = [one for one in self.calls if (one.group, one.is_point_to_point) == (call.group, call.is_point_to_point)]
        return max((one.number for one in same), default=0)


@dataclass(frozen=True)
class Whereabouts:
    """Where ranks stand, by global rank: their main threads, and the collectives that they made last, where known.

    `stopped` are those whose process a signal or a debugger has stopped, `ended` those that had ended well before.
    """

    stacks: Mapping[int, Stack] = field(default_factory=dict)
    calls: Mapping[int, RankCalls] = field(default_factory=dict)
    stopped: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()

    def describe(self) -> list[str]:
        """Return `rank 3 was in sleep (...), called from load (train.py:7)` for each place where ranks were."""
        return describe_stopped(self.stopped, "was" if len(self.stopped) == 1 else "were") + [
            f"{ranks_in_words(ranks)} {'was' if len(ranks) == 1 else 'were'} in {describe_place(stack)}"
            for stack, ranks in sorted(ranks_by_place(self.stacks), key=lambda place: len(place[1]))
        ]


@dataclass(frozen=True)
class StuckCall:
    """A call in which `waiting` ranks wait for `missing` ones, whose last call in that group is `last` (0: unknown).

    `others` are calls of another name that ranks make in its place.
    """

    call: Call
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    missing: Mapping[int, int]
    others: Mapping[int, str]

    def describe(self) -> str:
        """Return who waits and who is missing: `rank 0 in all_reduce number 7; rank 1 never entered it`."""
        lines = [f"{ranks_in_words(self.waiting)} in {describe_call(self.call, self.ranks)}"]
        lines += [f"rank {rank} calls {name} instead" for rank, name in sorted(self.others.items())[:3]]
        by_last: dict[int, list[int]] = {}
        for rank, last in self.missing.items():
            by_last.setdefault(last, []).append(rank)
        for last, ranks in sorted(by_last.items()):
            whose = "its" if len(ranks) == 1 else "their"
            after = f", {whose} last call in this group was number {last}" if last else ""
            lines.append(f"{ranks_in_words(ranks)} never entered it{after}")
        return "; ".join(lines)


def find_stuck_calls(by_rank: Mapping[int, RankCalls], *, failed: Iterable[int] = ()) -> list[StuckCall]:
    """Return the calls in which ranks wait, those that most wait in first. `failed` ranks waited until they failed."""
    failed = set(failed)
    waiting = {rank: calls.waits_in(has_failed=rank in failed) for rank, calls in by_rank.items()}
    by_call: dict[tuple[str, int, bool], dict[int, Call]] = {}
    for rank, one in waiting.items():
        if one is not None:
            by_call.setdefault((one.group, one.number, one.is_point_to_point), {})[rank] = one
    found = []
    for (group, number, is_point_to_point), here in sorted(by_call.items()):
        names = [call.name for call in here.values()]
        call = next(call for call in here.values() if call.name == max(names, key=names.count))
        ranks = next((by_rank[rank].groups[group] for rank in here if group in by_rank[rank].groups), ())
        others = {rank: other.name for rank, other in here.items() if other.name != call.name}
        behind = {rank: by_rank[rank].last_number(call) for rank in ranks if rank in by_rank and rank not in here}
        found.append(
            StuckCall(
                call=call,
                ranks=ranks,
                waiting=tuple(sorted(here.keys() - others.keys())),
                missing={} if is_point_to_point else {rank: last for rank, last in behind.items() if last < number},
                others={} if is_point_to_point else others,
            )
        )
    return sorted(found, key=lambda stuck: -len(stuck.waiting))


def read_calls(folder: Path) -> RankCalls | None:
    """Return what the rank with its error file in `folder`, or torch, has written there; None where nothing is."""
    for path in (folder / CALLS_FILE, *folder.glob(f"{DUMP_PREFIX}*")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError):
            with path.open("rb") as file:
                values = json.load(file) if path.name == CALLS_FILE else _PlainUnpickler(file).load()
            if "groups" not in values:  # torch's own dump
                values["groups"] = {name: json.loads(group["ranks"]) for name, group in values["pg_config"].items()}
            entries = sorted(values["entries"], key=lambda entry: int(entry["record_id"]))
            ranks = {name: tuple(map(int, members)) for name, members in values["groups"].items()}
            return RankCalls(tuple(map(_call, entries)), ranks)
    return None


def ask_for_calls(ranks: Iterable[LiveRank]) -> dict[int, RankCalls]:
    """Return the calls of the ranks that answer within `ANSWER_S`."""
    asked = {one.rank: one.folder for one in ranks if one.folder is not None and _ask(one.folder)}
    deadline = time.monotonic() + ANSWER_S
    while any(not (folder / CALLS_FILE).exists() for folder in asked.values()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    answers = {rank: read_calls(folder) for rank, folder in asked.items()}
    return {rank: calls for rank, calls in answers.items() if calls is not None}


def _ask(folder: Path) -> bool:
    with suppress(OSError):  # it has no such pipe, or nobody reads from it
        (folder / CALLS_FILE).unlink(missing_ok=True)
        os.close(os.open(folder / CALLS_REQUEST, os.O_WRONLY | os.O_NONBLOCK))
        return True
    return False


class _PlainUnpickler(pickle.Unpickler):
    """Reads the lists, dictionaries, texts and numbers of torch's dumps; refuses anything else, and runs no code."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"{module}.{name} in a dump of torch's flight recorder")


def _call(entry: Mapping[str, Any]) -> Call:
    backend, _, name = str(entry["profiling_name"]).partition(":")
    group, description = map(str, entry["process_group"])
    is_point_to_point = bool(entry["is_p2p"])
    # gloo marks what is over as retired and never as completed; NCCL retires what has timed out, too
    is_done = entry["state"] == "completed" or (backend == "gloo" and bool(entry["retired"]))
    return Call(
        group=group,
        number=int(entry["p2p_seq_id" if is_point_to_point else "collective_seq_id"]),
        name=name or backend,
        is_done=is_done,
        is_point_to_point=is_point_to_point,
        axis=description.removeprefix(_MESH) if description.startswith(_MESH) else "",
    )


@dataclass(frozen=True)
class TimedOut:
    """One rank's word that a collective has timed out. `number` counts the collectives of a group, `ranks` are its own.

    None, and no ranks, for unknown. `is_recorded` says that the flight recorder may know more.
    """

    name: str
    timeout_s: float
    number: int | None = None
    ranks: tuple[int, ...] = ()
    axis: str = ""
    is_recorded: bool = True


def describe_call(call: Call | TimedOut, ranks: Sequence[int]) -> str:
    """Return `all_reduce number 7 over dp of ranks 0-3`, without what is unknown; `ranks` are those of its group."""
    counted = f" number {call.number}" if call.number is not None else ""
    over = f" over {call.axis}" if call.axis else ""
    return f"{call.name}{counted}{over}" + (f" of {ranks_in_words(ranks)}" if ranks else "")


def find_timeout(failure: RankFailure) -> TimedOut | None:
    """Return the collective that a rank waited in until it timed out; None for another failure."""
    record = failure.record
    traceback = record.traceback if record else ""
    text = "\n".join([*failure.log_tail, record.message if record else "", traceback])
    nccl = texts.NCCL_TIMEOUT.search(text)
    if nccl is not None:
        return TimedOut(nccl["name"].lower(), int(nccl["timeout_ms"]) / 1000, int(nccl["number"]))
    gloo = texts.GLOO_TIMEOUT.search(text)
    if gloo is None:
        return None
    timeout_s = int(gloo["timeout_ms"]) / 1000
    raised = texts.GLOO_TIMEOUT.search(traceback)  # what was made of gloo's error comes after it
    for frame in reversed(list(texts.FRAME.finditer(traceback[: raised.start()] if raised is not None else traceback))):
        if texts.PIPELINING_FOLDER in frame["path"]:
            return TimedOut("a send or receive", timeout_s, axis="pp", is_recorded=False)
        if frame["path"].endswith(texts.COLLECTIVES_FILE) and frame["name"] != "wrapper":
            return TimedOut(frame["name"], timeout_s, is_recorded=frame["name"] not in texts.POINT_TO_POINT)
        if "/torch/" not in frame["path"]:
            break
    return TimedOut("a collective", timeout_s)


def describe_timeouts(failures: Sequence[RankFailure], calls: Mapping[int, RankCalls]) -> str | None:
    """Return `ranks 0-2 waited 600 s in all_reduce; rank 3 never entered it`, None where no collective timed out.

    `calls` are those that ranks made last, by global rank, of the ranks where they are known.
    """
    found = {failure.rank: find_timeout(failure) for failure in failures}
    waited: dict[TimedOut, list[int]] = {}
    for rank, timed_out in found.items():
        if timed_out is not None:
            waited.setdefault(_completed(timed_out, calls.get(rank)), []).append(rank)
    if not waited:
        return None
    unrecorded = {rank for rank, timed_out in found.items() if timed_out is not None and not timed_out.is_recorded}
    lost = {failure.rank for failure in failures if failure.cause is Cause.COMMUNICATION} - unrecorded
    stuck = next(iter(find_stuck_calls(calls, failed=lost)), None)
    if stuck is not None:
        for timed_out, ranks in waited.items():  # others lost the connection to one that gave up a moment before
            if (timed_out.name, timed_out.number) == (stuck.call.name, stuck.call.number):
                ranks[:] = sorted({*ranks, *stuck.waiting})
    parts = [
        f"{ranks_in_words(ranks)} waited {timed_out.timeout_s:g} s in {describe_call(timed_out, timed_out.ranks)}"
        for timed_out, ranks in sorted(waited.items(), key=lambda item: -len(item[1]))
    ]
    if stuck is not None:
        told = {rank for ranks in waited.values() for rank in ranks}
        called = dict.fromkeys(stuck.waiting, stuck.call.name) | dict(stuck.others)
        others = sorted((rank, name) for rank, name in called.items() if rank not in told)
        parts += [f"rank {rank} called {name} instead" for rank, name in others[:3]]
    stopped = {failure.rank for failure in failures if failure.cause is Cause.STOPPED}
    absent: dict[int, int] = dict.fromkeys(sorted(stopped), 0)
    if stuck is not None and stuck.ranks:
        absent = {rank: last for rank, last in absent.items() if rank in stuck.ranks} | dict(stuck.missing)
    for last in sorted(set(absent.values())):
        after = f", after number {last}" if last else ""
        parts.append(f"{ranks_in_words([rank for rank in absent if absent[rank] == last])} never entered it{after}")
    return "; ".join(parts)


def ranks_by_place(stacks: Mapping[int, Stack]) -> list[tuple[Stack, list[int]]]:
    """Return the places where ranks stand, with the ranks at each."""
    places: dict[Stack, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        places.setdefault(stack, []).append(rank)
    return list(places.items())


def describe_stopped(ranks: Sequence[int], verb: str) -> list[str]:
    """Return `rank 2 is stopped, by SIGSTOP or a debugger`; none where no rank is."""
    return [f"{ranks_in_words(ranks)} {verb} stopped, by SIGSTOP or a debugger"] if ranks else []


def _completed(timed_out: TimedOut, calls: RankCalls | None) -> TimedOut:
    """Return what has timed out with what the flight recorder knows of it."""
    call = calls.waits_in(has_failed=True) if calls is not None and timed_out.is_recorded else None
    if calls is None or call is None or (timed_out.number is not None and timed_out.number != call.number):
        return timed_out
    ranks = calls.groups.get(call.group, ())
    return replace(timed_out, name=call.name, number=call.number, axis=call.axis, ranks=ranks)
