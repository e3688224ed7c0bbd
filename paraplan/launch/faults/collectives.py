"""Collectives that timed out: which ranks waited in which one, and which never entered it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paraplan.launch.faults.calls import RankCalls, describe_call, find_stuck_calls
from paraplan.launch.faults.failures import Cause, RankFailure
from paraplan.launch.ranks.stacks import Stack, describe_place
from paraplan.launch.torch_private.texts import (
    COLLECTIVES_FILE,
    FRAME,
    GLOO_TIMEOUT,
    NCCL_TIMEOUT,
    PIPELINING_FOLDER,
    POINT_TO_POINT,
)
from paraplan.units import ranks_in_words


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

    def describe(self) -> str:
        """Return `all_reduce number 7 over dp of ranks 0-3`."""
        return describe_call(self.name, number=self.number, axis=self.axis, ranks=self.ranks)


def find_timeout(failure: RankFailure) -> TimedOut | None:
    """Return the collective that a rank waited in until it timed out; None for another failure."""
    record = failure.record
    traceback = record.traceback if record else ""
    text = "\n".join([*failure.log_tail, record.message if record else "", traceback])
    nccl = NCCL_TIMEOUT.search(text)
    if nccl is not None:
        return TimedOut(nccl["name"].lower(), int(nccl["timeout_ms"]) / 1000, int(nccl["number"]))
    gloo = GLOO_TIMEOUT.search(text)
    if gloo is None:
        return None
    timeout_s = int(gloo["timeout_ms"]) / 1000
    raised = GLOO_TIMEOUT.search(traceback)  # what was made of gloo's error comes after it
    for frame in reversed(list(FRAME.finditer(traceback[: raised.start()] if raised is not None else traceback))):
        if PIPELINING_FOLDER in frame["path"]:
            return TimedOut("a send or receive", timeout_s, axis="pp", is_recorded=False)
        if frame["path"].endswith(COLLECTIVES_FILE) and frame["name"] != "wrapper":
            return TimedOut(frame["name"], timeout_s, is_recorded=frame["name"] not in POINT_TO_POINT)
        if "/torch/" not in frame["path"]:
            break
    return TimedOut("a collective", timeout_s)


def describe_timeouts(failures: Sequence[RankFailure], calls: Mapping[int, RankCalls]) -> str | None:
    """Return `ranks 0-2 waited 600 s in all_reduce; rank 3 never entered it`, None where no collective timed out.

    `calls` are those that ranks made last, by global rank, of the ranks where they are known.
    """
    found = {failure.global_rank: find_timeout(failure) for failure in failures}
    waited: dict[TimedOut, list[int]] = {}
    for rank, timed_out in found.items():
        if timed_out is not None:
            waited.setdefault(_completed(timed_out, calls.get(rank)), []).append(rank)
    if not waited:
        return None
    unrecorded = {rank for rank, timed_out in found.items() if timed_out is not None and not timed_out.is_recorded}
    lost = {failure.global_rank for failure in failures if failure.cause is Cause.COMMUNICATION} - unrecorded
    stuck = next(iter(find_stuck_calls(calls, failed=lost)), None)
    if stuck is not None:
        for timed_out, ranks in waited.items():  # others lost the connection to one that gave up a moment before
            if (timed_out.name, timed_out.number) == (stuck.call.name, stuck.call.number):
                ranks[:] = sorted({*ranks, *stuck.waiting})
    parts = [
        f"{ranks_in_words(ranks)} waited {timed_out.timeout_s:g} s in {timed_out.describe()}"
        for timed_out, ranks in sorted(waited.items(), key=lambda item: -len(item[1]))
    ]
    if stuck is not None:
        told = {rank for ranks in waited.values() for rank in ranks}
        called = dict.fromkeys(stuck.waiting, stuck.call.name) | dict(stuck.others)
        others = sorted((rank, name) for rank, name in called.items() if rank not in told)
        parts += [f"rank {rank} called {name} instead" for rank, name in others[:3]]
    stopped = {failure.global_rank for failure in failures if failure.cause is Cause.STOPPED}
    absent: dict[int, int] = dict.fromkeys(sorted(stopped), 0)
    if stuck is not None and stuck.ranks:
        absent = {rank: last for rank, last in absent.items() if rank in stuck.ranks} | dict(stuck.missing)
    for last in sorted(set(absent.values())):
        after = f", after number {last}" if last else ""
        parts.append(f"{ranks_in_words([rank for rank in absent if absent[rank] == last])} never entered it{after}")
    return "; ".join(parts)


def describe_places(stacks: Mapping[int, Stack], stopped: Sequence[int] = ()) -> list[str]:
    """Return `rank 3 was in sleep (...), called from load (train.py:7)` for each place where ranks were.

    `stopped` are ranks whose process a signal or a debugger had stopped.
    """
    places: dict[Stack, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        places.setdefault(stack, []).append(rank)
    return describe_stopped(stopped, "was" if len(stopped) == 1 else "were") + [
        f"{ranks_in_words(ranks)} {'was' if len(ranks) == 1 else 'were'} in {describe_place(stack)}"
        for stack, ranks in sorted(places.items(), key=lambda place: len(place[1]))
    ]


def describe_stopped(ranks: Sequence[int], verb: str) -> list[str]:
    """Return `rank 2 is stopped, by SIGSTOP or a debugger`; none where no rank is."""
    return [f"{ranks_in_words(ranks)} {verb} stopped, by SIGSTOP or a debugger"] if ranks else []


def _completed(timed_out: TimedOut, calls: RankCalls | None) -> TimedOut:
    """Return what has timed out with what the flight recorder knows of it."""
    call = calls.waits_in(has_failed=True) if calls is not None and timed_out.is_recorded else None
    if calls is None or call is None or (timed_out.number is not None and timed_out.number != call.number):
        return timed_out
    return replace(
        timed_out, name=call.name, number=call.number, axis=call.axis, ranks=calls.groups.get(call.group, ())
    )
