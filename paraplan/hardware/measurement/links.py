"""Measuring links: which groups of GPUs, which messages, and what latency and bandwidth follow from the times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt
from statistics import median
from typing import Literal, get_args

from pydantic import Field

from paraplan.hardware.bus_bandwidth import GroupSpeed, RankGroup, bus_bandwidth, bus_factor
from paraplan.hardware.cluster import Cluster
from paraplan.hardware.link_speed import LinkSpeedTable
from paraplan.hardware.measurement.least_squares import non_negative_least_squares
from paraplan.hardware.profiles import Collective, MeasuredCollective
from paraplan.hardware.topology import NodeTopology
from paraplan.records import Record
from paraplan.units import KIB, MIB, format_bytes

MeasuredKind = Literal["send_recv", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
COLLECTIVES: tuple[MeasuredKind, ...] = get_args(MeasuredKind)
"""Collectives in the order of measurement. `send_recv` sends to the next rank and receives from the previous one."""

GPU_MESSAGE_BYTES = (4 * KIB, 64 * KIB, 1 * MIB, 8 * MIB, 64 * MIB, 256 * MIB)
CPU_MESSAGE_BYTES = (1 * KIB, 16 * KIB, 128 * KIB, 1 * MIB, 8 * MIB, 64 * MIB)

_FASTEST_OF_BEST = 2.0
"""No fit may promise more than this multiple of the best bandwidth seen: large messages were not long enough then."""
_LEAST_BYTES_FOR_BANDWIDTH = 512 * KIB
"""Times of shorter messages alone are those of latency: a bandwidth from them would be the message over the latency."""


class GpuGroup(Record):
    """GPUs that take part in one measurement, by their index in the node; `title` says what joins them."""

    title: str
    gpus: tuple[int, ...] = Field(min_length=2)


class MeasureRequest(Record):
    """Measurement by ranks: `groups` of ranks, one after the other, the messages, and the time for all of it."""

    device: Literal["cuda", "cpu"]
    groups: tuple[tuple[int, ...], ...]
    message_bytes: tuple[int, ...]
    max_seconds: float = Field(gt=0)

    @property
    def num_timings(self) -> int:
        """Number of timings if none is left out: each collective and message in each group."""
        return len(self.message_bytes) * sum(len(collectives_of(len(group))) for group in self.groups)


class RankEvent(Record):
    """Report of a rank: a time of one collective on one message, or why it was not measured.

    `group` is the position in the request. The time is that of the slowest rank, the median of several runs.
    """

    group: int
    collective: MeasuredKind
    num_bytes: int | None = None
    time_s: float | None = None
    skipped: str | None = None


class RankEnd(Record):
    """That a rank has ended, and how: its exit status, negative for a signal."""

    ended_rank: int
    exit_status: int


class MessageTime(Record):
    """The time of one message, and the bandwidth on the bus that follows from it."""

    num_bytes: int
    time_s: float
    bus_bandwidth_bytes_per_s: float


class LinkFit(Record):
    """time = latency + bus factor x (S + sqrt(S x ramp)) / bandwidth, the form in which `GroupSpeed` counts.

    `error` is the median relative error over the messages that were measured.
    """

    latency_s: float
    bus_bandwidth_bytes_per_s: float
    ramp_bytes: int
    error: float


class MeasuredLink(Record):
    """One collective on one group: the times, their fit, and what the data sheet promises (None if unknown)."""

    group: GpuGroup
    collective: Collective
    times: tuple[MessageTime, ...]
    fit: LinkFit
    expected: GroupSpeed | None

    @property
    def share_of_expected(self) -> float | None:
        """Measured bandwidth on the bus, as a share of what is expected of the largest message; None if unknown."""
        if self.expected is None:
            return None
        largest = self.times[-1]
        return self.expected.time_s(largest.num_bytes) / largest.time_s


class LinkReport(Record):
    """All that was measured on a machine. `notes` says what was left out and why."""

    backend: str
    links: tuple[MeasuredLink, ...]
    notes: tuple[str, ...] = ()
    source: str

    def to_measured(self) -> tuple[MeasuredCollective, ...]:
        """Return the fits in the form that a profile keeps. Of groups that count as the same, the slowest is kept."""
        kept: dict[tuple[str, int, str, float], MeasuredCollective] = {}
        for link in self.links:
            if link.expected is None:
                continue
            speed = link.expected
            key = (link.collective, speed.num_ranks, speed.kind, speed.payload_bytes_per_s)
            measured = MeasuredCollective(
                collective=link.collective,
                num_ranks=speed.num_ranks,
                link=speed.kind,
                latency_s=link.fit.latency_s,
                bus_bandwidth_bytes_per_s=link.fit.bus_bandwidth_bytes_per_s,
                ramp_bytes=link.fit.ramp_bytes,
                payload_bytes_per_s=speed.payload_bytes_per_s,
                source=self.source,
            )
            if key not in kept or kept[key].bus_bandwidth_bytes_per_s > measured.bus_bandwidth_bytes_per_s:
                kept[key] = measured
        return tuple(kept.values())


def collectives_of(num_ranks: int) -> tuple[MeasuredKind, ...]:
    """Return what is measured on a group of `num_ranks`: point to point on pairs alone."""
    return COLLECTIVES if num_ranks == 2 else COLLECTIVES[1:]


def groups_to_measure(node: NodeTopology, *, members: str = "GPUs") -> tuple[GpuGroup, ...]:
    """Return the groups of GPUs worth a measurement, largest first; titles call them `members`.

    All GPUs; each NVLink island; halves of the largest of those, down to four, as tensor parallel groups use them; the
    first pair of each type and number of links.
    """
    gpus = sorted(gpu.index for gpu in node.gpus)
    if len(gpus) < 2:
        return ()
    groups = {tuple(gpus): f"all {len(gpus)} {members}"}
    islands = node.nvlink_islands
    for island in islands:
        groups.setdefault(tuple(island), f"NVLink island {_names(island)}")
    whole = max(islands, key=len, default=gpus)
    size = len(whole) // 2
    while size >= 4:
        groups.setdefault(tuple(whole[:size]), f"{members} {_names(whole[:size])}")
        size //= 2
    seen: set[tuple[object, int | None] | None] = set()
    for pair in combinations(gpus, 2):
        link = node.link(*pair)
        kind = None if link is None else (link.link_type, link.nvlink_count)
        if kind not in seen:
            seen.add(kind)
            word = "unknown link" if link is None else f"{link.link_type}{link.nvlink_count or ''} pair"
            groups.setdefault(pair, f"{word} {_names(pair)}")
    return tuple(GpuGroup(title=title, gpus=group) for group, title in groups.items())


def fit_times(times: Sequence[MessageTime], *, collective: Collective, num_ranks: int) -> LinkFit:
    """Return latency, bandwidth and ramp that fit the times best, by least squares of the relative errors.

    All three are at least 0, and the bandwidth is at most twice the best that was seen. One time alone gives its own
    bandwidth and no latency. Raises ValueError for no times.
    """
    if not times:
        raise ValueError("no times to fit")
    factor = bus_factor(collective, num_ranks)
    per_byte_at_least = min(each.time_s / each.num_bytes for each in times)
    per_byte_at_least /= _FASTEST_OF_BEST if len(times) > 1 else 1.0
    columns = [[1.0, float(each.num_bytes), sqrt(each.num_bytes)] for each in times]
    rest = [max(0.0, 1 - per_byte_at_least * each.num_bytes / each.time_s) for each in times]
    weighted = [[value / each.time_s for value in row] for row, each in zip(columns, times, strict=True)]
    latency_s, more_per_byte, per_root = non_negative_least_squares(weighted, rest)
    per_byte = per_byte_at_least + more_per_byte
    ramp_bytes = round((per_root / per_byte) ** 2)
    errors = [
        abs((latency_s + per_byte * (each.num_bytes + sqrt(each.num_bytes * ramp_bytes))) / each.time_s - 1)
        for each in times
    ]
    return LinkFit(
        latency_s=latency_s,
        bus_bandwidth_bytes_per_s=factor / per_byte,
        ramp_bytes=ramp_bytes,
        error=median(errors),
    )


def report_links(
    events: Sequence[RankEvent],
    *,
    groups: Sequence[GpuGroup],
    cluster: Cluster | None,
    table: LinkSpeedTable,
    backend: str,
    source: str,
) -> LinkReport:
    """Return what the events of the ranks say of each group and collective, beside what `cluster` is expected to reach.

    Without a cluster (no profile describes the GPUs) nothing is expected.
    """
    links, notes = [], []
    for number, group in enumerate(groups):
        for collective in collectives_of(len(group.gpus)):
            mine = [event for event in events if (event.group, event.collective) == (number, collective)]
            notes += [f"{group.title}: {collective}: {event.skipped}" for event in mine if event.skipped]
            times = sorted(_times(mine, collective, len(group.gpus)), key=lambda each: each.num_bytes)
            if not times:
                continue
            if times[-1].num_bytes < _LEAST_BYTES_FOR_BANDWIDTH:
                longest = format_bytes(times[-1].num_bytes)
                notes.append(f"{group.title}: {collective}: no bandwidth, as no message above {longest} was timed")
                continue
            expected = _expected(cluster, group, collective, table) if cluster is not None else None
            fit = fit_times(times, collective=collective, num_ranks=len(group.gpus))
            links.append(
                MeasuredLink(group=group, collective=collective, times=tuple(times), fit=fit, expected=expected)
            )
    return LinkReport(backend=backend, links=tuple(links), notes=tuple(dict.fromkeys(notes)), source=source)


def _times(events: Sequence[RankEvent], collective: Collective, num_ranks: int) -> list[MessageTime]:
    factor = bus_factor(collective, num_ranks)
    return [
        MessageTime(
            num_bytes=event.num_bytes,
            time_s=event.time_s,
            bus_bandwidth_bytes_per_s=factor * event.num_bytes / event.time_s,
        )
        for event in events
        if event.num_bytes is not None and event.time_s is not None
    ]


def _expected(cluster: Cluster, group: GpuGroup, collective: Collective, table: LinkSpeedTable) -> GroupSpeed:
    return bus_bandwidth(cluster.replace(measured=()), RankGroup(gpus=group.gpus), collective, table)


def _names(gpus: Sequence[int]) -> str:
    return "-".join(str(gpu) for gpu in gpus)
