"""Collectives that timed out: which ranks waited in which one, and which never came, from what the ranks have said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paraplan.launch.faults.calls import RankCalls, find_stuck_calls
from paraplan.launch.faults.failures import Cause, RankFailure
from paraplan.launch.ranks.stacks import Stack, describe_place
from paraplan.launch.torch_private.texts import COLLECTIVE_FRAME, GLOO_TIMEOUT, NCCL_TIMEOUT
from paraplan.units import ranks_in_words


@dataclass(frozen=True)
class TimedOut:
    """One rank's word that a collective has timed out. `number` counts the collectives of a group, `ranks` are its own.

    None, and no ranks, for unknown.
    """

    name: str
    timeout_s: float
    number: int | None = None
    ranks: tuple[int, ...] = ()

    def describe(self) -> str:
        """Return `all_reduce number 7 of ranks 0-3`."""
        number = f" number {self.number}" if self.number is not None else ""
        return f"{self.name}{number}" + (f" of {ranks_in_words(self.ranks)}" if self.ranks else "")


def find_timeout(failure: RankFailure) -> TimedOut | None:
    """Return the collective that a rank waited in until it timed out; None for another failure."""
    record = failure.record
    text = "\n".join([*failure.log_tail, record.message if record else "", record.traceback if record else ""])
    nccl = NCCL_TIMEOUT.search(text)
    if nccl is not None:
        return TimedOut(nccl["name"].lower(), int(nccl["timeout_ms"]) / 1000, int(nccl["number"]))
    gloo = GLOO_TIMEOUT.search(text)
    if gloo is None:
        return None
    calls = [name for name in COLLECTIVE_FRAME.findall(text) if name != "wrapper"]
    return TimedOut(calls[-1] if calls else "a collective", int(gloo["timeout_ms"]) / 1000)


def describe_timeouts(failures: Sequence[RankFailure], calls: Mapping[int, RankCalls]) -> str | None:
    """Return `ranks 0-2 waited 600 s in all_reduce; rank 3 never came to it`, None where no collective timed out.

    `calls` are those that ranks made last, by global rank, of the ranks where they are known.
    """
    waited: dict[TimedOut, list[int]] = {}
    for failure in failures:
        timed_out = find_timeout(failure)
        if timed_out is not None:
            known = _completed(timed_out, calls.get(failure.global_rank))
            waited.setdefault(known, []).append(failure.global_rank)
    if not waited:
        return None
    lost = [failure.global_rank for failure in failures if failure.cause is Cause.COMMUNICATION]
    stuck = next(iter(find_stuck_calls(calls, failed=lost)), None)
    if stuck is not None:
        for timed_out, ranks in waited.items():  # others lost the connection to one that gave up a moment before
            if (timed_out.name, timed_out.number) == (stuck.call.name, stuck.call.number):
                ranks[:] = sorted({*ranks, *stuck.waiting})
    parts = [
        f"{ranks_in_words(ranks)} waited {timed_out.timeout_s:g} s in {timed_out.describe()}"
        for timed_out, ranks in sorted(waited.items(), key=lambda item: -len(item[1]))
    ]
    stopped = {failure.global_rank for failure in failures if failure.cause is Cause.STOPPED}
    absent: dict[int, int] = dict.fromkeys(sorted(stopped), 0)
    if stuck is not None and stuck.ranks:
        absent = {rank: last for rank, last in absent.items() if rank in stuck.ranks} | dict(stuck.missing)
    for last in sorted(set(absent.values())):
        after = f", after number {last}" if last else ""
        parts.append(f"{ranks_in_words([rank for rank in absent if absent[rank] == last])} never came to it{after}")
    return "; ".join(parts)


def describe_places(stacks: Mapping[int, Stack]) -> list[str]:
    """Return `rank 3 was in sleep (...), called from load (train.py:7)` for each place where ranks were."""
    places: dict[Stack, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        places.setdefault(stack, []).append(rank)
    return [
        f"{ranks_in_words(ranks)} {'was' if len(ranks) == 1 else 'were'} in {describe_place(stack)}"
        for stack, ranks in sorted(places.items(), key=lambda place: len(place[1]))
    ]


def _completed(timed_out: TimedOut, calls: RankCalls | None) -> TimedOut:
    """Return what has timed out with what the flight recorder knows of it."""
    call = calls.waits_in(has_failed=True) if calls is not None else None
    if calls is None or call is None or (timed_out.number is not None and timed_out.number != call.number):
        return timed_out
    return replace(timed_out, name=call.name, number=call.number, ranks=calls.groups.get(call.group, ()))
