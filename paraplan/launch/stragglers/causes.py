"""Why a rank is late, in words: which part of its step is longer than its peers', and what its machine says to it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paraplan.launch.stragglers.host_state import MIN_RESENT_SEGMENTS, HostState
from paraplan.launch.stragglers.judge import Lateness, Row
from paraplan.launch.stragglers.steps import Step
from paraplan.units import ranks_in_words

# pauses strike anywhere: this much of the lateness is then in the backward pass and the optimizer. What a script waits
# for by itself is outside of both.
_MIN_SHARE_IN_PASSES = 0.25
_PARTS: Mapping[str, Callable[[Step], float]] = {
    "loader": lambda step: step.loader_s,
    "collection": lambda step: step.gc_s,
    "stall": lambda step: step.stalled_s,
    "compute": lambda step: step.compute_s,
}


@dataclass(frozen=True)
class Cause:
    """`part` is loader, collection, pause, wait, swap or compute; `text` how it is said."""

    part: str
    text: str


_TEXTS = {
    "loader": "in its data loader",
    "collection": "in Python's garbage collection",
    "compute": "in compute",
    "wait": "in what its script waits for outside of collectives (files, locks, sleeps)",
    "swap": "waiting for pages of memory from disk",
}


def find_cause(case: Lateness, rows: Sequence[Row], peers: Sequence[int]) -> Cause:
    """Return in which part of the steps `rows` the late ranks are later than their peers."""
    late = set(case.ranks)
    others = [rank for rank in peers if rank not in late]
    excess = {part: _excess_s(rows, case.ranks, others, read) for part, read in _PARTS.items()}
    part = max(excess, key=excess.__getitem__)
    if part != "stall":
        return Cause(part, _TEXTS[part])
    if _excess_s(rows, case.ranks, others, lambda step: step.major_faults) >= 1:
        return Cause("swap", _TEXTS["swap"])
    in_passes_s = _excess_s(rows, case.ranks, others, lambda step: step.backward_s + step.optimizer_s)
    if in_passes_s < _MIN_SHARE_IN_PASSES * excess[part] and not case.is_burst:
        return Cause("wait", _TEXTS["wait"])
    longest_s = max(row[rank].stalled_s for row in rows for rank in case.ranks)
    return Cause("pause", f"by pauses of its process, of up to {longest_s:.2f} s")


def _excess_s(rows: Sequence[Row], late: Sequence[int], others: Sequence[int], read: Callable[[Step], float]) -> float:
    """Return the mean of what the late ranks have more of than the median of the others."""
    return statistics.fmean(
        read(row[rank]) - statistics.median_low([read(row[other]) for other in others]) for row in rows for rank in late
    )


def describe(case: Lateness, cause: Cause | None, *, places: Mapping[int, str], states: Mapping[str, HostState]) -> str:
    """Return `rank 5 (gpu-b, GPU 1) is 31 % slower in compute since step 1,200 (CPU steal 9 %); it costs the job 14 %`.

    `places` name the host and the GPU of each rank, `states` are what the counters of each host grew by.
    """
    costs = f"it costs the job {_percent(case.cost)}"
    since = f"since step {case.since_step:,}"
    if case.kind == "jitter":
        return f"steps take longer by turns of the ranks {since}, no rank is slower than the others; {costs}"
    if case.kind == "link":
        hosts = sorted(states)
        resent = {host: int(state.resent) for host, state in states.items() if state.resent >= MIN_RESENT_SEGMENTS}
        again = ", ".join(f"{count:,} TCP segments sent again by {host}" for host, count in sorted(resent.items()))
        named = f"between {hosts[0]} and {hosts[1]}" if len(hosts) == 2 else "between the hosts"
        reason = f" ({again})" if again else ""
        return f"transfers {named} take {case.slower + 1:.1f} times as long {since}{reason}; {costs}"
    host = case.host or places.get(case.ranks[0], "").partition(",")[0]
    reasons = states[host].describe() if host in states else []
    reason = f" ({', '.join(reasons)})" if reasons else ""
    who = f"host {host} ({ranks_in_words(case.ranks)})" if case.kind == "host" else _named(case.ranks[0], places)
    where = f" {cause.text}" if cause is not None else ""
    return f"{who} is {_percent(case.slower)} slower{where} {since}{reason}; {costs}"


def name_of(case: Lateness, places: Mapping[int, str]) -> str:
    """Return what is late in a few words."""
    if case.kind in ("jitter", "link"):
        return {"jitter": "the ranks", "link": "the transfers"}[case.kind]
    return f"host {case.host}" if case.kind == "host" else _named(case.ranks[0], places)


def _named(rank: int, places: Mapping[int, str]) -> str:
    return f"rank {rank} ({places[rank]})" if places.get(rank) else f"rank {rank}"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
