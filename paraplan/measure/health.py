"""The ranks of a job look whether their machines are fit for it: `python -m paraplan.measure.health`.

Each rank times matmuls and its memory while the others do the same; then messages go between pairs, each checked for
its values, and all-reduces over the ranks of each host and over all. Rank 0 sets all of it side by side. It runs under
any launcher; `paraplan doctor` is this under `paraplan launch`.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch re-exports it from C++ unmarked
from torch.distributed.rendezvous import rendezvous

from paraplan.errors import CheckFailedError, UsageError
from paraplan.hardware.catalogue.profile_files import find_gpu
from paraplan.hardware.measurement.health import (
    GroupHealth,
    HealthReport,
    NodeHealth,
    PairHealth,
    RankHealth,
    with_findings,
)
from paraplan.runtime.torch_private import default_store
from paraplan.shared_memory import available_bytes

_GPU_EDGE, _CPU_EDGE = 8192, 512
_GPU_BYTES, _CPU_BYTES = 64 << 20, 4 << 20
_DISK_BYTES = 64 << 20
_PATTERN = 251  # a prime below 256: a message that is shifted or torn does not look like another's
_MESSAGES, _PAIR_S = 6, 0.5
"""From one rank to another: so many messages, or two where they take longer than this."""

_START_S = 120.0
_MOST_S = 86_400.0
REPORT_FILE = "health.json"
AT_FILE = "health-at-"
_REPORT = "report"
_SPEED_FOLDER = Path("/sys/class/net")


@dataclass(frozen=True)
class Place:
    """Where this rank is. `hosts` are those of all ranks, `control` is a group on the CPU, `notes` a folder or None."""

    rank: int
    size: int
    hosts: tuple[str, ...]
    device: torch.device
    control: Any
    notes: Path | None = None

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank])

    def note(self, text: str) -> None:
        """Leave what this rank is at, for the case that it hangs there."""
        if self.notes is not None:
            with suppress(OSError):
                (self.notes / f"{AT_FILE}{self.rank}").write_text(text)


def measure(place: Place, *, seconds: float) -> HealthReport | None:
    """Measure for about so long; return the report on rank 0, None on others. Every rank calls it."""
    started_s = time.monotonic()
    deadline_s = started_s + seconds
    mine = _measure_rank(place, share_s=min(2.0, 0.15 * seconds))
    pairs = _measure_pairs(place, deadline_s=deadline_s)
    groups = _measure_groups(place, share_s=min(2.0, 0.1 * seconds))
    node = _measure_node(place) if place.rank == place.mates[0] else None
    place.note("the end")
    note = HealthReport(
        ranks=(mine,), pairs=tuple(pairs), groups=tuple(groups), nodes=(node,) if node is not None else ()
    )
    store = default_store()
    store.set(f"{_REPORT}/{place.rank}", note.to_json(indent=None))
    if place.rank != 0:
        dist.barrier(group=place.control)
        return None
    notes = [HealthReport.model_validate_json(store.get(f"{_REPORT}/{rank}")) for rank in range(place.size)]
    dist.barrier(group=place.control)
    return with_findings(
        HealthReport(
            ranks=tuple(one for note in notes for one in note.ranks),
            pairs=tuple(pair for note in notes for pair in note.pairs),
            groups=tuple(group for note in notes for group in note.groups),
            nodes=tuple(node for note in notes for node in note.nodes),
            seconds=time.monotonic() - started_s,
        )
    )


def _measure_rank(place: Place, *, share_s: float) -> RankHealth:
    on_gpu = place.device.type == "cuda"
    edge, dtype = (_GPU_EDGE, torch.bfloat16) if on_gpu else (_CPU_EDGE, torch.float32)
    left, right = (torch.randn(edge, edge, device=place.device).to(dtype) for _ in range(2))
    place.note("matmuls")
    dist.barrier(group=place.control)
    product_s = _best_s(lambda: left @ right, place.device, share_s)
    source = torch.ones((_GPU_BYTES if on_gpu else 8 * _CPU_BYTES) // 4, device=place.device)
    target = torch.empty_like(source)
    place.note("its memory")
    dist.barrier(group=place.control)
    copy_s = _best_s(lambda: target.copy_(source), place.device, share_s / 2)
    kind = torch.cuda.get_device_name(place.device) if on_gpu else platform.machine()
    gpu = find_gpu(kind) if on_gpu else None
    return RankHealth(
        rank=place.rank,
        host=place.hosts[place.rank],
        device=f"GPU {place.device.index}" if on_gpu else "CPU",
        kind=kind,
        matmul_flops_per_s=2.0 * edge**3 / product_s,
        memory_bytes_per_s=2.0 * source.numel() * 4 / copy_s,
        peak_flops_per_s=gpu.peak("bf16") if gpu is not None else None,
    )


def _best_s(work: Callable[[], object], device: torch.device, share_s: float) -> float:
    """Return the lower quartile of the times of `work`: on a CPU of its own time, whatever else runs there."""
    clock = time.perf_counter if device.type == "cuda" or torch.get_num_threads() > 1 else time.thread_time
    work()
    times_s: list[float] = []
    deadline_s = time.monotonic() + share_s
    while len(times_s) < 4 or (time.monotonic() < deadline_s and len(times_s) < 500):
        began_s = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(clock() - began_s)
    return max(1e-9, sorted(times_s)[len(times_s) // 4])


def _measure_groups(place: Place, *, share_s: float) -> list[GroupHealth]:
    """Return the all-reduces that this rank leads: that of its host, and on rank 0 that of all ranks."""
    found = []
    hosts = list(dict.fromkeys(place.hosts))
    groups = [(f"the ranks of {host}", [r for r, name in enumerate(place.hosts) if name == host]) for host in hosts]
    groups += [("all ranks", list(range(place.size)))] if len(hosts) > 1 else []
    for name, ranks in groups:
        handle = dist.new_group(ranks) if len(ranks) < place.size else None  # every rank makes every group
        if place.rank not in ranks or len(ranks) < 2:
            continue
        place.note(f"an all-reduce over {name}")
        message = torch.ones((_GPU_BYTES if place.device.type == "cuda" else _CPU_BYTES) // 4, device=place.device)
        times_s = []
        deadline_s = time.monotonic() + share_s
        is_over = torch.zeros(1)
        while not is_over.item():
            began_s = time.perf_counter()
            dist.all_reduce(message, group=handle)
            if place.device.type == "cuda":
                torch.cuda.synchronize(place.device)
            times_s.append(time.perf_counter() - began_s)
            message.fill_(1.0)
            is_over[0] = float(time.monotonic() > deadline_s or len(times_s) > 50)
            dist.broadcast(is_over, src=ranks[0], group=handle)  # by gloo, which every group has
        if place.rank == ranks[0]:
            count = len(ranks)
            bus = 2 * (count - 1) / count * message.numel() * 4 / sorted(times_s)[len(times_s) // 4]
            found.append(GroupHealth(name=name, ranks=tuple(ranks), bus_bytes_per_s=bus))
    return found


def rounds_of_pairs(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which everybody meets everybody once: the circle method of a tournament."""
    circle: list[int | None] = [*members, *([None] if len(members) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(a, b) for a, b in met if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return rounds


def _rounds(place: Place) -> list[list[tuple[int, int]]]:
    """Return who sends to whom at the same time: all pairs of each host, then those of hosts.

    Between hosts each GPU meets those of its own number, by the network card next to it; of CPU ranks the first.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(place.hosts):
        by_host.setdefault(host, []).append(rank)
    inside = [rounds_of_pairs(ranks) for ranks in by_host.values() if len(ranks) > 1]
    merged = [
        [pair for rounds in inside if number < len(rounds) for pair in rounds[number]]
        for number in range(max(map(len, inside), default=0))
    ]
    ranks_each = min(map(len, by_host.values())) if place.device.type == "cuda" else 1
    across = [
        [(by_host[hosts[a]][local], by_host[hosts[b]][local]) for a, b in met for local in range(ranks_each)]
        for hosts in [list(by_host)]
        for met in rounds_of_pairs(range(len(hosts)))
    ]
    return merged + across


def _measure_pairs(place: Place, *, deadline_s: float) -> list[PairHealth]:
    """Return what this rank has received, round by round, until the time is over; one round is always there."""
    found = []
    for number, met in enumerate(_rounds(place)):
        left_s = torch.tensor([deadline_s - time.monotonic()])
        dist.all_reduce(left_s, op=dist.ReduceOp.MIN, group=place.control)
        if number and left_s.item() <= 0:
            break
        mine = next((pair for pair in met if place.rank in pair), None)
        if mine is not None:
            first, second = mine
            place.note(f"messages between rank {first} and rank {second}")
            for sender, receiver in ((first, second), (second, first)):
                received = _pass_message(place, sender, receiver)
                found += [received] if received is not None else []
    return found


def _pass_message(place: Place, sender: int, receiver: int) -> PairHealth | None:
    """Send messages from one rank to another and back a receipt for each; return what the receiver saw."""
    size = _GPU_BYTES if place.device.type == "cuda" else _CPU_BYTES
    sent = pattern_of(sender, size).to(place.device)
    receipt = torch.ones(1, device=place.device)  # 0: that was the last message
    if place.rank == sender:
        while receipt.item():
            dist.send(sent, receiver)
            dist.recv(receipt, receiver)
        return None
    buffer = torch.zeros_like(sent)
    times_s, is_right = [], True
    while receipt.item():
        buffer.zero_()
        began_s = time.perf_counter()
        dist.recv(buffer, sender)
        if place.device.type == "cuda":
            torch.cuda.synchronize(place.device)
        times_s.append(time.perf_counter() - began_s)
        is_right = is_right and bool(torch.equal(buffer, sent))
        receipt.fill_(float(len(times_s) < _MESSAGES and (len(times_s) < 2 or sum(times_s) < _PAIR_S)))
        dist.send(receipt, sender)
    best_s = min(times_s[1:])  # the first connects
    return PairHealth(sender=sender, receiver=receiver, bytes_per_s=size / best_s, is_right=is_right)


def pattern_of(rank: int, size: int) -> torch.Tensor:
    """Return the message of a rank: bytes that no other rank's message has in that order."""
    return ((torch.arange(size, dtype=torch.int32) * (rank + 1) + rank) % _PATTERN).to(torch.uint8)


def _measure_node(place: Place) -> NodeHealth:
    place.note("its disk")
    return NodeHealth(
        host=place.hosts[place.rank],
        disk_bytes_per_s=_disk_bytes_per_s(place.notes or Path.cwd()),
        memory_available_bytes=available_bytes(),
        network_bytes_per_s=_rated_bytes_per_s(os.environ.get("GLOO_SOCKET_IFNAME", "")),
    )


def _disk_bytes_per_s(folder: Path) -> float | None:
    """Return how fast a file is written and is on the disk; None where it cannot be."""
    data = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began_s = time.perf_counter()
            for _ in range(_DISK_BYTES >> 20):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return _DISK_BYTES / (time.perf_counter() - began_s)
    except OSError:
        return None


def _rated_bytes_per_s(interface: str) -> float | None:
    if not interface or interface.startswith("lo"):
        return None
    with suppress(OSError, ValueError):
        speed = int((_SPEED_FOLDER / interface / "speed").read_text())
        return speed * 1e6 / 8 if speed > 0 else None
    return None


def enter(*, seconds: float, notes: Path | None) -> Place:
    """Join the other ranks; the environment is the launcher's."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # whose time is the thread's own, whatever else runs on the cores
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    store, rank, size = next(rendezvous("env://"))
    # the script's ranks come to the same store later, and must not find the addresses of these
    store = PrefixStore("paraplan/health", store)
    timeout = timedelta(seconds=_START_S + seconds)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    store.set(f"{_REPORT}/host/{rank}", socket.gethostname())
    hosts = tuple(store.get(f"{_REPORT}/host/{other}").decode() for other in range(size))
    return Place(rank, size, hosts, device, dist.new_group(backend="gloo"), notes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as one rank; rank 0 writes the report, and fails with `CheckFailedError` where something stands out."""
    parser = argparse.ArgumentParser(prog="paraplan doctor", description="See whether machines are fit for a job.")
    parser.add_argument("--seconds", type=float, default=20.0, help="How long to measure, about. Default: 20.")
    parser.add_argument("--report", type=Path, help="Write all that was measured to this file, as JSON.")
    parser.add_argument("--json", action="store_true", help="Print it as JSON.")
    parser.add_argument("--preflight", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 0 < options.seconds < _MOST_S:
        parser.error(f"--seconds {options.seconds:g}: give a number above 0, and below {_MOST_S:g}")
    place = enter(seconds=options.seconds, notes=options.preflight)
    try:
        report = measure(place, seconds=options.seconds)
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()
    if report is None:
        return
    if options.preflight is not None:
        _write(options.preflight / REPORT_FILE, report)
        return
    sys.stdout.write((report.to_json() if options.json else "\n".join(report.describe())) + "\n")
    sys.stdout.flush()
    if options.report is not None:
        _write(options.report, report)
    if report.findings:
        raise CheckFailedError(report.findings[0].text, hint="leave it out, or repair it")


def _write(path: Path, report: HealthReport) -> None:
    try:
        path.write_text(report.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"the report {path} cannot be written: {error.strerror}", hint="name a file in a folder that is there"
        ) from error


if __name__ == "__main__":
    main()
