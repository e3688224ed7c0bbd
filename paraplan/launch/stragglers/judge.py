"""Which rank is slower than its peers, by how much, since when, and what it costs: from the steps of all ranks.

What is compared is the time that a rank needed by itself: without waits for others, and without the time in which
other processes had its core, so that a busy machine is not taken for a slow rank. In each step a rank's lateness is
that time less the lower median of all peers. Medians over a window and shares of steps decide, not means: one long
step, of a checkpoint or a compilation, names nobody.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paraplan.launch.stragglers.steps import Step

Row = Mapping[int, Step]
"""One step of all ranks, by global rank."""

_WINDOW = 15  # steps over which a rank must be late: with the time of a look this says so within 30
# a window is no shorter than this: what shares a core or a cache with a rank stays for some tenths of a second
_WINDOW_S = 0.7
_MAX_WINDOW = 200

_BURST_WINDOW = 30  # steps over which pauses are counted, which do not strike every step
_KEPT = 600
_WARM_STEPS = 4  # the first steps allocate and meet their peers
# a rank is late by this share of its peers' own time. 60 clean runs on 2 busy cores stayed below 0.13 where the run
# queue took less than a tenth of the time.
_MIN_SLOWER = 0.18
# a rank is late by this share of its peers' CPU time where ranks wait for cores: those that share cores and caches with
# other programs differed by up to 0.28 over 15 steps (load 14 on 2 cores)
_MIN_SLOWER_CONTENDED = 0.38
_FULL_CONTENTION = 0.5  # waiting for a core, as a share of running, from which on that holds; below it, in proportion
_MIN_COST = 0.05  # the least share of a step that lateness must cost the job to be worth a line
_MIN_LATE_STEPS = 0.9  # the share of steps in which a slow rank is late by at least half of its median lateness
_EASE = 0.6  # a rank that was named is late until it is below this share of what named it: a case does not flicker
_MEMORY_STEPS = 4  # twice as many steps without lateness are a new begin
_BURST = 0.3  # a step is struck where one rank is late by this share of what its peers need
_MIN_BURST_COST = 0.08
_MIN_BURST_SHARE = 0.85  # the share of all strikes, in seconds, that one rank has who is to be named for them
_MAX_CHANCE = 0.02  # the chance with which strikes that fall on any rank would have fallen on one so often
# the largest such chance where no other rank is struck: five of two ranks. Pauses that strike inside of a collective
# are not seen.
_MAX_CHANCE_ALONE = 0.0625
# the largest chance with which a rank is suspected: three ranks and three strikes, or two ranks and four
_MAX_CHANCE_SUSPECTED = 0.13
_MIN_JITTER_COST = 0.13
_MIN_JITTER_STRIKES = 8
_MAX_JITTER_SHARE = 0.75
# the share of strikes after which the next falls on another rank: two ranks, one after the other, are no jitter
_MIN_JITTER_TURNS = 0.25
_MIN_TRANSFER_RATIO = 1.8
_MIN_TRANSFER_COST = 0.12
_MIN_BASELINE = 15


@dataclass(frozen=True)
class Lateness:
    """One lateness: `ranks` of `host` ("" for one rank, or none: a link, jitter), since which step, and its cost.

    `slower` is the lateness as a share of the peers' own time (of the transfer's time before for a link), `cost` as a
    share of the step. `kind` is rank, host, link or jitter. What is not sure is a suspicion, and not yet said.
    """

    kind: str
    ranks: tuple[int, ...]
    since_step: int
    slower: float
    cost: float
    host: str = ""
    is_burst: bool = False
    is_sure: bool = True

    @property
    def subject(self) -> tuple[str, tuple[int, ...]]:
        """Return its subject: two of one subject are one case."""
        return self.kind, self.ranks


class Judge:
    """Takes the steps of all ranks and says who is late.

    `hosts` has the host of each rank, `peers` groups of ranks that do the same work: those of a pipeline stage, or all.
    """

    def __init__(self, hosts: Mapping[int, str], peers: Sequence[Sequence[int]] = ()) -> None:
        self._hosts = dict(hosts)
        self._peers = [tuple(group) for group in peers or [tuple(hosts)] if len(group) > 1]
        self._open: dict[int, dict[int, Step]] = {}
        self.rows: deque[Row] = deque(maxlen=_KEPT)
        self._baseline_s: list[float] = []
        self._typical_s: dict[int, float] = {}
        self._explained_until = 0  # steps up to here were late, or not, because of what has been found
        self._by_turns_until = 0  # up to here strikes fell on one rank after the other

    def add(self, rank: int, steps: Sequence[Step]) -> None:
        """Take new steps of a rank, oldest first."""
        for step in steps:
            if step.step <= _WARM_STEPS or rank not in self._hosts:
                continue
            row = self._open.setdefault(step.step, {})
            row[rank] = step
            if len(row) == len(self._hosts):
                self.rows.append(self._open.pop(step.step))
                if len(self._baseline_s) < _MIN_BASELINE:
                    self._baseline_s.append(transfer_s(row))
        if len(self._open) > 4 * _KEPT:  # a rank that steps less often than the others, or has ended
            for number in sorted(self._open)[: -2 * _KEPT]:
                del self._open[number]

    def judge(self, known: Collection[int] = ()) -> list[Lateness]:
        """Return what is late in the last steps; none before there are enough.

        Ranks that are `known` to be late stay so until they are clearly faster.
        """
        self._typical_s = {}
        rows = self._window()
        if not rows:
            return []
        found = [late for group in self._peers for late in self._late_ranks(rows, group, known)]
        if found:
            self._explained_until = _number(rows[-1])
        else:
            longer = [row for row in self.rows if _number(row) > self._explained_until]
            longer = longer[-max(_BURST_WINDOW, len(rows)) :]
            found = [late for group in self._peers for late in self._struck(longer, group) if len(longer) > 1]
            if any(late.kind == "jitter" for late in found):
                self._by_turns_until = _number(longer[-1])
        return self._by_host(found) or self._slow_link(rows)

    def _window(self) -> list[Row]:
        """Return the steps that are looked at; none where there are too few."""
        rows = list(self.rows)
        if len(rows) < _WINDOW:
            return []
        stride = (_number(rows[-1]) - _number(rows[-_WINDOW])) / (_WINDOW - 1)  # of short steps not all are noted
        period_s = stride * statistics.median(next(iter(row.values())).period_s for row in rows[-_WINDOW:])
        needed = min(_MAX_WINDOW, max(_WINDOW, math.ceil(_WINDOW_S / max(1e-6, period_s))))
        return rows[-needed:] if len(rows) >= needed else []

    def _late_ranks(self, rows: Sequence[Row], group: Sequence[int], known: Collection[int]) -> list[Lateness]:
        base = [_base_s(row, group) for row in rows]
        usual_s, contention = statistics.median(base), min(1.0, _contention(rows, group) / _FULL_CONTENTION)
        found = []
        for rank in group:
            late = [row[rank].own_s - base_s for row, base_s in zip(rows, base, strict=True)]
            typical_s = statistics.median(late)
            cost = typical_s / statistics.median(_step_s(row, group) for row in rows)
            share_late = sum(one >= typical_s / 2 for one in late) / len(rows)
            ease = _EASE if rank in known else 1.0
            in_compute = _in_compute(rows, group, rank, typical_s)
            needed = _MIN_SLOWER + (_MIN_SLOWER_CONTENDED - _MIN_SLOWER) * contention * in_compute
            self._typical_s[rank] = typical_s
            if (
                typical_s >= ease * needed * usual_s
                and cost >= ease * _MIN_COST
                and share_late >= ease * _MIN_LATE_STEPS
            ):
                since = self._since(rank, group, typical_s)
                found.append(Lateness("rank", (rank,), since, slower=typical_s / usual_s, cost=cost))
        return found

    def _since(self, rank: int, group: Sequence[int], late_s: float) -> int:
        """Return the step after which the sum of (lateness - half of today's) stayed above 0: CUSUM (Page 1954)."""
        total_s, since = 0.0, self.rows[0][rank].step
        for row in self.rows:
            total_s += min(row[rank].own_s - _base_s(row, group), 2 * late_s) - late_s / 2
            total_s = min(total_s, _MEMORY_STEPS * late_s)
            if total_s <= 0:
                total_s, since = 0.0, row[rank].step + 1
        return since

    def _struck(self, rows: Sequence[Row], group: Sequence[int]) -> list[Lateness]:
        """Return who is late now and then, or that all are by turns."""
        usual_s = statistics.median(_base_s(row, group) for row in rows)
        steps_s = sum(_step_s(row, group) for row in rows)
        # Of strikes that fall by turns a good many fall on one rank by chance: these speak of no rank.
        since_turns = [row for row in rows if _number(row) > self._by_turns_until]
        strikes: dict[int, list[tuple[int, float]]] = {rank: [] for rank in group}
        for row in since_turns:
            base_s = max(usual_s, _base_s(row, group))
            for rank in group:
                late_s = row[rank].own_s - base_s
                if late_s >= _BURST * usual_s:
                    strikes[rank].append((row[rank].step, late_s))
        lost_s = {rank: sum(late_s for _, late_s in found) for rank, found in strikes.items()}
        whole_s = sum(lost_s.values())
        worst = max(group, key=lost_s.__getitem__)
        cost, slower = lost_s[worst] / steps_s, lost_s[worst] / len(rows) / usual_s
        num_strikes = sum(map(len, strikes.values()))
        chance = _chance(len(strikes[worst]), num_strikes, len(group))
        is_one = lost_s[worst] >= _MIN_BURST_SHARE * whole_s and cost >= _MIN_BURST_COST
        if is_one and chance <= _MAX_CHANCE_SUSPECTED:
            since = strikes[worst][0][0]
            is_burst = len(strikes[worst]) < _MIN_LATE_STEPS * sum(_number(row) >= since for row in rows)
            is_sure = chance <= (_MAX_CHANCE_ALONE if len(strikes[worst]) == num_strikes else _MAX_CHANCE)
            return [Lateness("rank", (worst,), since, slower, cost, is_burst=is_burst, is_sure=is_sure)]
        return self._jitter(rows, group, usual_s, steps_s)

    def _jitter(self, rows: Sequence[Row], group: Sequence[int], usual_s: float, steps_s: float) -> list[Lateness]:
        """Return that one rank after the other is late by itself, in no order."""
        struck: list[tuple[int, int, float]] = []
        for row in rows:
            *_, (second_s, _), (first_s, rank) = sorted((row[rank].own_s, rank) for rank in group)
            if first_s - max(second_s, usual_s) >= _BURST * usual_s:
                struck.append((_number(row), rank, first_s - _base_s(row, group)))
        whole_s = sum(late_s for _, _, late_s in struck)
        turns = sum(before[1] != after[1] for before, after in pairwise(struck))
        most_s = max((sum(late_s for _, one, late_s in struck if one == rank) for rank in group), default=0.0)
        if (
            whole_s / steps_s < _MIN_JITTER_COST
            or len(struck) < _MIN_JITTER_STRIKES
            or turns < _MIN_JITTER_TURNS * len(struck)
            or most_s > _MAX_JITTER_SHARE * whole_s
        ):
            return []
        slower = whole_s / len(rows) / usual_s
        return [Lateness("jitter", (), struck[0][0], slower=slower, cost=whole_s / steps_s)]

    def _by_host(self, found: list[Lateness]) -> list[Lateness]:
        """Return one case for the host all of whose ranks are late, where no other rank is."""
        late = {rank for case in found for rank in case.ranks}
        hosts = {self._hosts[rank] for rank in late}
        if len(hosts) != 1 or len(set(self._hosts.values())) == 1:
            return found
        host = hosts.pop()
        ranks = tuple(sorted(rank for rank, name in self._hosts.items() if name == host))
        least_s = max(self._typical_s.get(rank, 0.0) for rank in late) / 2
        if len(ranks) == 1 or any(self._typical_s.get(rank, 0.0) < least_s for rank in ranks):
            return found
        worst = max(found, key=lambda case: case.cost)
        since = min(case.since_step for case in found)
        is_sure = any(case.is_sure for case in found)
        return [Lateness("host", ranks, since, worst.slower, worst.cost, host, worst.is_burst, is_sure)]

    def _slow_link(self, rows: Sequence[Row]) -> list[Lateness]:
        """Return that transfers between hosts take longer than they did, where no rank is late."""
        if len(set(self._hosts.values())) == 1 or len(self._baseline_s) < _MIN_BASELINE:
            return []
        before_s = statistics.median(self._baseline_s)
        now_s = sorted(map(transfer_s, rows))[len(rows) // 4]  # most steps take longer
        cost = (now_s - before_s) / statistics.median(_step_s(row, list(row)) for row in rows)
        if now_s < _MIN_TRANSFER_RATIO * before_s or cost < _MIN_TRANSFER_COST:
            return []
        since = rows[0][min(rows[0])].step
        for row in reversed(self.rows):
            if transfer_s(row) < (now_s + before_s) / 2:
                since = row[min(row)].step + 1
                break
        return [Lateness("link", (), since, slower=now_s / before_s - 1, cost=cost)]


def transfer_s(row: Row) -> float:
    """Return the time in collectives of the rank that waited least: it came last, and waited for the transfer alone."""
    return min(step.wait_s for step in row.values())


def _number(row: Row) -> int:
    return next(iter(row.values())).step


def _base_s(row: Row, group: Sequence[int]) -> float:
    return statistics.median_low([row[rank].own_s for rank in group])


def _step_s(row: Row, group: Sequence[int]) -> float:
    """Return how long the step would take without other programs on the cores: the slowest rank and the transfer."""
    return max(1e-6, max(row[rank].own_s for rank in group) + transfer_s(row))


def _in_compute(rows: Sequence[Row], group: Sequence[int], rank: int, late_s: float) -> float:
    """Return the share of a rank's lateness that is CPU time: that alone differs between ranks that share cores."""
    more_s = statistics.median(
        row[rank].compute_s - statistics.median_low([row[other].compute_s for other in group]) for row in rows
    )
    return max(0.0, min(1.0, more_s / late_s)) if late_s > 0 else 1.0


def _chance(num_most: int, num_all: int, num_ranks: int) -> float:
    """Return the chance that one of the ranks has so many of all strikes where each strikes any rank (binomial)."""
    share = 1 / num_ranks
    tail = sum(
        math.comb(num_all, count) * share**count * (1 - share) ** (num_all - count)
        for count in range(num_most, num_all + 1)
    )
    return min(1.0, num_ranks * tail)


def _contention(rows: Sequence[Row], group: Sequence[int]) -> float:
    """Return how long ranks waited for a core, as a share of the time that they ran."""
    queue_s = sum(row[rank].queue_s for row in rows for rank in group)
    return queue_s / max(1e-6, sum(row[rank].own_s for row in rows for rank in group))
