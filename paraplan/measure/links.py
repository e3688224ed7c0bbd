"""One rank that measures links: collectives on messages of several sizes, in one group of ranks after the other.

The messages S are those of nccl-tests: the whole buffer of all-reduce, all-to-all and send/receive, the whole result of
all-gather, the whole input of reduce-scatter. Run as a program it is ranks that measure (`rank`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from paraplan.hardware.measurement.links import MeasuredKind, MeasureRequest, RankEvent, collectives_of
from paraplan.measure.rank import run_ranks

_ELEMENT_BYTES = 4  # float32, as nccl-tests has it by default
_RUNS = 5  # the median of so many timings is reported
_MOST_REPEATS = 50

Work = Callable[[], object]


@dataclass(frozen=True)
class _Group:
    """A group of ranks as one of its members sees it; `handle` is torch's process group."""

    number: int
    ranks: tuple[int, ...]
    handle: Any
    device: torch.device

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def leads(self) -> bool:
        return dist.get_rank(self.handle) == 0


@dataclass
class _Clock:
    """The time that is left: for everything until `deadline`, and how many timings are to share it."""

    deadline: float
    timings_left: int

    def share_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic()) / max(1, self.timings_left)


def measure(request: MeasureRequest, report: Callable[[RankEvent], None]) -> None:
    """Measure what `request` asks for, as one rank of the default process group; every rank must call it.

    The first rank of each group reports. When the time is over, the rest is reported as left out.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if request.device == "cuda" else torch.device("cpu")
    handles = [dist.new_group(list(ranks)) for ranks in request.groups]
    _meet(None)
    clock = _Clock(deadline=time.monotonic() + request.max_seconds, timings_left=request.num_timings)
    for number, (ranks, handle) in enumerate(zip(request.groups, handles, strict=True)):
        if dist.get_rank() in ranks:
            _measure_group(_Group(number, ranks, handle, device), request, clock, report)
        else:
            clock.timings_left -= len(request.message_bytes) * len(collectives_of(len(ranks)))
        _meet(None)


def _measure_group(group: _Group, request: MeasureRequest, clock: _Clock, report: Callable[[RankEvent], None]) -> None:
    largest = _agree(group, _most_bytes(group.device), smallest=True)
    for collective in collectives_of(group.size):
        for num_bytes in request.message_bytes:
            clock.timings_left -= 1
            skipped = None
            if num_bytes > largest:
                skipped = f"messages above {int(largest)} bytes: too little free memory"
            elif _agree(group, clock.deadline - time.monotonic(), smallest=True) <= 0:
                skipped = "some messages: no time left"
            else:
                try:
                    work, exact_bytes = _work(collective, group, num_bytes)
                    time_s = _time(work, group, clock)
                except RuntimeError as error:
                    from paraplan.runtime.torch_private import NOT_SUPPORTED  # takes as long to import as torch

                    if group.device.type != "cpu" or NOT_SUPPORTED not in str(error):
                        raise
                    skipped = "not supported by gloo"
            if group.leads:
                if skipped is None:
                    report(RankEvent(group=group.number, collective=collective, num_bytes=exact_bytes, time_s=time_s))
                else:
                    report(RankEvent(group=group.number, collective=collective, skipped=skipped))


def _work(collective: MeasuredKind, group: _Group, num_bytes: int) -> tuple[Work, int]:
    """Return what is to be timed on buffers that exist already, and the bytes of its message: a multiple of n."""
    count = max(1, num_bytes // (_ELEMENT_BYTES * group.size))
    whole = torch.zeros(count * group.size, device=group.device)
    exact_bytes = whole.numel() * _ELEMENT_BYTES
    handle = group.handle
    if collective == "all_reduce":
        return (lambda: dist.all_reduce(whole, group=handle)), exact_bytes
    if collective == "all_gather":
        part = torch.zeros(count, device=group.device)
        gather = _named("all_gather_single", "all_gather_into_tensor")
        return (lambda: gather(whole, part, group=handle)), exact_bytes
    if collective == "reduce_scatter":
        part = torch.zeros(count, device=group.device)
        scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
        return (lambda: scatter(part, whole, group=handle)), exact_bytes
    received = torch.empty_like(whole)
    if collective == "all_to_all":
        return (lambda: dist.all_to_all_single(received, whole, group=handle)), exact_bytes
    return _send_and_receive(group, whole, received), exact_bytes


def _send_and_receive(group: _Group, sent: torch.Tensor, received: torch.Tensor) -> Work:
    position = dist.get_rank(group.handle)
    following, previous = group.ranks[(position + 1) % group.size], group.ranks[position - 1]

    def work() -> None:
        transfers = [
            dist.P2POp(dist.isend, sent, following, group.handle),
            dist.P2POp(dist.irecv, received, previous, group.handle),
        ]
        for pending in dist.batch_isend_irecv(transfers):
            pending.wait()

    return work


def _named(name: str, older_name: str) -> Callable[..., object]:
    """Return the function of torch.distributed under its present name, or as torch before 2.13 calls it."""
    found: Callable[..., object] = getattr(dist, name, None) or getattr(dist, older_name)
    return found


def _time(work: Work, group: _Group, clock: _Clock) -> float:
    """Return the time of one call: the median of several runs on the slowest rank, as far as the time allows.

    The first call connects and fills caches; the faster of two says how many the share of the time has room for. Where
    that is one, these two count beside it: no single stall of a busy machine decides.
    """
    _run(work, group, 1)
    single_s = [_run(work, group, 1) for _ in range(2)]
    first_s = min(single_s)
    share_s = clock.share_s()
    wanted = min(_MOST_REPEATS, max(1.0, share_s / (_RUNS * max(first_s, 1e-7))))
    repeats = int(_agree(group, wanted, smallest=True))
    runs = _RUNS if first_s * _RUNS <= max(share_s, 1e-3) else 1
    runs = int(_agree(group, float(runs), smallest=True))
    times = [_run(work, group, repeats) for _ in range(runs)] + (single_s if runs == 1 else [])
    return _agree(group, median(times), smallest=False)


def _run(work: Work, group: _Group, repeats: int) -> float:
    _meet(group.handle)
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    return (time.perf_counter() - started) / repeats


def _meet(handle: Any) -> None:
    """Wait for all ranks of a group, on the CPU, so that it takes nothing from the links that are measured."""
    dist.all_reduce(torch.zeros(1), group=handle)


def _agree(group: _Group, value: float, *, smallest: bool) -> float:
    """Return the smallest (or largest) of the values that the ranks of a group have."""
    agreed = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN if smallest else dist.ReduceOp.MAX, group=group.handle)
    return float(agreed.item())


def _most_bytes(device: torch.device) -> float:
    """Return the largest message: a quarter of the free memory of a GPU, for input, result and what NCCL takes."""
    if device.type == "cpu":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free / 4


def main() -> None:
    """Run ranks that measure links."""
    torch.set_num_threads(1)
    run_ranks(MeasureRequest, measure)


if __name__ == "__main__":
    main()
