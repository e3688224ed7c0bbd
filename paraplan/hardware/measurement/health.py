"""Whether machines are fit for a job: what each rank, link and node reached, set against the others and the profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median_high

from pydantic import Field

from paraplan.records import Record
from paraplan.units import format_bandwidth, format_bytes, format_flops

_GPU_MATMUL, _CPU_MATMUL = 0.9, 0.7
"""Share of the median's rate below which a rank is slow. 10 % for GPUs, as Megatron-LM's check of nodes has it (pull
request 4662); CPU processes share cores with whatever else runs."""

_GPU_MEMORY, _CPU_MEMORY = 0.9, 0.5
_LINK, _CPU_LINK = 0.5, 0.2
"""Share of the median of like links below which a link is slow; of CPU ranks of a host, whose cores others use too."""

_RATED = 0.1
"""Share of what a network card is rated for below which a link between two hosts is slow."""

_PEAK = 0.4
"""Share of the data sheet's peak below which a GPU's matmul is slow, whatever the others reach: large ones reach 0.6 to
0.75 (the calibrations under profiles/)."""

_DISK, _MEMORY = 0.25, 0.5


class RankHealth(Record):
    """Speeds that one rank reached by itself, while all others did the same."""

    rank: int
    host: str
    device: str
    """`GPU 1`, or `CPU`."""
    kind: str = ""
    """The GPU's name, or the processor's: what is compared with each other."""
    matmul_flops_per_s: float
    memory_bytes_per_s: float
    peak_flops_per_s: float | None = None
    """The data sheet's, in the precision of the matmul."""


class PairHealth(Record):
    """A message from one rank to another: its best bandwidth, and whether it arrived as it was sent."""

    sender: int
    receiver: int
    bytes_per_s: float
    is_right: bool = True


class GroupHealth(Record):
    """An all-reduce over the ranks of a host, or over all; bus bandwidth as nccl-tests counts it."""

    name: str
    ranks: tuple[int, ...]
    bus_bytes_per_s: float


class NodeHealth(Record):
    """Resources of a host for its ranks; None for unknown."""

    host: str
    disk_bytes_per_s: float | None = None
    """Writing to the folder of the run, to the disk and not to the cache."""
    memory_available_bytes: int | None = None
    network_bytes_per_s: float | None = None
    """Rated speed of the interface towards the other hosts."""


class HealthFinding(Record):
    """Something that is slower or less than it should be. `hosts` are to be left out where the job can do without."""

    text: str
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class HealthReport(Record):
    """All that was measured, and what was found in it."""

    ranks: tuple[RankHealth, ...]
    pairs: tuple[PairHealth, ...] = ()
    groups: tuple[GroupHealth, ...] = ()
    nodes: tuple[NodeHealth, ...] = ()
    seconds: float = Field(default=0.0, ge=0)
    findings: tuple[HealthFinding, ...] = ()

    @property
    def bad_hosts(self) -> tuple[str, ...]:
        """The hosts that findings name alone."""
        return tuple(dict.fromkeys(host for finding in self.findings for host in finding.hosts))

    def describe(self) -> list[str]:
        """Return the report in lines, findings last."""
        lines = [
            f"rank {one.rank} ({one.host}, {one.device}): matmul {format_flops(one.matmul_flops_per_s)}, "
            f"memory {format_bandwidth(one.memory_bytes_per_s)}"
            for one in self.ranks
        ]
        lines += [
            f"all-reduce over {group.name}: {format_bandwidth(group.bus_bytes_per_s)} bus bandwidth"
            for group in self.groups
        ]
        hosts = {one.rank: one.host for one in self.ranks}
        for name, pairs in (("within a host", _pairs(self.pairs, hosts, True)), ("between hosts", _far(self, hosts))):
            if pairs:
                speeds = sorted(pair.bytes_per_s for pair in pairs)
                lines.append(
                    f"{len(pairs)} links {name}: {format_bandwidth(speeds[0])} to {format_bandwidth(speeds[-1])}"
                )
        for node in self.nodes:
            disk = "" if node.disk_bytes_per_s is None else f"disk {format_bandwidth(node.disk_bytes_per_s)}, "
            lines.append(f"host {node.host}: {disk}{format_bytes(node.memory_available_bytes)} of memory free")
        lines += [f"bad: {finding.text}" for finding in self.findings] or ["nothing stands out"]
        return lines


def with_findings(report: HealthReport) -> HealthReport:
    """Return the report with what stands out in it."""
    on_gpus = any(one.device != "CPU" for one in report.ranks)
    found = [*_wrong_values(report), *_slow_ranks(report, on_gpus=on_gpus), *_slow_links(report), *_poor_nodes(report)]
    return report.replace(findings=tuple(found))


def _wrong_values(report: HealthReport) -> Iterable[HealthFinding]:
    hosts = {one.rank: one.host for one in report.ranks}
    for pair in report.pairs:
        if not pair.is_right:
            a, b = pair.sender, pair.receiver
            yield HealthFinding(
                text=f"what rank {a} ({hosts[a]}) sends to rank {b} ({hosts[b]}) arrives changed",
                hosts=(hosts[a],) if hosts[a] == hosts[b] else (),
                ranks=(a, b),
            )


