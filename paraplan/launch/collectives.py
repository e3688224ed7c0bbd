"""Collectives that timed out: which ranks waited in which one, and which never came, from what the ranks have said."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paraplan.launch.failures import WATCHDOG, Cause, RankFailure

_NCCL = re.compile(
    WATCHDOG + r": WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<name>\w+)"
    r".*?Timeout\(ms\)=(?P<timeout_ms>\d+)",
    re.DOTALL,
)
_GLOO = re.compile(r"Timed out waiting (?P<timeout_ms>\d+)\s?ms for (?:recv|send) operation", re.IGNORECASE)
"""What gloo raises on a rank that waited (transport/tcp/unbound_buffer.cc)."""

_CALL = re.compile(r'File "[^"]*distributed_c10d\.py", line \d+, in (\w+)')


@dataclass(frozen=True)
class TimedOut:
    """One rank's word that a collective has timed out. `number` counts NCCL's collectives of a group."""

    name: str
    timeout_s: float
    number: int | None = None


def find_timeout(failure: RankFailure) -> TimedOut | None:
    """Return the collective that a rank waited in until it timed out; None for another failure."""
    record = failure.record
    text = "\n".join([*failure.log_tail, record.message if record else "", record.traceback if record else ""])
    nccl = _NCCL.search(text)
    if nccl is not None:
        return TimedOut(nccl["name"].lower(), int(nccl["timeout_ms"]) / 1000, int(nccl["number"]))
    gloo = _GLOO.search(text)
    if gloo is None:
        return None
    calls = [name for name in _CALL.findall(text) if name != "wrapper"]
    return TimedOut(calls[-1] if calls else "a collective", int(gloo["timeout_ms"]) / 1000)


def describe_timeouts(failures: Sequence[RankFailure], ranks_in_words: Callable[[list[int]], str]) -> str | None:
    """Return `ranks 0-2 waited 600 s in all_reduce; rank 3 never came`, None where no collective timed out."""
    waited: dict[TimedOut, list[int]] = {}
    for failure in failures:
        timed_out = find_timeout(failure)
        if timed_out is not None:
            waited.setdefault(timed_out, []).append(failure.global_rank)
    if not waited:
        return None
    parts = []
    for timed_out, ranks in sorted(waited.items(), key=lambda item: -len(item[1])):
        number = f" number {timed_out.number}" if timed_out.number is not None else ""
        parts.append(f"{ranks_in_words(ranks)} waited {timed_out.timeout_s:g} s in {timed_out.name}{number}")
    absent = [failure.global_rank for failure in failures if failure.cause is Cause.STOPPED]
    if absent:
        parts.append(f"{ranks_in_words(absent)} never came to it")
    return "; ".join(parts)