def _slow_ranks(report: HealthReport, *, on_gpus: bool) -> Iterable[HealthFinding]:
    for one in report.ranks:
        alike = [other for other in report.ranks if other.kind == one.kind]
        name = f"rank {one.rank} ({one.host}, {one.device})"
        usual = median_high([other.matmul_flops_per_s for other in alike])
        if one.matmul_flops_per_s < (_GPU_MATMUL if on_gpus else _CPU_MATMUL) * usual:
            yield _slow(name, one, "matmuls reach", format_flops(one.matmul_flops_per_s), format_flops(usual))
        elif one.peak_flops_per_s is not None and one.matmul_flops_per_s < _PEAK * one.peak_flops_per_s:
            text = f"{name}: matmuls reach {format_flops(one.matmul_flops_per_s)} of the data sheet's"
            peak = format_flops(one.peak_flops_per_s)
            yield HealthFinding(text=f"{text} {peak}", hosts=(one.host,), ranks=(one.rank,))
        usual = median_high([other.memory_bytes_per_s for other in alike])
        if one.memory_bytes_per_s < (_GPU_MEMORY if on_gpus else _CPU_MEMORY) * usual:
            reached, others = format_bandwidth(one.memory_bytes_per_s), format_bandwidth(usual)
            yield _slow(name, one, "memory reaches", reached, others)


def _slow(name: str, one: RankHealth, what: str, reached: str, usual: str) -> HealthFinding:
    return HealthFinding(
        text=f"{name}: {what} {reached}, the median of the ranks is {usual}", hosts=(one.host,), ranks=(one.rank,)
    )


def _pairs(pairs: Sequence[PairHealth], hosts: dict[int, str], inside: bool) -> list[PairHealth]:
    return [pair for pair in pairs if (hosts[pair.sender] == hosts[pair.receiver]) == inside]


def _far(report: HealthReport, hosts: dict[int, str]) -> list[PairHealth]:
    return _pairs(report.pairs, hosts, False)


def _slow_links(report: HealthReport) -> Iterable[HealthFinding]:
    hosts = {one.rank: one.host for one in report.ranks}
    near, far = _pairs(report.pairs, hosts, True), _far(report, hosts)
    on_gpus = any(one.device != "CPU" for one in report.ranks)
    for pair in near:
        usual = median_high([other.bytes_per_s for other in near])
        if pair.bytes_per_s < (_LINK if on_gpus else _CPU_LINK) * usual:
            a, b = pair.sender, pair.receiver
            yield HealthFinding(
                text=f"from rank {a} to rank {b} of {hosts[a]}: {format_bandwidth(pair.bytes_per_s)}, the median of "
                f"such links is {format_bandwidth(usual)}",
                hosts=(hosts[a],),
                ranks=(a, b),
            )
    if far:
        yield from _slow_networks(report, far, hosts)


def _slow_networks(report: HealthReport, far: Sequence[PairHealth], hosts: dict[int, str]) -> Iterable[HealthFinding]:
    usual = median_high([pair.bytes_per_s for pair in far])
    rated = min((node.network_bytes_per_s for node in report.nodes if node.network_bytes_per_s), default=None)
    slow = [pair for pair in far if pair.bytes_per_s < _LINK * usual]
    named = _hosts_behind(slow, far, hosts)
    for host, verb in named.items():
        mine = [pair for pair in slow if host in (hosts[pair.sender], hosts[pair.receiver])]
        reached = format_bandwidth(max(pair.bytes_per_s for pair in mine))
        yield HealthFinding(
            text=f"the network of host {host} is slow: it {verb} {reached}, the median of such links is "
            f"{format_bandwidth(usual)}",
            hosts=(host,),
        )
    for pair in slow:
        a, b = hosts[pair.sender], hosts[pair.receiver]
        if not {a, b} & named.keys():
            yield HealthFinding(
                text=f"from host {a} to host {b}: {format_bandwidth(pair.bytes_per_s)}, the median of such links is "
                f"{format_bandwidth(usual)}: what {a} sends or what {b} receives is slow",
                ranks=(pair.sender, pair.receiver),
            )
    if rated is not None and usual < _RATED * rated:
        yield HealthFinding(
            text=f"links between hosts reach {format_bandwidth(usual)}; the network cards are rated for "
            f"{format_bandwidth(rated)}"
        )


def _hosts_behind(slow: Sequence[PairHealth], far: Sequence[PairHealth], hosts: dict[int, str]) -> dict[str, str]:
    """Return the hosts whose links (two or more) are all slow in a direction; each slow link is put down to one."""
    found: dict[str, str] = {}
    left = list(slow)
    while left:
        candidates = []
        for host in dict.fromkeys(hosts.values()):
            for verb, of_pair in (("sends", "sender"), ("receives", "receiver")):
                measured = [pair for pair in far if hosts[getattr(pair, of_pair)] == host]
                mine = [pair for pair in left if pair in measured]
                if len(measured) > 1 and all(pair in slow for pair in measured) and mine:
                    candidates.append((len(mine), host, verb, mine))
        if not candidates:
            break
        _, host, verb, mine = max(candidates, key=lambda one: one[0])
        found[host] = f"{verb} at" if host not in found else "sends and receives at"
        left = [pair for pair in left if pair not in mine]
    return found


def _poor_nodes(report: HealthReport) -> Iterable[HealthFinding]:
    disks = [node.disk_bytes_per_s for node in report.nodes if node.disk_bytes_per_s is not None]
    memories = [node.memory_available_bytes for node in report.nodes if node.memory_available_bytes is not None]
    for node in report.nodes:
        if node.disk_bytes_per_s is not None and node.disk_bytes_per_s < _DISK * median_high(disks):
            usual = format_bandwidth(median_high(disks))
            text = (
                f"the disk of host {node.host} takes {format_bandwidth(node.disk_bytes_per_s)}, that of others {usual}"
            )
            yield HealthFinding(text=text, hosts=(node.host,))
        if node.memory_available_bytes is not None and node.memory_available_bytes < _MEMORY * median_high(memories):
            free, others = format_bytes(node.memory_available_bytes), format_bytes(median_high(memories))
            yield HealthFinding(text=f"host {node.host} has {free} of memory free, others {others}", hosts=(node.host,))
